"""The views of a chat on a terminal. Rows are written once and never again; only the line of a spinner is erased."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, cast

from typing_extensions import override

from ktransformers.cli.chat.output import View, short_stats
from ktransformers.cli.chat.terminal_keys import muted_keys
from ktransformers.cli.chat.terminal_text import Cell, Highlighter, Palette, Sanitizer, Style, TextLayout, render
from ktransformers.cli.loading import StatusLine
from ktransformers.core import GenerationStats

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MarkdownView", "TerminalView", "palette_of", "split_blocks"]

_COLORS: Palette = {Style.CODE: "36", Style.ERROR: "31"}
_SHADES: Palette = {Style.REASONING: "2", Style.HEADING: "1", Style.FENCE: "2", Style.NOTE: "2"}


def _is_dumb(environ: Mapping[str, str]) -> bool:
    return environ.get("TERM", "dumb") == "dumb"


def palette_of(environ: Mapping[str, str]) -> Palette:
    """Return the escape sequences that the environment allows: none for TERM=dumb, bold and dim alone for NO_COLOR."""
    if _is_dumb(environ):
        return {}
    return _SHADES if environ.get("NO_COLOR") else _SHADES | _COLORS


def columns_of(out: TextIO) -> Callable[[], int]:
    """Return a function that tells how many columns the window of `out` has now."""

    def columns() -> int:
        try:
            found = os.get_terminal_size(out.fileno()).columns
        except (OSError, ValueError):
            found = 0
        return found or shutil.get_terminal_size().columns

    return columns


class _Writer:
    """One text on its way to the terminal. style: of all of it; None: markdown's colours."""

    def __init__(self, out: TextIO, width: Callable[[], int], palette: Palette, style: Style | None):
        self._out, self._palette, self._style = out, palette, style
        self._sanitizer, self._highlighter, self._layout = Sanitizer(), Highlighter(), TextLayout(width)
        self._tail = ""  # the last characters, of which those that are line ends count

    def write(self, text: str) -> None:
        """Show `text`, but for the word that it ends with."""
        self._show(self._layout.feed(self._cells(self._sanitizer.feed(text))))

    def end(self, *, blank_lines: int = 0) -> None:
        """Show the rest. The text ends with a line end, and with at least as many empty lines as asked for."""
        rest = list(self._layout.feed(self._cells(self._sanitizer.flush())))
        if self._style is None:
            rest += self._layout.feed(self._highlighter.flush())
        self._show([*rest, *self._layout.flush()])
        missing = 1 + blank_lines - (len(self._tail) - len(self._tail.rstrip("\n")))
        self._show([Cell("\n")] * max(missing, 0))

    def _cells(self, text: str) -> Iterator[Cell]:
        self._tail = (self._tail + text.replace("\r", ""))[-2:]
        return self._highlighter.feed(text) if self._style is None else (Cell(char, self._style) for char in text)

    def _show(self, cells: Iterator[Cell] | list[Cell]) -> None:
        self._out.write(render(cells, self._palette))
        self._out.flush()


class TerminalView(View):
    """A view that streams answers to a terminal: prose is broken at words, and only colour is added.

    in_fd: the terminal's keys. environ: TERM and NO_COLOR count. delay: seconds until a spinner is shown.
    """

    def __init__(
        self, out: TextIO, in_fd: int, environ: Mapping[str, str] | None = None, *, delay: float = StatusLine.DELAY
    ):
        environ = os.environ if environ is None else environ
        self._out, self._in_fd = out, in_fd
        self._width, self._palette = columns_of(out), palette_of(environ)
        self._status = None if _is_dumb(environ) else StatusLine(out, self._width, delay=delay)
        self._reasoning: _Writer | None = None
        self._content: _Writer | None = None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Return a context inside which pressed keys are not echoed; they are there for the next prompt."""
        with muted_keys(self._in_fd):
            try:
                yield
            finally:
                self._clear_status()

    @override
    def reading(self, done: int, total: int) -> None:
        if self._status is not None:
            self._status.show(f"reading {done:,} of {total:,} tokens" if done else f"reading {total:,} tokens")

    @override
    def reasoning(self, text: str) -> None:
        self._clear_status()
        if self._reasoning is None:
            self._reasoning = self._writer(Style.REASONING)
        self._reasoning.write(text)

    @override
    def content(self, text: str) -> None:
        if not text:
            return
        self._clear_status()
        self._end_reasoning(blank_lines=1)
        if self._content is None:
            self._content = self._writer(None)
        self._content.write(text)

    @override
    def end(self) -> None:
        self._clear_status()
        if self._content is not None:
            self._content.end()
        elif self._reasoning is None:
            self._out.write("\n")
            self._out.flush()
        self._end_reasoning(blank_lines=0)
        self._content = None

    @override
    def stats(self, stats: GenerationStats) -> None:
        self.note(short_stats(stats, self._width()))

    @override
    def note(self, text: str) -> None:
        self._write_whole(text, Style.NOTE)

    @override
    def error(self, text: str) -> None:
        self._write_whole(f"error: {text}", Style.ERROR)

    def _writer(self, style: Style | None) -> _Writer:
        return _Writer(self._out, self._width, self._palette, style)

    def _write_whole(self, text: str, style: Style) -> None:
        self._clear_status()
        writer = self._writer(style)
        writer.write(text + "\n")
        writer.end()

    def _end_reasoning(self, blank_lines: int) -> None:
        if self._reasoning is not None:
            self._reasoning.end(blank_lines=blank_lines)
            self._reasoning = None

    def _clear_status(self) -> None:
        if self._status is not None:
            self._status.clear()


def split_blocks(text: str) -> tuple[list[str], str]:
    """Split markdown into its complete blocks and the rest.

    A block ends at a blank line that is not inside of a code fence.
    """
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


class MarkdownView(TerminalView):
    """A view with answers as formatted markdown: until a block appears complete, a line says that it is written."""

    def __init__(
        self,
        console: Console,
        in_fd: int,
        environ: Mapping[str, str] | None = None,
        *,
        delay: float = StatusLine.DELAY,
    ):
        super().__init__(cast(TextIO, console.file), in_fd, environ, delay=delay)
        self._console = console
        self._sanitizer = Sanitizer()
        self._block = ""  # that is being written

    @override
    def content(self, text: str) -> None:
        if self._reasoning is not None:
            self._clear_status()
            self._end_reasoning(blank_lines=1)
        blocks: list[str] = []
        self._block += self._sanitizer.feed(text)
        if "\n" in text:
            blocks, self._block = split_blocks(self._block)
        if blocks:
            self._clear_status()
        for block in blocks:
            self._print_block(block)
            self._console.print()
        if self._status is not None and self._block.strip():
            self._status.show(f"writing, line {self._block.strip().count(chr(10)) + 1}")

    @override
    def end(self) -> None:
        self._clear_status()
        self._end_reasoning(blank_lines=0)
        rest = self._block + self._sanitizer.flush()
        if rest.strip():
            self._print_block(rest)
        self._block = ""

    def _print_block(self, block: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(block))
