"""Signs that something is under way: while programs and weights load, while a prompt is read.

Imports nothing heavy.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ktransformers.core import CAPTURING, COMPILING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["StatusLine", "early_line", "loading_bar"]

_log = logging.getLogger(__name__)

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ERASE = "\r\x1b[K"


class StatusLine:
    """A line with a spinner on a terminal, in place of which text is written later.

    Takes a column less than the window has.
    It is drawn once something has taken longer than `delay` seconds, and then by a thread, since what is waited for is
    one long call. Everybody else who writes to `out` has to call `clear` before.
    """

    DELAY, _INTERVAL = 0.3, 0.1

    def __init__(self, out: TextIO, width: Callable[[], int], *, delay: float = DELAY):
        self._out, self._width, self._delay = out, width, delay
        self._text = ""
        self._began = 0.0
        self._num_drawn = 0
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def show(self, text: str) -> None:
        """Show `text` from now on, in place of what was shown."""
        self._text = text
        if self._thread is None:
            self._began, self._num_drawn = time.monotonic(), 0
            self._is_over.clear()
            self._thread = threading.Thread(target=self._spin, daemon=True)
            self._thread.start()
        if time.monotonic() - self._began >= self._delay:
            self._draw()

    def clear(self) -> None:
        """Erase the line with the spinner."""
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join()
        self._thread = None
        if self._num_drawn:
            self._out.write(_ERASE)
            self._out.flush()

    def _spin(self) -> None:
        wait = self._delay
        while not self._is_over.wait(wait):
            self._draw()
            wait = self._INTERVAL

    def _draw(self) -> None:
        with self._lock:
            line = f"{_FRAMES[self._num_drawn % len(_FRAMES)]} {self._text}"
            self._num_drawn += 1
            self._out.write(f"\r{line[: max(self._width() - 1, 1)]}\x1b[K")
            self._out.flush()


@contextmanager
def early_line(err: TextIO, text: str) -> Iterator[None]:
    """Show a line on a terminal for as long as the block takes, nothing elsewhere.

    What is logged meanwhile stays above.
    """
    if not err.isatty():
        yield
        return
    with _console(err).status(_shortened(text)):
        yield


@contextmanager
def loading_bar(err: TextIO, name: str = "") -> Iterator[Callable[[int, int, str], None] | None]:
    """Show a bar with bytes and rate on a terminal; elsewhere one line that `name` is loaded, if it is given.

    Yields the callback that `build_engine` takes. A terminal shows the name until its first call. Captured graphs have
    a bar of their own, in numbers.
    """
    text = f"loading {name} ..."
    if not err.isatty():
        if name and _log.isEnabledFor(logging.WARNING):  # those who want errors only do not want this
            print(text, file=err, flush=True)
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TransferSpeedColumn,
    )

    console = _console(err)
    waiting = console.status(_shortened(text) if name else "loading ...")
    loading = Progress(
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    )
    counting = {
        name: Progress(TextColumn(text), BarColumn(), MofNCompleteColumn(), console=console, transient=True)
        for name, text in ((COMPILING, COMPILING), (CAPTURING, f"capturing {CAPTURING}"))
    }
    tasks: dict[Progress, TaskID] = {}  # a bar is shown from its first report on; a console has room for one at a time

    def report(done: int, total: int, name: str) -> None:
        bar = counting.get(name, loading)
        if bar not in tasks:
            waiting.stop()
            for other in tasks:
                other.stop()
            bar.start()
            tasks[bar] = bar.add_task(name, total=total)
        bar.update(tasks[bar], completed=done, total=total)

    try:
        waiting.start()
        yield report
    finally:
        waiting.stop()
        for bar in (loading, *counting.values()):
            bar.stop()


def _console(err: TextIO) -> Console:
    from rich.console import Console

    return Console(file=err)


def _shortened(text: str) -> str:
    """In one row beside the spinner, and not read as rich's markup."""
    from rich.markup import escape

    columns = shutil.get_terminal_size().columns - 3
    return escape(text if len(text) <= columns else text[: max(columns - 1, 1)] + "…")
