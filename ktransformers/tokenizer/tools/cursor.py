"""Reads text that is still being written: steps that wait where the text so far does not decide.

A step is a generator. It yields when it needs more text and goes on when there is more, or when the text has ended; so
what it returns depends on the text alone, however that was cut into pieces. Does not know any format.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from ktransformers.tokenizer.stop import held_back

__all__ = ["Cursor", "Sink", "Steps"]

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
Sink = Callable[[str], object]
"""Takes the next piece of something."""

_BLANK = re.compile(r"[ \t\r\n]*")


@functools.lru_cache(maxsize=64)
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))


class Cursor:
    """A place in a text that grows. What was read is forgotten, unless `kept` is a list, which then takes it."""

    def __init__(self) -> None:
        self._text, self._at, self._is_end = "", 0, False
        self.is_cut = False
        self.kept: list[str] | None = None

    def add(self, text: str) -> None:
        """Add more of the text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self, is_cut: bool = False) -> None:
        """End the text. is_cut: because the writer was stopped, not because it was done."""
        self._is_end, self.is_cut = True, is_cut

    @property
    def is_cut_here(self) -> bool:
        """Whether all is read of a text whose writer was stopped: what seems to be missing was not left out."""
        return self.is_cut and self._at == len(self._text)

    def put_back(self, text: str) -> None:
        """Put back the text that was read last. Not while what is read is kept."""
        if not text:
            return
        if self._at >= len(text):
            self._at -= len(text)
        else:  # it came in other pieces
            self._text, self._at = text + self._text[self._at :], 0

    def _take_to(self, end: int) -> str:
        taken, self._at = self._text[self._at : end], end
        if self.kept is not None and taken:
            self.kept.append(taken)
        return taken

    def peek(self) -> Steps[str]:
        """Return the next character, which stays; empty at the end."""
        while self._at == len(self._text):
            if self._is_end:
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> str:
        """Take the character that was seen by `peek`."""
        return self._take_to(self._at + 1)

    def match(self, literal: str) -> Steps[bool]:
        """Whether the text goes on with `literal`, which is then taken; otherwise nothing is.

        But of a text that was cut inside of it, the rest is.
        """
        while not self._text.startswith(literal, self._at):
            if self.is_cut and literal.startswith(self._text[self._at :]):
                at = self._at
                self._take_to(len(self._text))
                self._text, self._at = self._text[:at], at  # what was read before it may be put back
            if self._is_end or not literal.startswith(self._text[self._at : self._at + len(literal)]):
                return False
            yield
        self._take_to(self._at + len(literal))
        return True

    def run_of(self, pattern: re.Pattern[str], sink: Sink, most: int | None = None) -> Steps[int]:
        """Take what `pattern`, one class of characters any number of times, matches. Returns how many it took.

        most: after so many it stops.
        """
        taken = 0
        while True:
            limit = len(self._text) if most is None else min(len(self._text), self._at + most - taken)
            found = pattern.match(self._text, self._at, limit)
            if found and found.end() > self._at:
                taken += found.end() - self._at
                sink(self._take_to(found.end()))
            if self._at < len(self._text) or taken == most or self._is_end:
                return taken
            yield

    def blanks(self, sink: Sink | None = None) -> Steps[str]:
        """Take blanks; return the character after them, which stays."""
        yield from self.run_of(_BLANK, sink or _forget)
        return (yield from self.peek())

    def find(self, tags: tuple[str, ...], sink: Sink, *, drops_begun: int = 0) -> Steps[str | None]:
        """Take the text up to the first of `tags` and that tag, which is returned; None when the text ends before.

        No tag may have another one inside. drops_begun: what there is of one where the text was cut is not handed on,
        if it has at least so many characters; 0: it is.
        """
        pattern, longest = _any_of(tags), max(map(len, tags))
        while True:
            found = pattern.search(self._text, self._at)
            if found:
                if found.start() > self._at:
                    sink(self._take_to(found.start()))
                return self._take_to(found.end())
            tail = self._text[max(self._at, len(self._text) - longest) :]
            num_begun = held_back(tail, tags)
            if self._is_end and not (self.is_cut and 0 < drops_begun <= num_begun):
                num_begun = 0
            certain = len(self._text) - num_begun
            if certain > self._at:
                sink(self._take_to(certain))
            if self._is_end:
                self._take_to(len(self._text))
                return None
            yield

    def word(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """Take what `pattern` (one class of characters) matches, if that is at most `most` characters; else ""."""
        parts: list[str] = []
        taken = yield from self.run_of(pattern, parts.append, most + 1)
        return "".join(parts) if taken <= most else ""


def _forget(text: str) -> None:
    """A sink for what nobody wants."""
