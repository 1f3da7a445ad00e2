"""Progress of a download: a bar on a terminal, a line for every tenth elsewhere. Both go to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from ktransformers.core import format_bytes

__all__ = ["LineProgress", "Progress", "make_progress"]


class Progress(Protocol):
    """A context that shows the progress of a download."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more as downloaded (fewer, when negative)."""
        ...


def make_progress(name: str, total: int, here: int) -> Progress:
    """Return what shows the progress of a download of `total` bytes of which `here` are on the disk."""
    return _BarProgress(name, total, here) if sys.stderr.isatty() else LineProgress(total, here)


class _BarProgress:
    """Bytes, rate and time that remains, on one line that is redrawn."""

    def __init__(self, name: str, total: int, here: int):
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.DownloadColumn(binary_units=True),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(name.rpartition("/")[2], total=total, completed=here, rate="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more as downloaded, and move the bar."""
        speed = self._bar.tasks[0].speed
        self._bar.update(self._task, advance=nbytes, rate=f"{format_bytes(int(speed))}/s" if speed else "")


class LineProgress:
    """Progress as a line when another tenth of the bytes has come, with the rate since the beginning."""

    def __init__(self, total: int, here: int, clock: Callable[[], float] = time.monotonic):
        self.total, self.done = total, here
        self._came, self._clock, self._start = 0, clock, clock()
        self._tenth = 10 * here // total if total else 10

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more as downloaded, and print a line when a tenth is full."""
        self.done += nbytes
        self._came += nbytes
        tenth = 10 * self.done // self.total
        if tenth <= self._tenth:
            return
        self._tenth = tenth
        rate = self._came / max(self._clock() - self._start, 1e-3)
        left = (self.total - self.done) / rate
        print(
            f"{10 * tenth:3d} %: {format_bytes(self.done)} of {format_bytes(self.total)}, "
            f"{format_bytes(int(rate))}/s, {_duration(left)} left",
            file=sys.stderr,
            flush=True,
        )


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 2:
        return f"{hours:.0f} h"
    return f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
