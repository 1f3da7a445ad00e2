"""Times of what was done of an answer, from which its spans are made. Filled while it runs, and only where traces are
wanted.

    created ── waits ── began ── chunks of the prompt ── first_token ── ... ── ended

All times are seconds on the monotonic clock, which the processes of a machine share. A time that never came is None.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["MAX_CHUNKS", "Chunk", "ChunkClock", "Timeline"]

MAX_CHUNKS = 256
"""Chunks of one answer that are kept; more are counted only."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Times of a part of a prompt that one step computed: num_tokens from `position` on. num_rows: of the whole
    step.
    """

    began: float
    ended: float
    position: int
    num_tokens: int
    num_rows: int


@dataclass(slots=True, eq=False)
class Timeline:
    """Times of one answer, for its spans. The backend fills began and chunks, also from a worker thread,
    `RequestMetrics` the rest.

    num_chunks: also of those beyond MAX_CHUNKS.
    """

    created: float = field(default_factory=time.monotonic)
    began: float | None = None
    first_token: float | None = None
    ended: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    num_chunks: int = 0

    def begin(self, at: float) -> None:
        """Note when the answer's first step is planned. A run after a preemption does not count."""
        if self.began is None:
            self.began = at

    def add(self, chunk: Chunk) -> None:
        """Keep a chunk, or only count it beyond MAX_CHUNKS."""
        self.num_chunks += 1
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)

    def receive(self, has_token: bool, is_end: bool) -> None:
        """Note that an event of the answer has come."""
        now = time.monotonic()
        if has_token and self.first_token is None:
            self.first_token = now
        if is_end:
            self.ended = now


class ChunkClock:
    """Takes the times of the chunks of one sequence, from what `on_prefill` receives before each of them."""

    def __init__(self, timeline: Timeline, prompt_len: int, clock: Callable[[], float] = time.monotonic):
        self._timeline, self._prompt_len, self._clock = timeline, prompt_len, clock
        self._total = 0
        self._open: tuple[float, int] | None = None  # the chunk that runs: when it began, tokens done before it

    def __call__(self, done: int, total: int) -> None:
        """See PrefillProgress."""
        now = self._close(done)
        self._open, self._total = (now, done), total

    def finish(self) -> None:
        """End the last chunk: the prompt is computed. Safe to call again."""
        self._close(self._total)

    def _close(self, done: int) -> float:
        now = self._clock()
        if self._open is not None:
            began, before = self._open
            position, num_tokens = self._prompt_len - self._total + before, done - before
            self._timeline.add(Chunk(began, now, position, num_tokens, num_tokens))
            self._open = None
        return now
