"""50 requests, and all that may happen to them and to the service: each has the tokens of its undisturbed run.

In process, with the real scheduler, executor and files. A service that ends leaves the files and what was told of each
answer, as a journal has it; the next one is asked for the rest. The oracle is one sequence on a static cache.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, SamplingParams
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.kernels.types import QuantType
from ktransformers.scheduler.tier_rates import Option, TierRates
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.engines.sequential import Session
from tests.support.engines.tiered_service import Service, tier_config
from tests.support.gguf.writer import write_gguf
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model

NUM_REQUESTS = 50
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 1.5, "top_k": 20, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 25))},
]
OPERATIONS = ["suspend"] * 8 + ["resume"] * 12 + ["harm"] * 2 + ["cancel", "kill", "restart"]


@dataclass
class Model:
    """One model twice: alone on a static cache, and in pages. wanted: of each request, in order."""

    config: EngineConfig
    requests: list[tuple[list[int], SamplingParams]]
    single: StaticEngine
    paged: Engine

    @cached_property
    def wanted(self) -> list[tuple[list[int], FinishReason]]:
        session = Session(self.single.runner, chunk_size=512, eos_token_ids=self.single.eos_token_ids)
        found = []
        for request in self.requests:
            events = list(session.generate(*request))
            reason = events[-1].finish_reason
            assert reason is not None
            found.append(([event.token_id for event in events if event.token_id is not None], reason))
        return found


def some_requests() -> list[tuple[list[int], SamplingParams]]:
    """Turns of conversations, the same prompt again, and others; lengths around those of pages and snapshots."""
    rng = random.Random(8)
    shared = [[rng.randrange(3, VOCAB_SIZE) for _ in range(140)] for _ in range(3)]
    made = []
    for at in range(NUM_REQUESTS):
        begun = rng.choice(shared)[: rng.choice((0, 15, 16, 64, 65, 100, 128, 140))]
        prompt = begun + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 1, 2, 17, 40)))]
        params = SamplingParams(seed=at, max_tokens=rng.choice((1, 5, 14, 30)), **KINDS[at % len(KINDS)])  # type: ignore[arg-type]
        made.append((prompt, params))
        if rng.random() < 0.1:
            made.append((prompt, replace(params, seed=at + 1000)))
    return made[:NUM_REQUESTS]


FAMILIES = ["qwen3_moe", "qwen3_next", "gpt_oss", "int8"]
"""Plain attention, recurrent layers, windows and sinks, and latents in codes."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder, family = tmp_path_factory.mktemp(request.param), request.param
    values: dict[str, object] = {"cpu_infer": 1, "cache_lens": 512, "self_check": False}
    if family == "qwen3_next":
        recurrent_model(family).save_pretrained(folder)
        values["model_path"] = folder
    else:
        made = tiny_model("deepseek_v3" if family == "int8" else family, seed=5)
        values["gguf_path"] = write_gguf(made, folder / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    if family == "int8":
        values["kv_type"] = "int8"
    config = EngineConfig(**values)  # type: ignore[arg-type]
    paged = build_engine(config, page_size=16, max_batch_size=4)
    found = Model(config, some_requests(), static_engine(config), paged)
    yield found
    found.single.close()
    found.paged.close()


class Whims(TierRates):
    """Fetching and computing in any mixture."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self._rng = rng

    def best(self, options: Sequence[Option]) -> int:
        return self._rng.choice((len(options) - 1, len(options) - 1, self._rng.randrange(len(options))))


class Mortal:
    """Writes files until its engine is killed."""

    def __init__(self) -> None:
        self.is_dead = False

    def write(self, fd: int, data: memoryview, /) -> int:
        if self.is_dead:
            raise OSError(errno.EIO, "killed")
        return os.write(fd, data)


@dataclass(slots=True)
class _Open:
    """A request that is here. told: before the service of now."""

    at: int
    told: list[int] = field(default_factory=list)
    is_suspended: bool = False


class World:
    """Services that follow each other, and what is known outside of them."""

    def __init__(self, model: Model, folder: Path, seed: int):
        self.model, self.folder, self.rng = model, folder, random.Random(seed)
        self.whims, self.seen = random.Random(seed), Counter[str]()
        page = tier_config(model.paged.cache)
        self.page_size = (16, 8)[seed % 2]
        self.num_pages = 14 * 16 // self.page_size + (0, 20)[seed // 2 % 2]  # the longest sequence takes 13 * 16 tokens
        self.tiers = {
            "host_pages": (12, 64, 4)[seed % 3],
            "host_states": (2, 20)[seed % 2] if model.paged.cache.num_states else 0,
            "disk_bytes": (20 * page.page_file_bytes + 8 * page.state_file_bytes, 1 << 30)[seed // 2 % 2],
        }
        self.open: dict[str, _Open] = {}
        self.answers: dict[int, list[int]] = {}
        self._start()

    def _start(self) -> None:
        self.system = Mortal()
        self.service = Service(
            self.model.paged,
            self.folder,
            self.num_pages,
            page_size=self.page_size,
            system=self.system,
            rates=Whims(self.whims),
            **self.tiers,
        )
        self.loop = self.service.loop

    def run(self) -> None:
        """All requests to their ends."""
        coming = list(range(len(self.model.requests)))
        while coming or self.open:
            if coming and len(self.open) < 12 and self.rng.random() < 0.5:
                self._add(_Open(coming.pop(0)))
                if len(coming) % 20 == 10:  # whatever the seed
                    self._kill()
                    self._restart()
            for _ in range(self.rng.randrange(1, 4)):
                self.loop.step()
                self._hear()
            if self.rng.random() < 0.5:
                self._disturb(self.rng.choice(OPERATIONS))
        self.loop.drain()
        stats = self.loop.scheduler.stats()
        assert (stats.num_used_pages, stats.num_running, stats.num_waiting, stats.num_suspended) == (0, 0, 0, 0)
        self._end()

    def _add(self, one: _Open) -> None:
        prompt, params = self.model.requests[one.at]
        name = self.loop.add(prompt, params, answer_ids=one.told, priority=one.at % 3)
        self.open[name] = one
        if one.is_suspended:
            assert self.loop.scheduler.suspend(name)

    def _hear(self) -> None:
        """What has ended."""
        for name, one in list(self.open.items()):
            answer = self.loop.answers[name]
            tokens, (wanted, reason) = one.told + answer.token_ids, self.model.wanted[one.at]
            assert tokens == wanted[: len(tokens)], f"request {one.at}"
            if answer.last is not None:
                del self.open[name]
                self.answers[one.at] = tokens
                assert answer.reason is FinishReason.ABORT or (tokens, answer.reason) == (wanted, reason)

    def _disturb(self, what: str) -> None:
        if not self.open:
            return
        name = self.rng.choice(list(self.open))
        self.seen[what] += 1
        if what == "suspend":
            self.open[name].is_suspended = self.loop.scheduler.suspend(name)
        elif what == "resume":
            assert self.loop.scheduler.resume(name) == self.open[name].is_suspended
            self.open[name].is_suspended = False
        elif what == "cancel":
            self.loop.abort(name)
            self._hear()
        elif what == "harm":
            self._harm()
        elif what == "kill":
            self._kill()
        else:
            self._restart()
        self.loop.scheduler.check_integrity()

    def _harm(self) -> None:
        """One file is not what it was."""
        path = self.rng.choice(sorted(self.folder.iterdir()))
        with suppress(FileNotFoundError):
            kind = self.rng.randrange(3)
            if kind == 0:
                path.unlink()
            elif kind == 1:
                os.truncate(path, path.stat().st_size // 2)
            else:
                data = bytearray(path.read_bytes())
                if data:
                    data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                    path.write_bytes(data)

    def _kill(self) -> None:
        """The engine alone. Another one follows, with the files of the first."""
        self._die()
        self.system.is_dead = False
        self.loop.crash()

    def _die(self) -> None:
        self.system.is_dead = True
        (self.folder / f"writing-{self.rng.randrange(99)}").write_bytes(b"torn")
        self._note()
        self.service.close()

    def _note(self) -> None:
        tiers, stats = self.service.stats(), self.loop.scheduler.stats()
        self.seen["preemptions"] = max(self.seen["preemptions"], stats.num_preemptions)
        self.seen["host hits"] += tiers.host_hit_len
        self.seen["disk hits"] += tiers.disk_hit_len

    def _restart(self) -> None:
        """All of it."""
        self._die()
        here, self.open = self.open, {}
        told = {name: one.told + self.loop.answers[name].token_ids for name, one in here.items()}
        self._start()
        for name, one in here.items():
            self._add(replace(one, told=told[name]))

    def _end(self) -> None:
        self._note()
        self.service.close()


@pytest.mark.every(3)
def test_whatever_happens(model: Model, tmp_path: Path, random_cases: Callable[[int, int], int]) -> None:
    seen = Counter[str]()
    for seed in range(random_cases(2, 3)):
        folder = tmp_path / str(seed)
        folder.mkdir(mode=0o700)
        world = World(model, folder, seed)
        world.run()
        assert world.answers.keys() == set(range(NUM_REQUESTS))
        assert not list(folder.glob("writing-*"))
        seen += world.seen
    wanted = {*OPERATIONS, "host hits", "disk hits", "preemptions"}
    assert all(seen[name] for name in wanted), seen
