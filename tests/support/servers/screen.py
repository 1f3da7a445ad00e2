"""A terminal that remembers everything, and the undoing of its rows."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pyte
from wcwidth import wcwidth

__all__ = ["MemoryScreen", "Window", "open_window", "set_size", "undo_wrapping"]


class MemoryScreen(pyte.HistoryScreen):
    """pyte's screen with all rows that left it above, and with exactly the characters that were written.

    Cells that a tab has passed hold the tab. Characters without width, which pyte drops or composes, stay with the
    character before them.
    """

    def __init__(self, columns: int = 80, lines: int = 24):
        super().__init__(columns, lines, history=100_000)

    def draw(self, data: str) -> None:
        for char in data:
            if wcwidth(char) == 0 and self.cursor.x > 0:
                line, x = self.buffer[self.cursor.y], self.cursor.x - 1
                while x and line[x].data == "":
                    x -= 1
                line[x] = line[x]._replace(data=line[x].data + char)
            else:
                if wcwidth(char) == 2 and self.cursor.x == self.columns - 1:  # terminals do, pyte does not
                    self.carriage_return()
                    self.linefeed()
                super().draw(char)

    def tab(self) -> None:
        begin, line = self.cursor.x, self.buffer[self.cursor.y]
        super().tab()
        for x in range(begin, self.cursor.x):
            line[x] = self.cursor.attrs._replace(data="\t" if x == begin else "")

    def rows(self) -> list[str]:
        """What stands in each row, up to the one of the cursor, which counts when something stands in it."""
        lines: list[Any] = [*self.history.top, *(self.buffer[y] for y in range(self.cursor.y + 1))]
        rows = ["".join(line[x].data for x in sorted(line)) for line in lines]
        return rows if rows[-1] else rows[:-1]


def undo_wrapping(rows: list[str], text: str, columns: int = 80) -> str:
    """The lines that `rows` show, if they are those of `text` (without carriage returns), broken.

    Asserts that a row is broken only where the next word, or the next character, does not fit, and that no row is left.
    """
    lines, left = [], list(rows)
    for line in text.split("\n")[:-1]:
        found = ""
        while True:
            assert left, f"nothing shows {line!r}"
            row = left.pop(0)
            found += row
            if len(found) >= len(line):
                break
            word = _first_word(next(iter(left), ""))
            if "\t" not in row + word:
                assert _columns(row) + _columns(word) > columns - 2, f"broken too early: {row!r}"
        lines.append(found)
    assert not left
    return "".join(line + "\n" for line in lines)


def _first_word(row: str) -> str:
    """What the row before would have needed room for; each character of CJK is a word, emoji without spaces are one."""
    word = row.split(" ")[0]
    cjk = [i for i in range(1, len(word)) if any("\u2e80" <= char <= "\uffff" for char in word[i - 1 : i + 1])]
    return word[: min(cjk, default=len(word))]


def _columns(text: str) -> int:
    """At most: terminals differ in how they show a narrow character that is asked to be an emoji."""
    return sum(wcwidth(char) for char in text) + text.count("\ufe0f")


def set_size(fd: int, columns: int = 80, lines: int = 24) -> None:
    """Make the window of a terminal so large."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


class Window:
    """A pseudo-terminal in this process. out: writes to it. What was written is in raw, and on screen once closed."""

    def __init__(self, columns: int = 80, lines: int = 24):
        self.keyboard, self.fd = pty.openpty()
        set_size(self.fd, columns, lines)
        self.out: TextIO = os.fdopen(os.dup(self.fd), "w", encoding="utf-8", newline="\n")
        self.screen, self.raw = MemoryScreen(columns, lines), b""
        self._stream = pyte.ByteStream(self.screen)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.keyboard, 65536)
            except OSError:  # nobody can write any more
                return
            self.raw += data

    def type(self, keys: bytes) -> None:
        os.write(self.keyboard, keys)

    def close(self) -> None:
        self.out.close()
        os.close(self.fd)
        self._reader.join()
        os.close(self.keyboard)
        self._stream.feed(self.raw)


@contextmanager
def open_window(columns: int = 80, lines: int = 24) -> Iterator[Window]:
    """A Window that is closed behind the block."""
    window = Window(columns, lines)
    try:
        yield window
    finally:
        window.close()
