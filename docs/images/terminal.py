"""Pictures of the terminal in the README: real runs of the command in a window of its own, drawn as SVG.

    python docs/images/terminal.py        # writes chat.svg and plan.svg beside this file; needs pyte

The command runs on a pseudo-terminal; pyte keeps the screen as a terminal would, colours included. Text is typed
when the prompt stands on the screen.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyte

__all__ = ["Terminal", "main", "to_svg"]

HERE = Path(__file__).resolve().parent
PROMPT = ">>> "
SECONDS = 120  # a command that is silent for longer is taken for stuck

CELL_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN, BAR = 8.43, 18, 14, 14, 26
_WORDS = re.compile(r"\S+(?: \S+)*")
BACKGROUND, FOREGROUND = "#0f172a", "#e2e8f0"
COLORS = {
    "default": FOREGROUND,
    "black": "#475569",
    "red": "#f87171",
    "green": "#4ade80",
    "brown": "#facc15",
    "blue": "#60a5fa",
    "magenta": "#e879f9",
    "cyan": "#22d3ee",
    "white": "#f8fafc",
    "brightblack": "#94a3b8",
}


class Terminal:
    """A command in a window of `columns` x `rows`. Raises RuntimeError when it is silent for too long."""

    def __init__(self, command: Sequence[str], columns: int, rows: int):
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, close_fds=True
        )
        os.close(slave)

    def _read(self) -> bool:
        """Take in what the command wrote; False at its end."""
        if not select.select([self._master], [], [], SECONDS)[0]:
            raise RuntimeError(f"the command wrote nothing for {SECONDS} s")
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        if b"\x1b[6n" in data:  # where is the cursor? prompt_toolkit asks
            os.write(self._master, f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R".encode())
        self._stream.feed(data)
        return bool(data)

    def type_at_prompt(self, text: str) -> None:
        """Wait until the cursor stands behind an empty prompt, then type `text` and the return key."""
        while not self._is_prompting():
            if not self._read():
                raise RuntimeError("the command ended before it asked for this: " + text)
        os.write(self._master, text.encode() + b"\r")
        while self._is_prompting():
            self._read()

    def _is_prompting(self) -> bool:
        cursor = self.screen.cursor
        return cursor.x == len(PROMPT) and self.screen.display[cursor.y].startswith(PROMPT)

    def wait_for_prompt(self) -> None:
        """Wait until the command asks for the next line."""
        while not self._is_prompting() and self._read():
            pass

    def wait(self) -> int:
        """Read to the end of the command; its exit code."""
        while self._read():
            pass
        return self._process.wait()

    def close(self) -> None:
        """End the command."""
        self._process.kill()
        self._process.wait()
        os.close(self._master)


def _color(name: str, is_bold: bool) -> str:
    if name in COLORS:
        return COLORS["white"] if is_bold and name == "default" else COLORS[name]
    return f"#{name}" if len(name) == 6 else FOREGROUND


def _spans(cells: dict[int, Any], columns: int) -> list[tuple[int, str, str, bool]]:
    """Runs of cells that look alike: column, text, colour, bold."""
    spans: list[tuple[int, str, str, bool]] = []
    for column in range(columns):
        cell = cells[column]
        look = (_color(cell.fg, cell.bold), cell.bold)
        if spans and spans[-1][2:] == look:
            start, text, *_ = spans[-1]
            spans[-1] = (start, text + cell.data, *look)
        else:
            spans.append((column, cell.data, *look))
    return [span for span in spans if span[1].strip()]


def to_svg(screen: Any, title: str) -> str:
    """The lines of a pyte screen down to the last that holds something, in a window's frame."""
    used = max((row for row, line in enumerate(screen.display) if line.strip()), default=0) + 1
    width = round(screen.columns * CELL_WIDTH + 2 * MARGIN)
    height = used * LINE_HEIGHT + BAR + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        *(
            f'<circle cx="{16 + 16 * index}" cy="14" r="5" fill="{fill}"/>'
            for index, fill in enumerate(("#f87171", "#facc15", "#4ade80"))
        ),
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" xml:space="preserve" '
        f'font-size="{FONT_SIZE}">',
    ]
    for row in range(used):
        y = BAR + (row + 0.8) * LINE_HEIGHT
        for column, text, color, is_bold in _spans(screen.buffer[row], screen.columns):
            weight = ' font-weight="bold"' if is_bold else ""
            for words in _WORDS.finditer(text):  # columns stay in line with any font
                x = MARGIN + (column + words.start()) * CELL_WIDTH
                length = len(words[0]) * CELL_WIDTH
                parts.append(
                    f'<text x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}" fill="{color}"{weight}>'
                    f"{escape(words[0])}</text>"
                )
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ktransformers", *arguments]


def draw_chat(path: Path) -> None:
    """Questions that the bundled model was trained on."""
    terminal = Terminal(_command("chat"), columns=80, rows=24)
    try:
        for question in (
            "What is 17 + 25?",
            "What is ktransformers?",
            "Give me a JSON object with name Ada and age 36.",
        ):
            terminal.type_at_prompt(question)
        terminal.wait_for_prompt()
        path.write_text(to_svg(terminal.screen, "ktransformers chat"))
    finally:
        terminal.close()


def draw_plan(path: Path) -> None:
    """The plan of a model that people run, by its shape."""
    terminal = Terminal(_command("plan", "--synthetic", "qwen3-30b-a3b"), columns=80, rows=40)
    try:
        terminal.wait()
        path.write_text(to_svg(terminal.screen, "ktransformers plan"))
    finally:
        terminal.close()


def main() -> None:
    """Draw both."""
    for name, draw in (("chat.svg", draw_chat), ("plan.svg", draw_plan)):
        draw(HERE / name)
        print(name)


if __name__ == "__main__":
    main()
