"""What a terminal shows of any text, in any pieces, on rows of any width."""

from __future__ import annotations

import io
import itertools
import os
import re

import pyte
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wcwidth import wcwidth

from ktransformers.cli.chat.terminal_text import Sanitizer
from ktransformers.cli.chat.terminal_view import TerminalView
from tests.support.servers.screen import MemoryScreen

XTERM = {"TERM": "xterm"}
NEVER = 1e9  # seconds

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["```", "~~~", "`", "#", "# ", "\n", "\n```\n", "\r\n", " ", "  ", "\t"]),
        st.sampled_from(["-" * 90, "你好", "👩\u200d👧", "❤\ufe0f"]),
        st.text(alphabet="abc", max_size=30),
        st.text(max_size=5),
        st.characters(codec=None),
    ),
    max_size=40,
).map("".join)


def rows_on_a_simple_screen(raw: str, columns: int) -> list[str]:
    """What stands in each row of a terminal that knows line ends, tabs, widths and, to ignore them, colours.

    A row that is full goes on in the next one only when a character comes.
    """
    rows, col = [""], 0
    for char in re.sub(r"\x1b\[[\d;]*m", "", raw):
        assert char in "\n\t\r" or (wcwidth(char) >= 0 and not "\ud800" <= char <= "\udfff"), repr(char)
        if char == "\r":
            continue
        if char == "\n":
            rows, col = [*rows, ""], 0
            continue
        if char == "\t":
            assert col < columns - 1 or columns <= 8, "a tab in a full row: the next character would replace one"
            col = min((col // 8 + 1) * 8, columns - 1)
        elif col + wcwidth(char) > columns:
            rows, col = [*rows, ""], wcwidth(char)
        else:
            col += wcwidth(char)
        rows[-1] += char
    return rows


def written(chunks: list[str], columns: int) -> str:
    out = io.StringIO()
    with open(os.devnull) as keys:
        view = TerminalView(out, keys.fileno(), XTERM, delay=NEVER)
        view._width = lambda: columns
        for chunk in chunks:
            view.content(chunk)
        view.end()
    return out.getvalue()


@settings(max_examples=150, deadline=None)
@example(text="`" * 24 + "❤\ufe0f❤\ufe0f\t", columns=9, cuts=[])  # hearts of one column each, or of two
@given(text=TEXTS, columns=st.sampled_from([9, 20, 80]), cuts=st.lists(st.integers(0, 100), max_size=20))
def test_any_text_in_any_pieces(text: str, columns: int, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    chunks = [text[a:b] for a, b in itertools.pairwise(ends)]
    whole, pieces = written([text], columns), written(chunks, columns)
    sanitizer = Sanitizer()
    expected = (sanitizer.feed(text) + sanitizer.flush()).replace("\r\n", "\n")
    expected += "" if expected.endswith("\n") else "\n"
    *rows, last = rows_on_a_simple_screen(whole, columns)
    assert last == ""
    assert "".join(rows) == expected.replace("\n", "")
    ends_of_rows, ends_of_lines = (
        set(itertools.accumulate(map(len, parts))) for parts in (rows, expected.split("\n")[:-1])
    )
    assert ends_of_lines <= ends_of_rows
    assert len(rows) >= expected.count("\n")
    screens = []
    for raw in (whole, pieces):
        screen = MemoryScreen(columns, 24)
        screen.set_mode(pyte.modes.LNM)
        pyte.Stream(screen).feed(raw)
        lines = [*screen.history.top, *(screen.buffer[y] for y in range(24))]
        screens.append([[(x, line[x]) for x in sorted(line) if line[x].data.strip()] for line in lines])
    assert screens[0] == screens[1]  # characters, places and colours
