"""The loop that turns a prompt into an answer on one sequence: prefill in chunks, then one token at a time.

Knows a runner (ids and positions in, logits out), a sampler and a tokenizer. Does not know models, caches or who asked.

    positions   0 ........ cached_len ........ prompt_len ........ prompt_len + n
                already in the cache | prefill, in chunks | decode: token n is sampled for this position

An answer may be left before any forward and taken up later. Then all its tokens are a prompt: what the cache has lost
of them is computed again, and the sampler and the text go on where they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ktransformers.core import PROMPT_LOGPROB_ROWS, AnswerEnd, FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.damage.errors import NotFiniteError
from ktransformers.engine.sampling.constraints import check_rules, mask_of
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.sampling.sampler import RequestSampler, TokenMask, sample_batch, token_logprobs
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.engine.sequence.profiled import AnswerProfile, ProfileSlot
from ktransformers.engine.step.hidden import HiddenStatesHook, Pooled
from ktransformers.errors import ConfigError
from ktransformers.scheduler.limits import Limits
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = [
    "Control",
    "GenerateConfig",
    "Generation",
    "PartialGeneration",
    "PrefillProgress",
    "SequenceRunner",
    "begin_generation",
    "prefill_and_generate",
]

PrefillProgress = Callable[[int, int], None]
"""Receives how many of the prompt's tokens are computed, and how many have to be: those that were not cached."""


class SequenceRunner(Protocol):
    """Runs a model on one sequence with a static cache of max_len positions."""

    @property
    def max_len(self) -> int:
        """Number of positions of the cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: the logits of a row."""
        ...

    @property
    def is_models_limit(self) -> bool:
        """Whether max_len is what the model takes, so that a larger cache would not help."""
        ...

    @property
    def hook(self) -> HiddenStatesHook:
        """The hook that shows the hidden states of what `forward` runs."""
        ...

    def resume_len(self, shared: int) -> int:
        """Return the longest length up to `shared`, of which that many positions were written, that `forward` can start
        at."""
        ...

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        """Run token_ids at positions start, start + 1, ... and write their keys and values.

        start is one that `resume_len` gives, or the number of positions written before. Returns fp32 logits
        [len(keep), vocab_size] of the rows in keep, which are indices into token_ids.
        """
        ...

    def decode(self, token_id: int, position: int, need: int) -> StepLogits:
        """Run one token at the end of what is written, as `forward` does. need: see sampling/logits_request.py; more
        may come back."""
        ...


@dataclass(frozen=True, slots=True)
class PartialGeneration:
    """A prompt, how tokens are chosen, and those of its answer that there are already.

    cached_len: of the prompt, as it was told then; None: it is told now.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    answer_ids: Sequence[int] = ()
    cached_len: int | None = None

    @property
    def token_ids(self) -> list[int]:
        """The prompt, then the answer so far."""
        return [*self.prompt_ids, *self.answer_ids]

    @property
    def known_len(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """The settings that all answers of a model share.

    chunk_size: most prompt tokens per forward. eos_token_ids end an answer unless params.ignore_eos. tokenizer None: no
    text, no stop strings. has_head: whether the model generates text. find_damage: what to say of the weights where
    logits or an embedding are no numbers. Raises ConfigError.
    """

    chunk_size: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None
    has_head: bool = True
    find_damage: Callable[[], str] = str

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, got {self.chunk_size}")


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Control:
    """The callbacks by which a caller ends an answer or sets it aside, asked before every forward; should_stop comes
    first.

    should_stop: it ends with ABORT. should_suspend: it is left as it is, without an event, and may be run again.
    on_prefill: see PrefillProgress.
    """

    should_stop: Callable[[], bool] = _never
    should_suspend: Callable[[], bool] = _never
    on_prefill: PrefillProgress | None = None


class Generation:
    """An answer on its way, with all it depends on but keys and values: while suspended, others may use the runner.

    token_ids: the prompt, then the answer so far. stats: the object that every event carries. is_suspended: its last
    run was left; the next one goes on with the same tokens. Made by `begin_generation`, run by `prefill_and_generate`.
    """

    def __init__(
        self,
        runner: SequenceRunner,
        begun: PartialGeneration,
        config: GenerateConfig,
        end: AnswerEnd,
        mask: TokenMask | None,
        profile: AnswerProfile,
    ):
        prompt_ids, params = begun.prompt_ids, begun.params
        self.token_ids, self.params, self.is_suspended = [*prompt_ids, *begun.answer_ids], params, False
        self.output_processor = OutputProcessor(config.tokenizer, params, len(prompt_ids))
        self.output_processor.replay(begun.answer_ids, end)
        self.stats = self.output_processor.stats
        self._runner, self._chunk_size, self._end, self._profile = runner, config.chunk_size, end, profile
        self._find_damage = config.find_damage
        self._sampler = RequestSampler(
            params, list(prompt_ids), runner.vocab_size, mask, eos_token_ids=config.eos_token_ids
        )
        for token_id in begun.answer_ids:
            self._sampler.commit(token_id)
        self._sampler.begin()
        self._pooled: Pooled | None = None
        self._has_begun, self._told_cached_len = False, begun.cached_len

    @property
    def begun(self) -> PartialGeneration:
        """The answer as far as it got."""
        prompt_len = self.stats.prompt_len
        return PartialGeneration(tuple(self.token_ids[:prompt_len]), self.params, tuple(self.token_ids[prompt_len:]))

    @property
    def needs_all(self) -> bool:
        """Whether every token of the answer has to be computed: logits and hidden states are not cached."""
        pooling = self.params.pooling
        return self.params.prompt_logprobs is not None or (pooling is not None and pooling.needs_all)

    def must_leave(self, control: Control) -> bool:
        """Whether `control` stops or suspends the answer before its next forward. Sets is_suspended."""
        if control.should_stop():
            return True
        self.is_suspended = control.should_suspend()
        if self.is_suspended:
            self._profile.suspended()
        return self.is_suspended

    def abandon(self) -> None:
        """Give up a suspended answer, which is not to be run again: profiles note its end. On the thread that ran
        it."""
        self._profile.ended(FinishReason.ABORT)

    def resumed(self) -> None:
        """Note that the answer waits to be run again: profiles do not take that for suspended. From any thread."""
        self._profile.resumed()

    def prefill(self, cached_len: int, control: Control) -> torch.Tensor | None:
        """Compute the known tokens from cached_len on; logits [1, V] of the last one, None when stopped in between."""
        logits, chunk_size, total = None, self._chunk_size, len(self.token_ids)
        if self.params.prompt_logprobs is not None:
            chunk_size = min(chunk_size, PROMPT_LOGPROB_ROWS)
        for start in range(cached_len, total, chunk_size):
            if self.must_leave(control):
                return None
            if control.on_prefill is not None:
                control.on_prefill(start - cached_len, total - cached_len)
            began = time.perf_counter()
            chunk = self.token_ids[start : start + chunk_size]
            is_last = start + len(chunk) == total
            keep = range(len(chunk)) if self.params.prompt_logprobs is not None else [len(chunk) - 1] if is_last else []
            self._profile.begin(len(chunk), is_prefill=True, is_sampled=is_last)
            logits = self._run_chunk(chunk, start, keep)
            self._score(logits, start)
            if not is_last:
                self._profile.end_chunk()
            self._add_seconds(began)
        return None if logits is None else logits[-1:]

    def _add_seconds(self, began: float) -> None:
        seconds = time.perf_counter() - began
        if self.stats.completion_len:
            self.stats.decode_seconds += seconds
        else:
            self.stats.prefill_seconds += seconds

    def _run_chunk(self, chunk: list[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        if self._pooled is None:
            return self._runner.forward(chunk, start, keep)
        with self._runner.hook.watch() as seen:
            logits = self._runner.forward(chunk, start, keep)
        self._pooled.add(seen[-1])  # the runner may have computed again what came before
        return logits

    def _score(self, logits: torch.Tensor, start: int) -> None:
        """logits [N, V] of positions start, start + 1, ...: each tells how likely the prompt token after it was."""
        if self.params.prompt_logprobs is not None:
            followers = self.token_ids[start + 1 : min(start + 1 + len(logits), self.stats.prompt_len)]
            self.output_processor.score(
                start + 1, token_logprobs(logits[: len(followers)], followers, self.params.prompt_logprobs)
            )

    def decode_one_tokens(self) -> StepLogits:
        """Compute the last of token_ids. Returns the logits that the next one is sampled from."""
        began, position = time.perf_counter(), len(self.token_ids) - 1
        self._profile.begin(1, is_prefill=False, is_sampled=True)
        logits = self._runner.decode(self.token_ids[position], position, self._sampler.logits_request)
        self._add_seconds(began)
        return logits

    def sample(self, logits: StepLogits) -> TokenEvent:
        """Sample the next token and say what it means for the answer."""
        began, stats = time.perf_counter(), self.stats
        self._profile.sampling()
        try:
            (sampled,) = sample_batch(logits, [self._sampler], [len(self.token_ids)])
            embedding = None if self._pooled is None or stats.completion_len else self._pooled.vector()
        except NotFiniteError as error:
            raise error.with_damage(self._find_damage()) from None
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self._sampler.commit(token_id)
        self._sampler.begin()
        self._profile.end_token(token_id, stats.completion_len)
        self._add_seconds(began)
        reason = self._end.reason(token_id, stats.completion_len + 1)
        return self.output_processor.token(token_id, sampled.logprobs, reason, embedding)

    def begin_run(self, cached_len: int) -> None:
        """Make ready to compute all known tokens from cached_len on. Raises ValueError as prefill_and_generate does."""
        if not 0 <= cached_len < len(self.token_ids):
            raise ValueError(f"cached_len {cached_len} must leave at least one of {len(self.token_ids)} to compute")
        if cached_len and self.params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs need the whole prompt to be computed: cached_len must be 0")
        if not self._has_begun:
            self._has_begun, self._profile.cached_len = True, cached_len
            found_len = min(cached_len, self.stats.prompt_len)
            self.stats.cached_len = found_len if self._told_cached_len is None else self._told_cached_len

    def begin_turn(self) -> None:
        """Note that the answer runs from now on, until it ends or is suspended."""
        self.is_suspended = False
        self._profile.resumed()
        if self.params.pooling is not None and not self.stats.completion_len:
            self._pooled = Pooled(self.params.pooling)

    def ended(self, reason: FinishReason) -> None:
        """Note the answer's end in profiles."""
        self._profile.ended(reason)


def begin_generation(
    runner: SequenceRunner,
    begun: PartialGeneration,
    config: GenerateConfig,
    profile: tuple[ProfileSlot, str] | None = None,
) -> Generation:
    """Begin an answer of which nothing is computed yet, or the rest of one that was begun before, as it would have gone
    on.

    params.stop_token_ids end the answer as its end tokens do; neither kind has text. profile: where a recorder may be
    found before every forward, and what the answer is called there. max_tokens counts at most up to the end of the
    cache.

    Checks before any work: raises ConfigError for an empty prompt or ids outside of the vocabulary, ContextLengthError
    when the prompt leaves no room for an answer, and ConfigError for one that is over.
    """
    tokenizer, prompt_ids, params = config.tokenizer, begun.prompt_ids, begun.params
    has_vocabulary = tokenizer is not None and tokenizer.has_vocabulary
    Limits(
        max_len=runner.max_len,
        vocab_size=runner.vocab_size,
        has_vocabulary=has_vocabulary,
        has_head=config.has_head,
        is_models_limit=runner.is_models_limit,
    ).check(prompt_ids, params)
    prompt_len = len(prompt_ids)
    end = AnswerEnd.of(params, config.eos_token_ids, runner.max_len - prompt_len)
    mask = None
    if tokenizer is not None:
        grammars = tokenizer.grammars(runner.vocab_size, config.eos_token_ids)
        check_rules(grammars, params)
        mask = mask_of(grammars, params)
    elif params.constraint is not None or params.reasoning is not None:
        raise ConfigError("constraint and reasoning are about text: they need a tokenizer")
    slot, name = profile or (ProfileSlot(), "")
    return Generation(runner, begun, config, end, mask, AnswerProfile(slot, name, prompt_len, 0))


def prefill_and_generate(
    generation: Generation, cached_len: int = 0, control: Control | None = None
) -> Iterator[TokenEvent]:
    """Compute the known tokens of a generation, then one token after the other. Yields an event for each new token.

    The last event carries the finish reason; a generation that is suspended has none yet, and may be run again.
    cached_len: leading token_ids whose keys and values the runner holds; the last one is always computed. Raises
    ValueError for another number, before any work.
    """
    generation.begin_run(cached_len)
    return _events(generation, cached_len, control or Control())


def _events(generation: Generation, cached_len: int, control: Control) -> Iterator[TokenEvent]:
    reason = FinishReason.ABORT  # of one that is stopped, closed or fails
    generation.begin_turn()
    try:
        logits: StepLogits | None = generation.prefill(cached_len, control)
        while logits is not None:
            event = generation.sample(logits)
            reason = event.finish_reason or reason
            yield event
            if event.finish_reason is not None:
                return
            logits = None if generation.must_leave(control) else generation.decode_one_tokens()
        if not generation.is_suspended:
            yield generation.output_processor.aborted()
    finally:
        if not generation.is_suspended:
            generation.ended(reason)
