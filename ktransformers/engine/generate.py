"""The loop that turns a prompt into an answer on one sequence: prefill in chunks, then one token at a time.

Knows a runner (ids and positions in, logits out), a sampler and a tokenizer. Does not know models, caches or who asked.

    positions   0 ........ cached_len ........ prompt_len ........ prompt_len + n
                already in the cache | prefill, in chunks | decode: token n is sampled for this position
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ktransformers.core import PROMPT_LOGPROB_ROWS, AnswerEnd, FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.assembler import AnswerAssembler
from ktransformers.engine.constraints import check_rules, mask_of
from ktransformers.engine.hidden import HiddenTap, Pooled
from ktransformers.engine.profiled import AnswerProfile, ProfileSlot
from ktransformers.engine.sampler import RequestSampler, sample_batch, token_logprobs
from ktransformers.errors import ConfigError
from ktransformers.scheduler.limits import Limits
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = [
    "BegunAnswer",
    "GenerateConfig",
    "PrefillProgress",
    "SequenceRunner",
    "continue_answer",
    "prefill_and_generate",
]

PrefillProgress = Callable[[int, int], None]
"""Is told how many of the prompt's tokens are computed, and how many have to be: those that were not cached."""


class SequenceRunner(Protocol):
    """What runs a model on one sequence with a static cache of max_len positions."""

    @property
    def max_len(self) -> int:
        """Positions of the cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Logits of a row."""
        ...

    @property
    def is_models_limit(self) -> bool:
        """Whether max_len is what the model takes, so that a larger cache would not help."""
        ...

    @property
    def tap(self) -> HiddenTap:
        """Shows the hidden states of what `forward` runs."""
        ...

    def resume_len(self, shared: int) -> int:
        """The longest length up to `shared`, of which that many positions were written, that `forward` can start at."""
        ...

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        """Run token_ids at positions start, start + 1, ... and write their keys and values.

        start is one that `resume_len` gives, or the number of positions written before. Returns fp32 logits
        [len(keep), vocab_size] of the rows in keep, which are indices into token_ids.
        """
        ...


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """What is asked: a prompt, how tokens are chosen, and those of the answer that there are already."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    answer_ids: Sequence[int] = ()

    @property
    def known_len(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


class _Answer:
    """The state of one call of continue_answer. cached_len: known tokens that need not be computed."""

    def __init__(
        self,
        runner: SequenceRunner,
        begun: BegunAnswer,
        cached_len: int,
        end: AnswerEnd,
        assembler: AnswerAssembler,
        sampler: RequestSampler,
        profile: AnswerProfile,
    ):
        self.profile = profile
        self.runner, self.begun, self.end, self.assembler, self.sampler = runner, begun, end, assembler, sampler
        self.params, self.cached_len, self.stats = begun.params, cached_len, assembler.stats
        for token_id in begun.answer_ids:
            sampler.commit(token_id)
        sampler.begin()
        self._pooled = None if self.params.pooling is None else Pooled(self.params.pooling)

    def prefill(
        self, chunk_size: int, is_stopped: Callable[[], bool], on_prefill: PrefillProgress | None = None
    ) -> torch.Tensor | None:
        """Compute what is known from cached_len on; logits [1, V] of its last token, None when stopped in between."""
        logits, total, cached_len = None, self.begun.known_len, self.cached_len
        known_ids = [*self.begun.prompt_ids, *self.begun.answer_ids]
        if self.params.prompt_logprobs is not None:
            chunk_size = min(chunk_size, PROMPT_LOGPROB_ROWS)
        for start in range(cached_len, total, chunk_size):
            if is_stopped():
                return None
            if on_prefill is not None:
                on_prefill(start - cached_len, total - cached_len)
            began = time.perf_counter()
            chunk = known_ids[start : start + chunk_size]
            is_last = start + len(chunk) == total
            keep = range(len(chunk)) if self.params.prompt_logprobs is not None else [len(chunk) - 1] if is_last else []
            self.profile.begin(len(chunk), is_prefill=True, is_sampled=is_last)
            logits = self._run_chunk(chunk, start, keep)
            self._score(logits, start)
            if not is_last:
                self.profile.end_chunk()
            self.stats.prefill_seconds += time.perf_counter() - began
        return None if logits is None else logits[-1:]

    def _run_chunk(self, chunk: list[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        if self._pooled is None:
            return self.runner.forward(chunk, start, keep)
        with self.runner.tap.watch() as seen:
            logits = self.runner.forward(chunk, start, keep)
        self._pooled.add(seen[-1])  # the runner may have computed again what came before
        return logits

    def _score(self, logits: torch.Tensor, start: int) -> None:
        """logits [N, V] of positions start, start + 1, ...: each tells how likely the prompt token after it was."""
        if self.params.prompt_logprobs is not None:
            followers = self.begun.prompt_ids[start + 1 : start + 1 + len(logits)]
            self.assembler.score(
                start + 1, token_logprobs(logits[: len(followers)], followers, self.params.prompt_logprobs)
            )

    def decode(self, token_id: int) -> torch.Tensor:
        began = time.perf_counter()
        self.profile.begin(1, is_prefill=False, is_sampled=True)
        logits = self.runner.forward([token_id], len(self.begun.prompt_ids) + self.stats.completion_len - 1, [0])
        self.stats.decode_seconds += time.perf_counter() - began
        return logits

    def step(self, logits: torch.Tensor) -> TokenEvent:
        """Sample the next token and say what it means for the answer."""
        began, stats = time.perf_counter(), self.stats
        self.profile.sampling()
        position = len(self.begun.prompt_ids) + stats.completion_len
        (sampled,) = sample_batch(logits, [self.sampler], [position])
        token_id = sampled.token_id
        self.sampler.commit(token_id)
        self.sampler.begin()
        self.profile.end_token(token_id, stats.completion_len)
        if stats.completion_len > len(self.begun.answer_ids):
            stats.decode_seconds += time.perf_counter() - began
        else:
            stats.prefill_seconds += time.perf_counter() - began
        embedding = None if self._pooled is None or stats.completion_len else self._pooled.vector()
        reason = self.end.reason(token_id, stats.completion_len + 1)
        return self.assembler.token(token_id, sampled.logprobs, reason, embedding)

    def run(
        self, chunk_size: int, is_stopped: Callable[[], bool], on_prefill: PrefillProgress | None = None
    ) -> Iterator[TokenEvent]:
        reason = FinishReason.ABORT  # of an answer that is stopped, closed or fails
        try:
            logits = self.prefill(chunk_size, is_stopped, on_prefill)
            while logits is not None:
                event = self.step(logits)
                reason = event.finish_reason or reason
                yield event
                if event.finish_reason is not None:
                    return
                assert event.token_id is not None
                logits = None if is_stopped() else self.decode(event.token_id)
            yield self.assembler.aborted()
        finally:
            self.profile.ended(reason)


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """What all answers of a model share.

    chunk_size: most prompt tokens per forward. eos_token_ids end an answer unless params.ignore_eos. tokenizer None: no
    text, no stop strings. Raises ConfigError.
    """

    chunk_size: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, got {self.chunk_size}")


def prefill_and_generate(
    runner: SequenceRunner,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    config: GenerateConfig,
    *,
    cached_len: int = 0,
    should_stop: Callable[[], bool] | None = None,
    on_prefill: PrefillProgress | None = None,
    profile: tuple[ProfileSlot, str] | None = None,
) -> Iterator[TokenEvent]:
    """Generate the answer to prompt_ids, one event per token. The last event carries the finish reason.

    cached_len: leading prompt tokens whose keys and values `runner` already holds. params.stop_token_ids end the answer
    as its end tokens do; neither kind has text. should_stop is asked before every forward; when it says yes the answer
    ends with ABORT. on_prefill is called before every forward of the prompt. profile: where a recorder may be found
    before every forward, and what the answer is called there. max_tokens counts at most up to the end of the cache.

    Checks before any work: raises ConfigError for an empty prompt or ids outside of the vocabulary, ContextLengthError
    when the prompt leaves no room for an answer.
    """
    begun = BegunAnswer(prompt_ids, params)
    return continue_answer(
        runner,
        begun,
        config,
        cached_len=cached_len,
        should_stop=should_stop,
        on_prefill=on_prefill,
        profile=profile,
    )


def continue_answer(
    runner: SequenceRunner,
    begun: BegunAnswer,
    config: GenerateConfig,
    *,
    cached_len: int = 0,
    should_stop: Callable[[], bool] | None = None,
    on_prefill: PrefillProgress | None = None,
    profile: tuple[ProfileSlot, str] | None = None,
) -> Iterator[TokenEvent]:
    """The rest of an answer that was begun before, as prefill_and_generate would have gone on.

    cached_len counts the answer's tokens too. Raises ConfigError when the answer is over.
    """
    tokenizer, prompt_ids, params = config.tokenizer, begun.prompt_ids, begun.params
    has_vocabulary = tokenizer is not None and tokenizer.has_vocabulary
    Limits(
        max_len=runner.max_len,
        vocab_size=runner.vocab_size,
        has_vocabulary=has_vocabulary,
        is_models_limit=runner.is_models_limit,
    ).check(prompt_ids, params)
    prompt_len, known_len = len(prompt_ids), begun.known_len
    if not 0 <= cached_len < known_len:
        raise ValueError(f"cached_len {cached_len} must leave at least one of {known_len} known tokens to compute")
    if cached_len and params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs need the whole prompt to be computed: cached_len must be 0")
    end = AnswerEnd.of(params, config.eos_token_ids, runner.max_len - prompt_len)
    assembler = AnswerAssembler(tokenizer, params, prompt_len, min(cached_len, prompt_len))
    assembler.replay(begun.answer_ids, end)
    mask = None
    if tokenizer is not None:
        grammars = tokenizer.grammars(runner.vocab_size, config.eos_token_ids)
        check_rules(grammars, params)
        mask = mask_of(grammars, params)
    elif params.constraint is not None or params.reasoning is not None:
        raise ConfigError("constraint and reasoning are about text: they need a tokenizer")
    profiled = AnswerProfile(*(profile or (ProfileSlot(), "")), known_len, cached_len)
    sampler = RequestSampler(params, prompt_ids, runner.vocab_size, mask, eos_token_ids=config.eos_token_ids)
    answer = _Answer(runner, begun, cached_len, end, assembler, sampler, profiled)
    return answer.run(config.chunk_size, should_stop or (lambda: False), on_prefill)
