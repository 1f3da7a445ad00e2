"""Lines of the log about the service itself: how loading goes, how busy it is, and what it did when it ends.

Pure text from counts and a clock that tests set; lifecycle.py says when.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ktransformers.core import CAPTURING, COMPILING, Progress
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.telemetry.metrics import Counts
from ktransformers.system.file_kinds import size_of

__all__ = ["LoadSummary", "LoadingLog", "duration", "farewell", "watch_loading"]

logger = logging.getLogger("ktransformers.server")

SUMMARY_SECONDS = 10.0
_MARKS = (25, 50, 75)
Clock = Callable[[], float]


def duration(seconds: float) -> str:
    """Return a time for people: "12.3 s", "4 min 5 s", "3 h 12 min", "2 d 3 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for large, small, name, below in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            return f"{whole // large} {name} {whole % large // small} {below}"
    raise AssertionError


class LoadSummary:
    """Makes a line about the time since the last one; none when nobody asked for anything."""

    def __init__(self, backend: BackendInterfaceBase, counts: Counts, clock: Clock = time.monotonic):
        self._backend, self._counts, self._clock = backend, counts, clock
        self._before, self._at = replace(counts), clock()

    def line(self) -> str | None:
        """Return a line on what is running now, and the rates since the last call. None when idle."""
        now, counts, before = self._clock(), replace(self._counts), self._before
        seconds = max(now - self._at, 1e-9)
        self._before, self._at = counts, now
        stats = self._backend.stats()
        if counts == before and not stats.num_running and not stats.num_waiting:
            return None
        prompt = (counts.prompt_tokens - before.prompt_tokens) / seconds
        answer = (counts.answer_tokens - before.answer_tokens) / seconds
        drafted, accepted = counts.draft_tokens - before.draft_tokens, counts.accepted_tokens - before.accepted_tokens
        drafts = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
        return (
            f"{stats.num_running} running, {stats.num_waiting} waiting, {prompt:.1f} prompt tokens/s, "
            f"{answer:.1f} generated tokens/s{drafts}, cache {stats.cache_usage:.0%} used"
        )

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Log the line every SUMMARY_SECONDS, forever."""
        while True:
            await sleep(SUMMARY_SECONDS)
            line = self.line()
            if line is not None:
                logger.info("%s", line)


class LoadingLog:
    """Logs the progress of loading in lines in the place of a bar, for those who read the log later. A Progress; called
    from any thread.
    """

    def __init__(self, name: str, clock: Clock = time.monotonic):
        self._name, self._clock, self._began = name, clock, clock()
        self._total, self._mark, self._has_captured = 0, 0, False
        logger.info("loading %s", name)

    def __call__(self, done: int, total: int, name: str) -> None:
        """Report, when a quarter more is done."""
        if name == COMPILING:
            if total and done == 0:
                logger.info("compiling %d kernels, or reading them from the disk", total)
            return
        if name == CAPTURING:
            if not self._has_captured:
                self._has_captured = True
                logger.info("capturing %d CUDA graphs", total)
            return
        if not self._total and total:
            self._total = total
            logger.info("%s has %s of weights", self._name, size_of(total))
        reached = max((mark for mark in _MARKS if total and done * 100 >= mark * total), default=0)
        if reached > self._mark:
            self._mark = reached
            seconds = self._clock() - self._began
            logger.info("loaded %d %%, %s of %s, after %s", reached, size_of(done), size_of(total), duration(seconds))


def watch_loading(name: str, bar: Progress | None) -> Progress:
    """Return the bar where there is one (a terminal), else lines in the log."""
    return LoadingLog(name) if bar is None else bar


def farewell(why: int | str, counts: Counts, seconds: float) -> str:
    """Return the last line of the log. why: the signal that ended the service, or the reason in words."""
    reason = signal.Signals(why).name if isinstance(why, int) else why
    aborted = counts.num_started - counts.num_finished
    return (
        f"stopped ({reason}) after {duration(seconds)}: {counts.num_finished} answers finished, {aborted} cut off, "
        f"{counts.prompt_tokens} prompt tokens read, {counts.answer_tokens} tokens generated"
    )
