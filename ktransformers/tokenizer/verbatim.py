"""Keeps special tokens that a conversation spells as text: only those that the template writes are tokens.

    conversation ── guarded: a mark inside each spelling ──> template ──> text with marks ── cut there ──> ids

A mark is a number that nothing in the conversation holds: templates that trim text, change its case or write it as JSON
leave it as it is. Where the text is cut the tokenizer sees another special token, whose id is dropped afterwards, so
that everything else is read as it would be in one piece.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Guard", "Verbatim", "unused_number"]

_MARK_DIGITS = 24


class Verbatim:
    """The spellings of tokens that a conversation must not write. Of one character: they cannot be cut, and stay."""

    def __init__(self, spellings: Iterable[str]):
        self.spellings = sorted({one for one in spellings if len(one) > 1}, key=len, reverse=True)
        # A lookahead finds spellings that overlap, too.
        self._pattern = re.compile(f"(?={'|'.join(map(re.escape, self.spellings))})") if self.spellings else None

    def guard(self, conversation: Any) -> Guard | None:
        """Return a guard that keeps the spellings in this JSON-like value from being read; None when there are none."""
        if self._pattern is None or not any(map(self._pattern.search, _texts(conversation))):
            return None
        return Guard(self._pattern, unused_number(conversation))

    def ids_of_pieces(
        self,
        pieces: Sequence[str],
        token_id: Callable[[str], int | None],
        encode: Callable[[str, int], list[int]],
    ) -> list[int]:
        """Return the ids of a text that is cut into these pieces.

        encode: of the joined pieces, among which so many cuts are.
        """
        cutter = self.cutter("".join(pieces))
        cut_id = token_id(cutter)
        # Where even this token is the template's own, our cuts are told from it by their order.
        ours, seen = set(), 0
        for piece in pieces[:-1]:
            seen += piece.count(cutter)
            ours.add(seen)
            seen += 1
        ids = encode(cutter.join(pieces), len(pieces) - 1)
        places = [at for at, one in enumerate(ids) if one == cut_id]
        dropped = {at for order, at in enumerate(places) if order in ours}
        return [one for at, one in enumerate(ids) if at not in dropped]

    def cutter(self, text: str) -> str:
        """Return the special token to cut `text` with: one that it does not hold, if there is one."""
        return next((one for one in self.spellings if one not in text), self.spellings[0])


class Guard:
    """The marks in the texts of one conversation."""

    def __init__(self, pattern: re.Pattern[str], mark: str):
        self._pattern, self._mark = pattern, mark

    def marked(self, value: Any) -> Any:
        """Return the value with a mark behind the first character of each spelling, in keys and texts at any depth."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(one) for key, one in value.items()}
        if isinstance(value, Sequence):
            return [self.marked(one) for one in value]
        return value

    def _marked_text(self, text: str) -> str:
        starts = [found.start() for found in self._pattern.finditer(text)]
        if not starts:
            return text
        ends = [0, *(start + 1 for start in starts)]
        return self._mark.join(text[a:b] for a, b in zip(ends, [*ends[1:], len(text)], strict=True))

    def pieces(self, rendered: str) -> list[str]:
        """Return the template's text, cut at the marks."""
        return rendered.split(self._mark)


def unused_number(conversation: object) -> str:
    """Return a number that no text of this JSON-like value holds, and that nobody can guess."""
    texts = list(_texts(conversation))
    while any((mark := _digits()) in text for text in texts):
        pass
    return mark


def _digits() -> str:
    return str(secrets.randbelow(9 * 10 ** (_MARK_DIGITS - 1)) + 10 ** (_MARK_DIGITS - 1))


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)
