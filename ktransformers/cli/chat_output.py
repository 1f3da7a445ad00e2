"""How a chat looks: plain text for pipes, markdown for terminals. Does not know models or commands."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ktransformers.core import CAPTURING, GenerationStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

__all__ = ["PlainView", "RichView", "View", "format_stats", "loading_bar", "split_blocks"]


def format_stats(stats: GenerationStats) -> str:
    """Counts and rates of one answer, in one line."""
    computed = stats.prompt_len - stats.cached_len
    reused = f" ({stats.cached_len} of them reused)" if stats.cached_len else ""
    return (
        f"prompt eval: {stats.prompt_len} tokens{reused}, {computed} in {stats.prefill_seconds:.2f} s, "
        f"{stats.prefill_rate:.1f} tokens/s · eval: {stats.completion_len} tokens in {stats.decode_seconds:.2f} s, "
        f"{stats.decode_rate:.1f} tokens/s"
    )


class View(ABC):
    """Where answers and messages go. An answer is any number of reasoning and content, then end."""

    @abstractmethod
    def reasoning(self, text: str) -> None:
        """A piece of the answer's reasoning."""

    @abstractmethod
    def content(self, text: str) -> None:
        """A piece of the answer itself."""

    @abstractmethod
    def end(self) -> None:
        """The answer is complete, or was stopped."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Something about the chat: statistics, what a command did."""

    @abstractmethod
    def error(self, text: str) -> None:
        """Something that went wrong."""


class PlainView(View):
    """Answers on `out`, one per turn, as they are; everything else on `err`."""

    def __init__(self, out: TextIO, err: TextIO):
        self._out, self._err = out, err
        self._is_line_open = True  # an empty answer is an empty line, so that answers can be counted
        self._is_reasoning = False

    def reasoning(self, text: str) -> None:
        self._is_reasoning = True
        self._write(self._err, text)

    def content(self, text: str) -> None:
        if text:
            self._is_line_open = not text.endswith("\n")
            self._write(self._out, text)

    def end(self) -> None:
        if self._is_reasoning:
            self._write(self._err, "\n")
        if self._is_line_open:
            self._write(self._out, "\n")
        self._is_line_open, self._is_reasoning = True, False

    def note(self, text: str) -> None:
        self._write(self._err, text + "\n")

    def error(self, text: str) -> None:
        self._write(self._err, f"error: {text}\n")

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


def split_blocks(text: str) -> tuple[list[str], str]:
    """Complete blocks of markdown and the rest. A block ends at a blank line that is not inside of a code fence."""
    blocks, lines, fence = [], [], ""
    *whole, last = text.split("\n")
    for line in whole:
        lines.append(line)
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) and not stripped.strip(fence[0]) else fence
        elif stripped.startswith(("```", "~~~")):
            fence = stripped[:3]
        elif not stripped:
            blocks.append("\n".join(lines))
            lines = []
    return [block for block in blocks if block.strip()], "\n".join([*lines, last])


class RichView(View):
    """Streams markdown: complete blocks are printed for good, the one that is being written is redrawn below them."""

    _SECONDS_PER_FRAME = 1 / 15

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._tail = self._reasoning_tail = ""
        self._drawn = 0.0
        self._is_reasoning = False

    def reasoning(self, text: str) -> None:
        self._is_reasoning, self._reasoning_tail = True, (self._reasoning_tail + text)[-2:]
        self._console.print(text, style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def content(self, text: str) -> None:
        if self._is_reasoning:  # one blank line between it and the content
            ends = len(self._reasoning_tail) - len(self._reasoning_tail.rstrip("\n"))
            self._console.print("\n" * (2 - ends), end="")
            self._is_reasoning = False
        self._tail += text
        blocks, self._tail = split_blocks(self._tail)
        if blocks:
            self._close_live()
            for block in blocks:
                self._print_block(block)
                self._console.print()
        now = time.monotonic()
        if self._tail.strip() and (blocks or now - self._drawn >= self._SECONDS_PER_FRAME):
            self._drawn = now
            self._draw_tail()

    def end(self) -> None:
        self._close_live()
        if self._tail.strip():
            self._print_block(self._tail)
        elif self._is_reasoning:
            self._console.print()
        self._tail, self._reasoning_tail, self._drawn, self._is_reasoning = "", "", 0.0, False

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)

    def error(self, text: str) -> None:
        self._console.print(f"error: {text}", style="red", markup=False, highlight=False)

    def _print_block(self, block: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(block))

    def _draw_tail(self) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="ellipsis")
            self._live.start()
        self._live.update(Markdown(self._tail), refresh=True)

    def _close_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


@contextmanager
def loading_bar(err: TextIO) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar with bytes and rate on a terminal, nothing elsewhere. Yields the callback that `build_engine` takes.

    Captured graphs have a bar of their own, in numbers.
    """
    if not err.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(file=err)
    loading = Progress(
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    )
    capturing = Progress(
        TextColumn(f"capturing {CAPTURING}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    )
    tasks = {}  # a bar is shown from its first report on; a console has room for one at a time

    def report(done: int, total: int, name: str) -> None:
        bar, other = (capturing, loading) if name == CAPTURING else (loading, capturing)
        if bar not in tasks:
            other.stop()
            bar.start()
            tasks[bar] = bar.add_task(name, total=total)
        bar.update(tasks[bar], completed=done, total=total)

    try:
        yield report
    finally:
        loading.stop()
        capturing.stop()
