"""The scheduler's news of one request, turned into the events of one answer: text, stop strings, times.

Does not know who runs the scheduler, nor who reads.
"""

from __future__ import annotations

import time

from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent, TokenLogprobs
from ktransformers.errors import EngineError
from ktransformers.scheduler.records import RequestUpdate
from ktransformers.tokenizer.stream import TextStream
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["AnswerEvents"]


class AnswerEvents:
    """Feed updates with `hear`, in their order. stats is the object that every event carries.

    Raises ConfigError for stop strings without a vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_len: int):
        self.stats = GenerationStats(prompt_len=prompt_len)
        self._text = TextStream(tokenizer, params.stop)
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * prompt_len
        self._first_token_at = 0.0

    def hear(self, update: RequestUpdate, prefill_seconds: float | None) -> TokenEvent | None:
        """The event that `update` makes; None when it only scores a stretch of the prompt.

        prefill_seconds: comes once, with the first token. An event with a finish_reason whose update has none
        ended at a stop string: the scheduler has to be told. Raises EngineError when the answer cannot go on.
        """
        stats, scored = self.stats, update.prompt_logprobs
        if scored is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs[scored.start : scored.start + len(scored.entries)] = scored.entries
        if update.token_id is None and update.finish_reason is None:
            return None
        stats.cached_len, stats.completion_len = update.cached_len, update.completion_len
        if prefill_seconds is not None:
            stats.prefill_seconds = prefill_seconds
        now = time.perf_counter()
        if not self._first_token_at:
            self._first_token_at = now
        stats.decode_seconds = now - self._first_token_at
        if update.token_id is not None:
            return self._take(update, update.token_id)
        if update.error is not None:
            raise EngineError(update.error)
        return TokenEvent(None, self._text.finish()[0], stats, finish_reason=FinishReason.ABORT)

    def _take(self, update: RequestUpdate, token_id: int) -> TokenEvent:
        reason, stop = update.finish_reason, None
        if reason is FinishReason.STOP:
            text, stop_string = self._text.finish()
            stop = stop_string or token_id
        else:
            text, stop_string = self._text.add(token_id)
            if reason is FinishReason.LENGTH and stop_string is None:
                rest, stop_string = self._text.finish()
                text += rest
            stop = stop_string
        if stop_string is not None:
            reason = FinishReason.STOP
        prompt_logprobs = None
        if self._prompt_logprobs is not None and update.completion_len == 1:
            prompt_logprobs = tuple(self._prompt_logprobs)
        return TokenEvent(token_id, text, self.stats, update.logprobs, reason, stop, prompt_logprobs=prompt_logprobs)
