"""Tokens of one answer in, its events out: text, stop strings, reasons, counts, and where log probabilities belong.

Every way in ends here, with the scheduler's updates. Does not know who computes, nor who reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ktransformers.core import AnswerEnd, FinishReason, GenerationStats, SamplingParams, TokenEvent, TokenLogprobs
from ktransformers.errors import ConfigError, ConstraintError, EngineError
from ktransformers.scheduler.records import RequestUpdate
from ktransformers.tokenizer.stream import TextStream
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Turns the tokens of one answer into its events. stats is the object that every event carries.

    Raises ConfigError for stop strings without a vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_len: int, cached_len: int = 0):
        self.stats = GenerationStats(prompt_len=prompt_len, cached_len=cached_len)
        self._text = TextStream(
            tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * prompt_len
        self._first_token_at = 0.0

    def score(self, start: int, entries: Sequence[TokenLogprobs | None]) -> None:
        """Take log probabilities of the prompt's tokens from `start` on; all of them come before the first token."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[start : start + len(entries)] = entries

    def replay(self, token_ids: Sequence[int], end: AnswerEnd) -> None:
        """Take the tokens of an answer that was begun before: they count, and their text is not given again.

        Raises ConfigError when the answer ends with them.
        """
        for token_id in token_ids:
            event = self.token(token_id, None, end.reason(token_id, self.stats.completion_len + 1))
            if event.finish_reason is not None:
                why = "max_tokens, or the cache's end, was reached"
                if event.finish_reason is FinishReason.STOP:
                    why = "it ended with an end token or a stop string"
                raise ConfigError(f"there is nothing to continue after {self.stats.completion_len} tokens: {why}")

    def token(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        reason: FinishReason | None,
        embedding: bytes | None = None,
    ) -> TokenEvent:
        """Return the event of the next token. reason: why the answer ends with it, as far as tokens tell (AnswerEnd).

        An end token has no text. A stop string that the token completes ends the answer, whatever `reason` is.
        """
        self.stats.completion_len += 1
        text, stop = "", None
        if reason is not FinishReason.STOP:
            text, stop = self._text.add(token_id)
        if reason is not None and stop is None:
            rest, stop = self._text.finish()
            text += rest
        if stop is not None:
            reason = FinishReason.STOP
        scored = self._prompt_logprobs if self.stats.completion_len == 1 else None
        return TokenEvent(
            token_id,
            text,
            self.stats,
            logprobs,
            reason,
            token_id if reason is FinishReason.STOP and stop is None else stop,
            prompt_logprobs=None if scored is None else tuple(scored),
            embedding=embedding,
        )

    def leave_out(self, seconds: float) -> None:
        """Leave out the seconds for which the answer was suspended: `receive` does not count them as decoding."""
        if self._first_token_at:
            self._first_token_at += seconds

    def aborted(self) -> TokenEvent:
        """Return the last event of an answer that ends before it is complete."""
        return TokenEvent(None, self._text.finish()[0], self.stats, finish_reason=FinishReason.ABORT)

    def receive(self, update: RequestUpdate, prefill_seconds: float | None) -> TokenEvent | None:
        """Return the event of the scheduler's next update; None when it only scores a stretch of the prompt.

        prefill_seconds: comes once, with the first token. An event with a finish_reason whose update has none
        ended at a stop string: the scheduler has to be told. Raises EngineError when the answer cannot go on,
        ConstraintError where that is the request's own doing.
        """
        stats, scored = self.stats, update.prompt_logprobs
        if scored is not None:
            self.score(scored.start, scored.entries)
        if update.token_id is None and update.finish_reason is None:
            return None
        stats.cached_len = update.cached_len
        stats.num_drafted, stats.num_accepted = update.num_drafted, update.num_accepted
        if prefill_seconds is not None:
            stats.prefill_seconds = prefill_seconds
        now = time.perf_counter()
        if not self._first_token_at:
            self._first_token_at = now
        stats.decode_seconds = now - self._first_token_at
        if update.token_id is not None:
            return self.token(update.token_id, update.logprobs, update.finish_reason, update.embedding)
        if update.error is not None:
            raise ConstraintError(update.error) if update.is_refused else EngineError(update.error)
        return self.aborted()
