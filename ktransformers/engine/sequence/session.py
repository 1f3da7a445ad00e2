"""A conversation on one static cache: remembers which tokens are in it and computes only what is new.

Does not know what a conversation looks like: it compares token ids.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.engine.damage.scan import DamageScan
from ktransformers.engine.model.card import ModelCard
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.sampling.sampler import draw_seed
from ktransformers.engine.sequence.generate import (
    Control,
    GenerateConfig,
    Generation,
    PartialGeneration,
    PrefillProgress,
    SequenceRunner,
    begin_generation,
    prefill_and_generate,
)
from ktransformers.engine.sequence.profiled import ProfileSlot
from ktransformers.engine.sequence.saved_session import SavedSession, read_saved, write_saved
from ktransformers.engine.sequence.session_store import StaticStore
from ktransformers.engine.step.hidden import HiddenStatesHook
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.scheduler.limits import Limits
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["Session", "SessionEngine", "common_prefix_len"]


_NOTHING = PartialGeneration((), SamplingParams(temperature=0.0))


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the leading entries that are equal in `a` and `b`."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


class _RecordingRunner:
    """A runner that notes what it wrote. A forward that fails leaves only what stands before it."""

    def __init__(self, runner: SequenceRunner):
        self._runner = runner
        self.is_models_limit = runner.is_models_limit
        self.token_ids: list[int] = []  # in the cache, by position

    @property
    def max_len(self) -> int:
        return self._runner.max_len

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def hook(self) -> HiddenStatesHook:
        return self._runner.hook

    def resume_len(self, shared: int) -> int:
        return self._runner.resume_len(shared)

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        del self.token_ids[start:]
        logits = self._runner.forward(token_ids, start, keep)
        self.token_ids.extend(token_ids)
        return logits

    def decode(self, token_id: int, position: int, need: int) -> StepLogits:
        del self.token_ids[position:]
        logits = self._runner.decode(token_id, position, need)
        self.token_ids.append(token_id)
        return logits


class SessionEngine(Protocol):
    """A loaded model that holds one sequence, on which a session is opened. config.chunk_size is chosen."""

    @property
    def config(self) -> EngineConfig:
        """The engine's config, resolved."""
        ...

    @property
    def facts(self) -> ModelFacts:
        """The facts of the engine's model."""
        ...

    @property
    def runner(self) -> SequenceRunner:
        """The runner of the engine's model."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, without vocabulary when the model's files carry none."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer."""
        ...

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """The generation settings that the model's authors recommend."""
        ...

    @property
    def description(self) -> str:
        """A description of the model in words."""
        ...

    @property
    def card(self) -> ModelCard:
        """The model's figures, as interfaces show them."""
        ...


class Session:
    """Generates answers one after the other and reuses the longest prefix that a prompt shares with the cache.

    The tokens are the same with and without reuse. A new call ends an answer that is still running.
    """

    def __init__(
        self,
        runner: SequenceRunner,
        *,
        chunk_size: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        has_prefix_cache: bool = True,
        store: StaticStore | None = None,
        has_head: bool = True,
        find_damage: Callable[[], str] = str,
    ):
        """Make a session over `runner`. has_prefix_cache: False computes every prompt whole. store: copies the runner's
        cache, for files.

        has_head: whether the model generates text, and not only embeddings. find_damage: see GenerateConfig.
        """
        self._runner = _RecordingRunner(runner)
        self._config = GenerateConfig(chunk_size, tuple(eos_token_ids), tokenizer, has_head, find_damage)
        self._has_prefix_cache = has_prefix_cache
        self._store = store
        self._running: Iterator[TokenEvent] | None = None
        self._last: Generation | PartialGeneration = _NOTHING  # the last answer
        self._names = itertools.count()
        self.profile = ProfileSlot()  # what answers record, while a profile is written

    @classmethod
    def of(cls, engine: SessionEngine, store: StaticStore | None = None) -> Session:
        """Make a session as the engine's config says. store: see the constructor."""
        return cls(
            engine.runner,
            chunk_size=engine.config.chunk_size,
            eos_token_ids=engine.eos_token_ids,
            tokenizer=engine.tokenizer,
            has_prefix_cache=engine.config.prefix_cache,
            store=store,
            has_head=engine.card.has_head,
            find_damage=DamageScan(engine.config).said,
        )

    @property
    def max_len(self) -> int:
        """Number of tokens that the cache holds."""
        return self._runner.max_len

    @property
    def is_models_limit(self) -> bool:
        """Whether max_len is what the model takes, so that a larger cache would not help."""
        return self._runner.is_models_limit

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """The tokens in the cache, by position."""
        return tuple(self._runner.token_ids)

    def clear(self) -> None:
        """Forget the cache, so that the next prompt is computed whole."""
        self._stop_running()
        self._runner.token_ids.clear()
        self._last = _NOTHING

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        should_stop: Callable[[], bool] | None = None,
        on_prefill: PrefillProgress | None = None,
        name: str | None = None,
    ) -> Iterator[TokenEvent]:
        """Generate an answer to a prompt. See Control, and `begin_generation`, whose errors this raises too, before any
        work. name: in profiles."""
        return self._generate(PartialGeneration(prompt_ids, params), should_stop, on_prefill, name)

    def continue_answer(
        self,
        session: SavedSession,
        params: SamplingParams | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_prefill: PrefillProgress | None = None,
    ) -> Iterator[TokenEvent]:
        """The rest of a saved session's last answer, as it would have gone on. See `generate`.

        params: others than its own, with more max_tokens, say. Raises ConfigError when the answer is over.
        """
        return self._generate(session.begun(params), should_stop, on_prefill)

    def _generate(
        self,
        begun: PartialGeneration,
        should_stop: Callable[[], bool] | None,
        on_prefill: PrefillProgress | None,
        name: str | None = None,
    ) -> Iterator[TokenEvent]:
        self._stop_running()
        control = Control(should_stop or (lambda: False), on_prefill=on_prefill)
        return self.run(self.resume(begun, name), control)

    def begin(self, prompt_ids: Sequence[int], params: SamplingParams, name: str | None = None) -> Generation:
        """Begin an answer, to be `run`. See begin_generation. name: of the answer in profiles."""
        return self.resume(PartialGeneration(prompt_ids, params), name)

    def resume(self, begun: PartialGeneration, name: str | None = None) -> Generation:
        """Begin the rest of an answer that was begun before, elsewhere perhaps, to be `run`. See `begin`."""
        if begun.params.seed is None:  # which a saved session must know
            begun = replace(begun, params=replace(begun.params, seed=draw_seed()))
        profile = (self.profile, f"r{next(self._names)}" if name is None else name)
        return begin_generation(self._runner, begun, self._config, profile)

    def run(self, answer: Generation, control: Control) -> Iterator[TokenEvent]:
        """Yield the events of an answer, up to its end or until it is suspended; in that case it may be run again.

        Others may be run in between: what they left of its keys and values is used, the rest is computed again.
        """
        self._stop_running()
        # The last token is always computed: its logits are not in the cache. Nor are those of the others.
        shared = min(common_prefix_len(self._runner.token_ids, answer.token_ids), len(answer.token_ids) - 1)
        if answer.needs_all or not self._has_prefix_cache:
            shared = 0
        self._last = answer
        self._running = prefill_and_generate(answer, self._runner.resume_len(shared), control)
        return self._running

    # Files.

    @property
    def saved_nbytes(self) -> int:
        """Bytes of keys, values and states that `save` would write. Raises UnsupportedError as it does."""
        return self._require_store().nbytes(len(self._runner.token_ids))

    def save(self, path: str | os.PathLike[str], messages: list[dict[str, Any]] | None = None) -> SavedSession:
        """Write the last prompt, its answer so far and what the cache keeps of them. The answer may go on.

        messages: the conversation, to be kept with it. Raises SessionFileError when it cannot be written, and
        UnsupportedError for a runner whose cache cannot be copied.
        """
        begun = self._last.begun if isinstance(self._last, Generation) else self._last
        return self.save_as(path, begun if begun.known_len else (), messages)

    def save_as(
        self,
        path: str | os.PathLike[str],
        session: PartialGeneration | Sequence[int],
        messages: list[dict[str, Any]] | None = None,
    ) -> SavedSession:
        """Save the tokens of `session` as `save` does: the cache keeps those that they share with the last prompt and
        answer."""
        store = self._require_store()
        known_ids = session.token_ids if isinstance(session, PartialGeneration) else session
        kept = store.take(common_prefix_len(self._runner.token_ids, known_ids))
        return write_saved(Path(path), store.identity, session, kept, messages)

    def load(self, path: str | os.PathLike[str], *, recompute: bool = False) -> SavedSession:
        """Put a saved session into the cache, in place of what is there: prompts that begin with it go on from there.

        recompute: take one that was computed in another way (on a GPU, say) for its tokens alone. Raises
        SessionFileError or ContextLengthError before anything is changed.
        """
        store = self._require_store()
        limits = Limits(max_len=self.max_len, vocab_size=self._runner.vocab_size, is_models_limit=self.is_models_limit)
        saved, file = read_saved(Path(path), store.identity, limits, recompute)
        if file is not None:
            store.check(file)
        self.clear()
        if file is not None:
            store.put(file)
            self._runner.token_ids.extend(saved.token_ids[: saved.cached_len])
        if saved.params is not None:
            self._last = saved.begun(None)
        return saved

    def _require_store(self) -> StaticStore:
        if self._store is None:
            raise UnsupportedError("this session's model does not let its cache be copied to a file")
        return self._store

    def _stop_running(self) -> None:
        if isinstance(self._running, Generator):
            self._running.close()
        self._running = None
