"""Counts and times of a request so far, for its line in the log and for the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ktransformers.core import FinishReason, GenerationStats, TokenEvent
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.telemetry.metrics import Metrics

__all__ = ["RequestMetrics"]


class RequestMetrics:
    """Counts and times of all generations behind one request. num_choices per prompt: a prompt counts once, not n
    times.
    """

    def __init__(self, requests: Sequence[GenerationRequest], n: int, metrics: Metrics):
        self.requests = requests
        self.goes_on = False  # without its client, when that has left
        self.error = ""  # the class of what ended the answers before they were complete
        self._stats: list[GenerationStats | None] = [None] * len(requests)
        self._n, self._metrics = n, metrics
        self._began = time.perf_counter()
        self._token_at = [0.0] * len(requests)
        self.first_token_seconds: float | None = None
        self.finish_reasons: list[str | None] = [None] * len(requests)
        self._open = set(range(len(requests)))
        self._drafts = [(0, 0)] * len(requests)  # run and accepted so far
        metrics.counts.num_started += len(requests)

    def note(self, index: int, event: TokenEvent) -> None:
        """Count an event of choice `index`, now."""
        self._stats[index] = event.stats
        self._note_drafts(index, event.stats)
        timeline = self.requests[index].timeline
        if timeline is not None:
            timeline.receive(event.token_id is not None, event.finish_reason is not None)
        now = time.perf_counter()
        if event.token_id is not None:
            counts = self._metrics.counts
            counts.answer_tokens += 1
            if not self._token_at[index]:
                counts.prompt_tokens += event.stats.prompt_len - event.stats.cached_len
            if self._token_at[index]:
                self._metrics.inter_token.observe(now - self._token_at[index])
            else:
                self._metrics.first_token.observe(now - self._began)
                if self.first_token_seconds is None:
                    self.first_token_seconds = now - self._began
            self._token_at[index] = now
        if event.finish_reason is not None:
            self._open.discard(index)
            self._metrics.finished(event.finish_reason, event.stats, now - self._began)

    def _note_drafts(self, index: int, stats: GenerationStats) -> None:
        before, self._drafts[index] = self._drafts[index], (stats.num_drafted, stats.num_accepted)
        if self._drafts[index] != before:
            self._metrics.drafted(stats.num_drafted - before[0], stats.num_accepted - before[1])

    def close(self) -> None:
        """Count the answers that nobody waits for any more: their tokens were computed all the same."""
        for index in self._open:
            stats, reason, timeline = self._stats[index], self.finish_reasons[index], self.requests[index].timeline
            if timeline is not None:
                timeline.receive(False, True)
            if stats is not None:
                self._metrics.finished(
                    FinishReason.ABORT if reason is None else FinishReason.STOP,
                    stats,
                    time.perf_counter() - self._began,
                )
        self._open.clear()

    @property
    def prompt_len(self) -> int:
        """Number of tokens of all prompts, each counted once; known from the beginning."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self._n])

    @property
    def num_answers(self) -> int:
        """Number of answers to each prompt."""
        return self._n

    def stats(self, index: int) -> GenerationStats | None:
        """Return the stats of one answer; None before its first event."""
        return self._stats[index]

    @property
    def total(self) -> GenerationStats:
        """The sum of the stats of all answers. Times add up too: they are the engine's work on this request."""
        known = [stats for stats in self._stats if stats is not None]
        firsts = [stats for stats in self._stats[:: self._n] if stats is not None]
        return GenerationStats(
            prompt_len=sum(stats.prompt_len for stats in firsts),
            cached_len=sum(stats.cached_len for stats in firsts),
            completion_len=sum(stats.completion_len for stats in known),
            prefill_seconds=sum(stats.prefill_seconds for stats in known),
            decode_seconds=sum(stats.decode_seconds for stats in known),
            num_drafted=sum(stats.num_drafted for stats in known),
            num_accepted=sum(stats.num_accepted for stats in known),
        )
