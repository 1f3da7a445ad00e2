"""Finds stop strings in a stream of text. Does not know tokens.

What was matched does not depend on how the text was cut into pieces: the stop string that is complete first wins, and
of several that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher", "held_back"]


def held_back(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a tag that is not complete yet."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


class StopMatcher:
    """Feed pieces of text; each call returns what can be shown and the stop string that was found, if any.

    Text before the stop string is returned exactly, the stop string and what follows it is not.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._text = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        self._text += piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            shown, self._text = self._text[:start], ""
            return shown, stop
        keep = len(self._text) - held_back(self._text, self._stops)
        shown, self._text = self._text[:keep], self._text[keep:]
        return shown, None

    def flush(self) -> str:
        """The text that was held back because it could have begun a stop string. Call once, at the end."""
        shown, self._text = self._text, ""
        return shown
