"""Packed, chunked, preempted, resumed, shared, restarted: each request's tokens are those it gets alone, bit by bit.

The oracle is the single engine: one sequence on a static cache (itself compared with transformers elsewhere).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.core import FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.sampling.sampler import RequestSampler, sample_batch
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.executor_parts import ExecutorParts
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import CapacityError, KTransformersError
from ktransformers.kernels.types import QuantType
from ktransformers.tokenizer.grammars import pack_ids
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.sequential import Session
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model, write_safetensors

PAGE = 8
Case = tuple[list[int], SamplingParams]


class Pair:
    """One model twice: alone on a static cache, and paged."""

    def __init__(self, path: Path, num_pages: int):
        """path: a GGUF file, or a folder with safetensors."""
        where = {"model_path" if path.is_dir() else "gguf_path": path}
        config = EngineConfig(cpu_infer=1, **where)  # type: ignore[arg-type]
        self.single: StaticEngine = static_engine(replace(config, cache_lens=512))
        self.paged: Engine = build_engine(
            replace(config, cache_lens=num_pages * PAGE), page_size=PAGE, max_batch_size=32
        )
        self._known: dict[tuple[tuple[int, ...], str], list[TokenEvent]] = {}

    def alone(self, case: Case) -> list[TokenEvent]:
        prompt, params = case
        key = (tuple(prompt), repr(params))
        if key not in self._known:
            engine = self.single
            session = Session(engine.runner, chunk_size=512, eos_token_ids=engine.eos_token_ids)
            self._known[key] = list(session.generate(prompt, params))
        return self._known[key]

    def executor(self, num_pages: int | None = None, parts: ExecutorParts | None = None) -> PagedExecutor:
        """A fresh one over an empty cache, the weights shared."""
        paged = self.paged
        cache = PagedCache(paged.cache.shapes, num_pages or paged.cache.num_pages, PAGE)
        runner = ModelRunner(ForwardPass(self.paged_model, paged.pool))
        return PagedExecutor(runner, cache, paged.pool, paged.model.vocab_size, parts)

    @property
    def paged_model(self) -> object:
        return self.paged.executor.runner.model  # type: ignore[attr-defined]

    def close(self) -> None:
        self.single.close()
        self.paged.close()


def tiny_pair(model_type: str, folder: Path) -> Pair:
    if model_type == "deepseek_v4":  # of which there are no GGUF files that we know
        return Pair(write_safetensors(tiny_model(model_type, seed=5, layers=3), folder), num_pages=200)
    model = tiny_model(model_type, seed=5, hidden=64)
    return Pair(write_gguf(model, folder / "model.gguf", QuantType.Q8_0, QuantType.Q8_0), num_pages=200)


@pytest.fixture(scope="module", params=["gpt_oss", "deepseek_v3", "deepseek_v4"])  # windows and sinks; latents; entries
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = tiny_pair(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    made = Pair(next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf")))), num_pages=400)
    yield made
    made.close()


def mixed_cases(vocab_size: int, count: int, longest: int, seed: int = 0) -> list[Case]:
    """Every kind of sampling, lengths from 1 up, some with a common beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(40)]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20, "min_p": 0.02, "logprobs": 3},
        {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "logprobs": 0, "logit_bias": {3: 5.0, 7: -100.0}},
        {"temperature": 1.0, "stop_token_ids": tuple(range(0, vocab_size, 25))},
        {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": tuple(range(5, 50))},
    ]
    cases = []
    for i in range(count):
        length = rng.choice((1, 2, PAGE, PAGE + 1, rng.randint(1, longest), longest))
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        if i % 3 == 0:
            prompt = shared[: rng.randint(1, 40)] + prompt
        params = SamplingParams(**{"seed": i, "max_tokens": rng.randint(1, 24), **kinds[i % len(kinds)]})  # type: ignore[arg-type]
        cases.append((prompt, params))
    return cases


def check(pair: Pair, loop: PagedLoop, cases: dict[str, Case], aborted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    for name, case in cases.items():
        answer, wanted = loop.answers[name], pair.alone(case)
        tokens = [event.token_id for event in wanted]
        if name in aborted and answer.reason is FinishReason.ABORT:
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            continue
        assert answer.token_ids == tokens, name
        assert answer.reason is wanted[-1].finish_reason
        assert answer.logprobs == [event.logprobs for event in wanted]
    assert loop.executor.num_runs <= loop.config.max_running  # runs that ended with the last step are not known to yet


@pytest.mark.every(5)
@pytest.mark.parametrize(("chunk_size", "max_batch_size"), [(16, 1), (16, 4), (256, 4), (256, 32), (16, 32)])
@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_mixed_requests(pair: Pair, chunk_size: int, max_batch_size: int, has_prefix_cache: bool) -> None:
    config = scheduler_config(
        pair.paged, chunk_size=chunk_size, max_batch_size=max_batch_size, has_prefix_cache=has_prefix_cache
    )
    loop = PagedLoop(config, pair.executor)
    cases = {loop.add(*case): case for case in mixed_cases(pair.paged.model.vocab_size, 14, 60)}
    loop.drain()
    check(pair, loop, cases)
    if max_batch_size < 32 and has_prefix_cache:  # more at once, and all begin before anyone has finished a page
        assert loop.scheduler.stats().prefix_hit_len > 0


@pytest.mark.every(3)
def test_preemption_aborts_and_lost_engines(pair: Pair) -> None:
    """15 pages of 8 for 16 sequences of up to 110 tokens: they throw each other out. Then engines die as well."""
    config = scheduler_config(pair.paged, num_pages=15, max_batch_size=8, chunk_size=32)
    loop = PagedLoop(config, lambda: pair.executor(15))
    cases = {loop.add(*case): case for case in mixed_cases(pair.paged.model.vocab_size, 16, 60, seed=1)}
    aborted = set()
    names, rng = list(cases), random.Random(3)
    while loop.step():
        if loop.num_steps in (9, 31, 44):
            loop.crash()
        if rng.random() < 0.05:
            aborted.add(rng.choice(names))
            loop.abort(list(aborted)[-1])
    check(pair, loop, cases, aborted)
    stats = loop.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_engine_losses == 3
    assert stats.num_used_pages == 0


@pytest.mark.every(3)
def test_suspended_and_resumed_whatever_happens(pair: Pair) -> None:
    """In every kind of sampling, of two priorities, short of pages, with engines that die."""
    config = scheduler_config(pair.paged, num_pages=24, max_batch_size=8, chunk_size=16)
    loop, cases, rng = PagedLoop(config, lambda: pair.executor(24)), {}, random.Random(5)
    for at, case in enumerate(mixed_cases(pair.paged.model.vocab_size, 10, 40, seed=6)):
        cases[loop.add(*case, priority=at % 2)] = case
    loop.disturb(rng)
    check(pair, loop, cases)
    stats = loop.scheduler.stats()
    assert stats.num_engine_losses > 0
    assert stats.num_used_pages == 0


def test_a_prefix_hit_is_bit_exact_and_salted(pair: Pair) -> None:
    loop = PagedLoop(scheduler_config(pair.paged), pair.executor)
    case = (list(range(3, 43)), SamplingParams(seed=1, max_tokens=9, logprobs=2))
    first = loop.add(*case)
    loop.drain()
    second, salted = loop.add(*case), loop.add(*case, cache_salt="tenant")
    loop.drain()
    check(pair, loop, dict.fromkeys((first, second, salted), case))
    last = loop.answers[second].last
    assert last is not None
    assert last.cached_len == 32  # whole pages of the 40 tokens, the last token excepted
    assert loop.answers[salted].last.cached_len == 0  # type: ignore[union-attr]


def test_prompt_logprobs(pair: Pair) -> None:
    prompt = [(7 * i) % pair.paged.model.vocab_size for i in range(100)]
    case = prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=2)
    wanted = pair.alone(case)
    loop = PagedLoop(scheduler_config(pair.paged, chunk_size=256, num_pages=24), lambda: pair.executor(24))
    plain = loop.add(prompt, SamplingParams(temperature=0, max_tokens=30))  # fills the prefix cache, and takes pages
    names = [loop.add(*case) for _ in range(2)]
    loop.step()
    loop.crash()
    loop.drain()
    for name in names:
        assert tuple(loop.answers[name].prompt_logprobs) == wanted[0].prompt_logprobs
        assert loop.answers[name].token_ids == [event.token_id for event in wanted]
    assert loop.answers[plain].token_ids


def test_the_bundled_model(demo: Pair) -> None:
    for chunk_size, max_batch_size in ((16, 4), (256, 32)):
        loop = PagedLoop(
            scheduler_config(demo.paged, chunk_size=chunk_size, max_batch_size=max_batch_size), demo.executor
        )
        cases = {loop.add(*case): case for case in mixed_cases(demo.paged.model.vocab_size, 12, 150, seed=4)}
        loop.drain()
        check(demo, loop, cases)


class _Broken:
    """A runner whose rows for one position hold NaN."""

    def __init__(self, runner: ModelRunner, position: int):
        self._runner, self._position = runner, position

    def reduced_step(self, batch: ForwardBatch, needs: Sequence[int] | None) -> torch.Tensor:
        logits = self._runner.step(batch).clone()
        logits[batch.positions[batch.keep] == self._position] = float("nan")
        return logits


def test_a_row_without_numbers_ends_its_request_only(pair: Pair) -> None:
    def executor() -> PagedExecutor:
        made = pair.executor()
        made.runner = _Broken(made.runner, 12)  # type: ignore[arg-type]
        return made

    loop = PagedLoop(scheduler_config(pair.paged), executor)
    short = ([1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    good = loop.add(*short)
    bad = loop.add(list(range(10)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    loop.drain()
    check(pair, loop, {good: short})
    last = loop.answers[bad].last
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    assert "nan as the logit" in (last.error or "")
    assert len(loop.answers[bad].token_ids) == 3  # positions 10, 11, 12


class FakeMask:
    """Knows the answer so far."""

    def __init__(self) -> None:
        self.answer_ids: list[int] = []

    def commit(self, token_id: int) -> None:
        self.answer_ids.append(token_id)

    def begin(self) -> None:
        """Nothing takes time here."""


def test_a_mask_decides_what_may_come_next() -> None:
    class Alternating(FakeMask):
        def allowed(self) -> np.ndarray | None:
            count = len(self.answer_ids)
            if count == 3:
                return pack_ids([], 10)
            return pack_ids([4 if count % 2 else 7], 10) if count else None

    logits = torch.arange(10.0)[None]
    sampler = RequestSampler(SamplingParams(temperature=0), [1], 10, Alternating())
    chosen = []
    for _ in range(3):
        chosen.append(sample_batch(logits, [sampler], [0])[0].token_id)
        sampler.commit(chosen[-1])
    assert chosen == [9, 4, 7]
    with pytest.raises(KTransformersError, match="exclude each other"):
        sample_batch(logits, [sampler], [0])


@pytest.mark.every(3)
def test_masks_bind_runs_and_survive_preemption_and_loss(pair: Pair) -> None:
    """A mask of the tokens that differ from the last one by one: its answers show that it knows the answer so far."""
    vocab = pair.paged.model.vocab_size

    class Neighbours(FakeMask):
        def allowed(self) -> np.ndarray:
            last = self.answer_ids[-1] if self.answer_ids else 50
            return pack_ids([last - 1, last + 1], vocab)

    def executor() -> PagedExecutor:
        return pair.executor(12, ExecutorParts(mask_of=lambda start: Neighbours() if start.params.seed else None))

    loop = PagedLoop(scheduler_config(pair.paged, num_pages=12), executor)
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    masked = [loop.add([1, 2, 3 + i], params) for i in range(3)]
    free_case = ([1, 2, 3], SamplingParams(seed=0, max_tokens=30, ignore_eos=True))
    free = loop.add(*free_case)
    for _ in range(6):
        loop.step()
    loop.crash()
    loop.drain()
    check(pair, loop, {free: free_case})
    for name in masked:
        walk = [50, *loop.answers[name].token_ids]
        assert len(walk) == 31
        assert all(abs(b - a) == 1 for a, b in itertools.pairwise(walk))


def test_pages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = EngineConfig(gguf_path=write_gguf(tiny_model("llama", seed=1), tmp_path / "m.gguf"), cpu_infer=1)
    with pytest.raises(CapacityError, match="kv cache"):
        build_engine(replace(config, cache_lens=10**12), page_size=256, max_batch_size=4)
    engine = build_engine(replace(config, cache_lens=1000), page_size=256, max_batch_size=4)
    assert (engine.cache.num_pages, engine.config.cache_lens) == (4, 1024)
    engine.close()
