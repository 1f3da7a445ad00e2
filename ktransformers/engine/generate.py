"""The loop that turns a prompt into an answer on one sequence: prefill in chunks, then one token at a time.

Knows a runner (ids and positions in, logits out), a sampler and a tokenizer. Does not know models, caches or who asked.

    positions   0 ........ cached_len ........ prompt_len ........ prompt_len + n
                already in the cache | prefill, in chunks | decode: token n is sampled for this position
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ktransformers.core import (
    PROMPT_LOGPROB_ROWS,
    FinishReason,
    GenerationStats,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from ktransformers.engine.sampler import RequestSampler, sample_batch, token_logprobs
from ktransformers.errors import ConfigError, ContextLengthError
from ktransformers.tokenizer.stream import TextStream
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["PrefillProgress", "SequenceRunner", "is_models_limit", "prefill_and_generate"]

PrefillProgress = Callable[[int, int], None]
"""Is told how many of the prompt's tokens are computed, and how many have to be: those that were not cached."""


class SequenceRunner(Protocol):
    """What runs a model on one sequence with a static cache of max_len positions."""

    @property
    def max_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        """Run token_ids at positions start, start + 1, ... and write their keys and values.

        start is at most the number of positions written before. Returns fp32 logits [len(keep), vocab_size] of the rows
        in keep, which are indices into token_ids.
        """
        ...


def is_models_limit(runner: SequenceRunner) -> bool:
    """Whether a runner's max_len is what its model takes, not what somebody chose. Runners need not know."""
    return bool(getattr(runner, "is_models_limit", False))


class _Answer:
    """The state of one call of prefill_and_generate."""

    def __init__(
        self,
        runner: SequenceRunner,
        prompt_ids: list[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        text: TextStream,
        stats: GenerationStats,
    ):
        self.runner, self.prompt_ids, self.params = runner, prompt_ids, params
        self.end_ids, self.text, self.stats = end_ids, text, stats
        self.sampler = RequestSampler(params, prompt_ids, runner.vocab_size)
        room = runner.max_len - len(prompt_ids)
        self.limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]

    def prefill(
        self, chunk_size: int, is_stopped: Callable[[], bool], on_prefill: PrefillProgress | None = None
    ) -> torch.Tensor | None:
        """Compute the prompt from cached_len on; logits [1, V] of its last token, or None when stopped in between."""
        logits, total, cached_len = None, len(self.prompt_ids), self.stats.cached_len
        if self._prompt_logprobs is not None:
            chunk_size = min(chunk_size, PROMPT_LOGPROB_ROWS)
        for start in range(cached_len, total, chunk_size):
            if is_stopped():
                return None
            if on_prefill is not None:
                on_prefill(start - cached_len, total - cached_len)
            began = time.perf_counter()
            chunk = self.prompt_ids[start : start + chunk_size]
            is_last = start + len(chunk) == total
            keep = range(len(chunk)) if self._prompt_logprobs is not None else [len(chunk) - 1] if is_last else []
            logits = self.runner.forward(chunk, start, keep)
            self._note_prompt_logprobs(logits, start)
            self.stats.prefill_seconds += time.perf_counter() - began
        return None if logits is None else logits[-1:]

    def _note_prompt_logprobs(self, logits: torch.Tensor, start: int) -> None:
        """logits [N, V] of positions start, start + 1, ...: each tells how likely the prompt token after it was."""
        if self._prompt_logprobs is None:
            return
        assert self.params.prompt_logprobs is not None
        followers = self.prompt_ids[start + 1 : start + 1 + len(logits)]
        self._prompt_logprobs += token_logprobs(logits[: len(followers)], followers, self.params.prompt_logprobs)

    def decode(self, token_id: int) -> torch.Tensor:
        began = time.perf_counter()
        logits = self.runner.forward([token_id], len(self.prompt_ids) + self.stats.completion_len - 1, [0])
        self.stats.decode_seconds += time.perf_counter() - began
        return logits

    def step(self, logits: torch.Tensor) -> TokenEvent:
        """Sample the next token and say what it means for the answer."""
        began, stats = time.perf_counter(), self.stats
        position = len(self.prompt_ids) + stats.completion_len
        (sampled,) = sample_batch(logits, [self.sampler], [position])
        token_id = sampled.token_id
        self.sampler.commit(token_id)
        if stats.completion_len:
            stats.decode_seconds += time.perf_counter() - began
        else:
            stats.prefill_seconds += time.perf_counter() - began
        stats.completion_len += 1
        if token_id in self.end_ids:
            text, stop_string = self.text.finish()
            reason, stop = FinishReason.STOP, stop_string or token_id
            return TokenEvent(token_id, text, stats, sampled.logprobs, reason, stop)
        text, stop_string = self.text.add(token_id)
        is_full = stats.completion_len >= self.limit
        if is_full and stop_string is None:
            rest, stop_string = self.text.finish()
            text += rest
        if stop_string is not None:
            return TokenEvent(token_id, text, stats, sampled.logprobs, FinishReason.STOP, stop_string)
        return TokenEvent(token_id, text, stats, sampled.logprobs, FinishReason.LENGTH if is_full else None)

    def aborted(self) -> TokenEvent:
        return TokenEvent(None, self.text.finish()[0], self.stats, finish_reason=FinishReason.ABORT)

    def run(
        self, chunk_size: int, is_stopped: Callable[[], bool], on_prefill: PrefillProgress | None = None
    ) -> Iterator[TokenEvent]:
        logits = self.prefill(chunk_size, is_stopped, on_prefill)
        while logits is not None:
            event = self.step(logits)
            if self._prompt_logprobs is not None and self.stats.completion_len == 1:
                event = replace(event, prompt_logprobs=tuple(self._prompt_logprobs))
            yield event
            if event.finish_reason is not None:
                return
            assert event.token_id is not None
            logits = None if is_stopped() else self.decode(event.token_id)
        yield self.aborted()


def _check(
    runner: SequenceRunner, prompt_ids: Sequence[int], params: SamplingParams, chunk_size: int, cached_len: int
) -> None:
    prompt_len = len(prompt_ids)
    if prompt_len == 0:
        raise ConfigError("the prompt is empty: there is nothing to continue")
    if prompt_len >= runner.max_len:
        limit, remedy = "the cache holds", " or start with a larger --cache_lens"
        if is_models_limit(runner):
            limit, remedy = "the model takes at most", ""
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens and {limit} {runner.max_len}: no room for an answer; "
            f"shorten the prompt{remedy}",
            prompt_len=prompt_len,
            max_len=runner.max_len,
        )
    for token_id in prompt_ids:
        if not 0 <= token_id < runner.vocab_size:
            raise ConfigError(
                f"the prompt holds token id {token_id}; this model's ids are 0 to {runner.vocab_size - 1}"
            )
    if cached_len and params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs need the whole prompt to be computed: cached_len must be 0")
    if chunk_size < 1:
        raise ConfigError(f"chunk_size must be at least 1, got {chunk_size}")
    if not 0 <= cached_len < prompt_len:
        raise ValueError(f"cached_len {cached_len} must leave at least one of {prompt_len} prompt tokens to compute")


def prefill_and_generate(
    runner: SequenceRunner,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    chunk_size: int,
    cached_len: int = 0,
    eos_token_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_prefill: PrefillProgress | None = None,
) -> Iterator[TokenEvent]:
    """Generate the answer to prompt_ids, one event per token. The last event carries the finish reason.

    chunk_size: most prompt tokens per forward. cached_len: leading prompt tokens whose keys and values `runner` already
    holds. eos_token_ids end the answer unless params.ignore_eos; params.stop_token_ids always do; neither kind of token
    has text. tokenizer None: no text, no stop strings. should_stop is asked before every forward; when it says yes the
    answer ends with ABORT. on_prefill is called before every forward of the prompt. max_tokens counts at most up to the
    end of the cache.

    Checks before any work: raises ConfigError for an empty prompt or ids outside of the vocabulary, ContextLengthError
    when the prompt leaves no room for an answer.
    """
    _check(runner, prompt_ids, params, chunk_size, cached_len)
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    stats = GenerationStats(prompt_len=len(prompt_ids), cached_len=cached_len)
    answer = _Answer(runner, list(prompt_ids), params, end_ids, TextStream(tokenizer, params.stop), stats)
    return answer.run(chunk_size, should_stop or (lambda: False), on_prefill)
