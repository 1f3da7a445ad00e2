"""The way of an answer's text to a terminal: safe characters, colours for markdown, rows.

Knows no terminal, only its width.
Text passes three stages, character by character, so that its cutting into tokens changes nothing:

    Sanitizer     control characters become visible ones
    Highlighter   gives each character a style; all characters stay
    Layout        prose is broken at words, code where the terminal breaks it; a row is never changed once it is written

Without its escape sequences and the line ends that Layout adds, what comes out is the sanitized text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from wcwidth import wcwidth

__all__ = ["Cell", "Highlighter", "Palette", "Sanitizer", "Style", "TextLayout", "render"]

_TAB = 8
_ZWJ, _EMOJI_PRESENTATION = "\u200d", "\ufe0f"
_CLOSING_CJK = "、。，．！？；：）」』】》〉］｝〕"
_FIRST_EMOJI = "\U0001f000"  # of those that others can be joined to; wide characters below are CJK


class Style(StrEnum):
    """The roles of characters on a terminal; a palette gives each its escape sequence."""

    PLAIN = "plain"
    REASONING = "reasoning"
    HEADING = "heading"
    FENCE = "fence"
    CODE = "code"
    NOTE = "note"
    ERROR = "error"


Palette = dict[Style, str]
"""The parameters of the SGR escape sequence of each style; a style that is missing looks like any text."""


class Cell(NamedTuple):
    """A character of an answer with its style.

    is_code: it stands in a block of code, whose lines are not broken at words.
    """

    char: str
    style: Style = Style.PLAIN
    is_code: bool = False


def _char_width(char: str) -> int:
    """Columns that a character takes."""
    return max(wcwidth(char), 0)


def _visible(match: re.Match[str]) -> str:
    char = match[0]
    if "\ud800" <= char <= "\udfff":
        return "?"  # what a pipe gets for it
    if char == "\x7f":
        return "\u2421"
    return chr(0x2400 + ord(char)) if char < " " else "\ufffd"


class Sanitizer:
    """Replaces what a terminal would obey in one answer: ESC is shown as U+241B and so on, C1 controls as U+FFFD.

    Line feeds, tabs and carriage returns right before a line feed stay. Lone surrogates become question marks.
    """

    _UNSAFE = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

    def __init__(self) -> None:
        self._held = ""  # a carriage return of which it is not known what follows

    def feed(self, text: str) -> str:
        """Return what is certain of the sanitized text so far."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return self._UNSAFE.sub(_visible, text.removesuffix("\r"))

    def flush(self) -> str:
        """Return the rest of the sanitized text: the answer is complete."""
        held, self._held = self._held, ""
        return self._UNSAFE.sub(_visible, held)


class _Line(StrEnum):
    """What kind of line is being written."""

    START = "start"  # not known yet: only spaces, or the beginning of a fence or a heading
    PROSE = "prose"
    HEADING = "heading"
    CODE = "code"
    OPENING = "opening"  # of a block of code
    CLOSING = "closing"


class Highlighter:
    """Finds fences, headings and inline code of one answer as they are written.

    Nothing else of markdown is looked at.
    Holds back at most the few characters that begin a line and can become a fence or a heading.
    """

    def __init__(self) -> None:
        self._line = _Line.START
        self._indent = 0
        self._held = ""
        self._fence = ""  # what opened the block of code that is open
        self._inline = 0  # backticks that opened the inline code that is open
        self._run = 0  # backticks in a row, just now
        self._has_info = False  # something follows the fence on its line

    def feed(self, text: str) -> Iterator[Cell]:
        """Yield the characters whose style is known by now."""
        for char in text:
            if char == "\n":
                yield from self._end_line()
            elif self._line is _Line.START:
                yield from self._begin(char)
            else:
                yield self._inside(char)

    def flush(self) -> Iterator[Cell]:
        """Yield the rest of the characters: the answer is complete."""
        yield from self._decide(_Line.CODE if self._fence else _Line.PROSE)

    def _end_line(self) -> Iterator[Cell]:
        is_heading = not self._fence and self._held.startswith("#")
        yield from self._decide(_Line.HEADING if is_heading else _Line.CODE if self._fence else _Line.PROSE)
        yield Cell("\n", is_code=bool(self._fence))
        if self._line is _Line.OPENING:
            self._fence = self._held
        elif self._line is _Line.CLOSING:
            self._fence = ""
        self._line, self._held, self._indent = _Line.START, "", 0
        self._inline, self._run, self._has_info = 0, 0, False

    def _begin(self, char: str) -> Iterator[Cell]:
        if char in " \t" and not self._held:
            self._indent += 4 if char == "\t" else 1
            yield Cell(char, is_code=bool(self._fence))
            return
        run = self._held + char
        is_run = run == char * len(run)
        if self._fence:
            if is_run and char == self._fence[0]:
                self._held = run
                if len(run) == len(self._fence):
                    yield from self._decide(_Line.CLOSING)
                return
        elif is_run and char in "`~":
            self._held = run
            if len(run) == 3:
                yield from self._decide(_Line.OPENING, keep=True)
            return
        elif is_run and char == "#" and len(run) <= 6 and self._indent < 4:
            self._held = run
            return
        is_heading = not self._fence and self._held.startswith("#") and char in " \t"
        yield from self._decide(_Line.HEADING if is_heading else _Line.CODE if self._fence else _Line.PROSE)
        yield self._inside(char)

    def _decide(self, line: _Line, *, keep: bool = False) -> Iterator[Cell]:
        """The line is of this kind, unless that was known before: its first characters are."""
        if self._line is not _Line.START:
            return
        held, self._line = self._held, line
        if not keep:
            self._held = ""
        yield from [self._inside(char, is_new=False) for char in held]

    def _inside(self, char: str, *, is_new: bool = True) -> Cell:
        """A character of a line whose kind is known. is_new: it does not belong to the characters that decided it."""
        if is_new and self._line is _Line.OPENING:
            self._go_on_opening(char)
        elif is_new and self._line is _Line.CLOSING:
            self._has_info = self._has_info or char != self._fence[0]
            if char not in " \t\r" and (self._has_info or char != self._fence[0]):
                self._line = _Line.CODE  # something follows, so it closes nothing
        if self._line in (_Line.OPENING, _Line.CLOSING):
            return Cell(char, Style.FENCE, is_code=True)
        if self._line is _Line.CODE:
            return Cell(char, Style.CODE, is_code=True)
        return Cell(char, Style.CODE if self._is_inline_code(char) else self._base())

    def _base(self) -> Style:
        return Style.HEADING if self._line is _Line.HEADING else Style.PLAIN

    def _go_on_opening(self, char: str) -> None:
        if char == self._held[0] and not self._has_info:
            self._held += char
        elif char == "`" and self._held[0] == "`":  # it was inline code at the begin of a line
            self._line, self._inline = _Line.PROSE, len(self._held)
        else:
            self._has_info = True

    def _is_inline_code(self, char: str) -> bool:
        if char == "`":
            self._run += 1
            return True
        if self._run:
            if not self._inline:
                self._inline = self._run
            elif self._run == self._inline:
                self._inline = 0
            self._run = 0
        return self._inline > 0


def _is_letter_of_flag(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _is_skin_tone(char: str) -> bool:
    return "\U0001f3fb" <= char <= "\U0001f3ff"


class TextLayout:
    """Breaks the prose of one answer into rows.

    width: asked for with each piece, so that a window can change its size.
    A word is held back until it is complete: until a space, a wide character or the line's end follows, or until it is
    longer than a row. Such a word, and code, go on in the next row where the terminal breaks them. Each wide character
    of CJK is a word of its own, written at once, and so is an emoji, whatever it is made of. Spaces before a break stay
    at the end of their row, for which its last column is kept free; a tab that would end in or behind the last column
    begins a row, and so does one behind what some terminals show wider than others.
    """

    def __init__(self, width: Callable[[], int]):
        self._width = width
        self._col = 0  # may be the width: the terminal breaks the row at the next character
        self._last_width = 0
        self._word: list[Cell] = []
        self._word_len = 0
        self._is_long = False  # the word that is being written did not fit into a row
        self._before = ""
        self._is_uncertain = False  # terminals differ in the width of something in this row
        self._is_emoji = False  # the word is one
        self._num_flag_letters = 0  # in a row

    def feed(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        """Yield the cells to write, with line ends where rows are broken."""
        width = self._current_width()
        for cell in cells:
            if cell.char in "\n\t " or cell.is_code:
                yield from self._put_word(width if cell.char == "\n" else width - 1)
                yield from self._put(cell, width)
            elif self._joins(cell.char):
                yield from self._add(cell, width)
            elif _char_width(cell.char) == 2:
                yield from self._put_word(width)
                if cell.char >= _FIRST_EMOJI:
                    self._is_emoji = True
                    yield from self._add(cell, width)
                else:
                    limit = width if cell.char in _CLOSING_CJK else width - 2  # where it fits it begins no row
                    if self._col > 0 and self._col + 2 > limit:
                        yield self._break()
                    yield from self._put(cell, width)
            else:
                if self._is_emoji and _char_width(cell.char):
                    yield from self._put_word(width)
                yield from self._add(cell, width)
            self._note(cell.char)

    def flush(self) -> Iterator[Cell]:
        """Yield the rest of the cells: the answer is complete."""
        yield from self._put_word(self._current_width())

    def _joins(self, char: str) -> bool:
        """Whether a character belongs to the one before it: no row may end between them."""
        is_flag = _is_letter_of_flag(char) and self._num_flag_letters % 2 == 1
        return self._before == _ZWJ or (_is_skin_tone(char) and self._is_emoji) or is_flag

    def _note(self, char: str) -> None:
        self._num_flag_letters = self._num_flag_letters + 1 if _is_letter_of_flag(char) else 0
        if char != _EMOJI_PRESENTATION:
            self._before = char

    def _current_width(self) -> int:
        width = max(self._width(), 2)
        if self._last_width not in (0, width):
            self._col = min(self._col, width)  # terminals differ in what they do with the row; this is on the safe side
        self._last_width = width
        return width

    def _add(self, cell: Cell, width: int) -> Iterator[Cell]:
        """A character of a word."""
        if self._is_long or (not self._word and not _char_width(cell.char)):
            yield from self._put(cell, width)  # it goes on with what is written already
            return
        self._word.append(cell)
        self._word_len += self._columns(cell.char)
        if self._word_len > width:
            word, self._word, self._word_len, self._is_long = self._word, [], 0, True
            for part in word:
                yield from self._put(part, width)

    def _columns(self, char: str) -> int:
        # A narrow character that is asked to look like an emoji is wide in some terminals.
        is_widened = char == _EMOJI_PRESENTATION and _char_width(self._before) == 1
        self._is_uncertain = self._is_uncertain or is_widened
        return 1 if is_widened else _char_width(char)

    def _put_word(self, limit: int) -> Iterator[Cell]:
        self._is_long = self._is_emoji = False
        if not self._word:
            return
        if self._col > 0 and self._col + self._word_len > limit:
            yield self._break()
            self._is_uncertain = any(cell.char == _EMOJI_PRESENTATION for cell in self._word)
        yield from self._word
        self._col += self._word_len
        self._word, self._word_len = [], 0

    def _put(self, cell: Cell, width: int) -> Iterator[Cell]:
        """A cell that is written at once; the terminal breaks the row when it is full."""
        char = cell.char
        if char == "\n":
            self._col, self._is_uncertain = 0, False
        elif char == "\t":
            stop = (self._col // _TAB + 1) * _TAB
            if (stop >= width or self._is_uncertain) and self._col > 0:
                yield self._break()
                stop = _TAB
            self._col = min(stop, width - 1)
        else:
            columns = self._columns(char)
            self._col = columns if self._col + columns > width else self._col + columns
        yield cell

    def _break(self) -> Cell:
        self._col, self._is_uncertain = 0, False
        return Cell("\n")


def render(cells: Iterable[Cell], palette: Palette) -> str:
    """Return characters with their escape sequences. Leaves no style behind, and none reaches over the end of a row."""
    parts, current = [], ""
    for char, style, _ in cells:
        wanted = "" if char in "\r\n" else current if char in " \t" else palette.get(style, "")
        if wanted != current:
            parts.append(f"\x1b[0;{wanted}m" if current and wanted else f"\x1b[{wanted or 0}m")
            current = wanted
        parts.append(char)
    return "".join(parts) + ("\x1b[0m" if current else "")
