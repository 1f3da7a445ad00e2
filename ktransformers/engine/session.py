"""One conversation on one static cache: remembers which tokens are in it and computes only what is new.

Does not know what a conversation looks like: it compares token ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.engine.card import ModelCard
from ktransformers.engine.generate import (
    Answer,
    Control,
    GenerateConfig,
    PrefillProgress,
    SequenceRunner,
    begin_answer,
)
from ktransformers.engine.hidden import HiddenTap
from ktransformers.engine.profiled import ProfileSlot
from ktransformers.models.facts import ModelFacts
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["Session", "SessionEngine", "common_prefix_len"]


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading entries are equal."""
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
    def tap(self) -> HiddenTap:
        return self._runner.tap

    def resume_len(self, shared: int) -> int:
        return self._runner.resume_len(shared)

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        del self.token_ids[start:]
        logits = self._runner.forward(token_ids, start, keep)
        self.token_ids.extend(token_ids)
        return logits


class SessionEngine(Protocol):
    """What a session is opened on: a loaded model that holds one sequence. config.chunk_size is chosen."""

    @property
    def config(self) -> EngineConfig:
        """Of the engine, resolved."""
        ...

    @property
    def facts(self) -> ModelFacts:
        """Of the model."""
        ...

    @property
    def runner(self) -> SequenceRunner:
        """What runs it."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Without vocabulary when the model's files carry none."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End an answer."""
        ...

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """What the model's authors recommend."""
        ...

    @property
    def description(self) -> str:
        """The model, in words."""
        ...

    @property
    def card(self) -> ModelCard:
        """The model, in figures."""
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
    ):
        """has_prefix_cache: False computes every prompt whole."""
        self._runner = _RecordingRunner(runner)
        self._config = GenerateConfig(chunk_size, tuple(eos_token_ids), tokenizer)
        self._has_prefix_cache = has_prefix_cache
        self._running: Iterator[TokenEvent] | None = None
        self._names = itertools.count()
        self.profile = ProfileSlot()  # what answers record, while a profile is written

    @classmethod
    def of(cls, engine: SessionEngine) -> Session:
        """A session as the engine's config says."""
        return cls(
            engine.runner,
            chunk_size=engine.config.chunk_size,
            eos_token_ids=engine.eos_token_ids,
            tokenizer=engine.tokenizer,
            has_prefix_cache=engine.config.prefix_cache,
        )

    @property
    def max_len(self) -> int:
        """Tokens the cache holds."""
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

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        should_stop: Callable[[], bool] | None = None,
        on_prefill: PrefillProgress | None = None,
        name: str | None = None,
    ) -> Iterator[TokenEvent]:
        """See Control, and `begin_answer`, whose errors this raises too, before any work. name: in profiles."""
        self._stop_running()
        control = Control(should_stop or (lambda: False), on_prefill=on_prefill)
        return self.run(self.begin(prompt_ids, params, name), control)

    def begin(self, prompt_ids: Sequence[int], params: SamplingParams, name: str | None = None) -> Answer:
        """An answer to be `run`. See begin_answer. name: of the answer in profiles."""
        profile = (self.profile, f"r{next(self._names)}" if name is None else name)
        return begin_answer(self._runner, prompt_ids, params, self._config, profile)

    def run(self, answer: Answer, control: Control) -> Iterator[TokenEvent]:
        """The events of an answer, up to its end or until it is suspended; in that case it may be run again.

        Others may be run in between: what they left of its keys and values is used, the rest is computed again.
        """
        self._stop_running()
        # The last token is always computed: its logits are not in the cache. Nor are those of the others.
        shared = min(common_prefix_len(self._runner.token_ids, answer.token_ids), len(answer.token_ids) - 1)
        if answer.needs_all or not self._has_prefix_cache:
            shared = 0
        self._running = answer.run(self._runner.resume_len(shared), control)
        return self._running

    def _stop_running(self) -> None:
        if isinstance(self._running, Generator):
            self._running.close()
        self._running = None
