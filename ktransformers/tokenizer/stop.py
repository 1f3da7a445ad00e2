"""Finds stop strings in a stream of text. Does not know tokens.

What was matched does not depend on how the text was cut into pieces: the stop string that is complete first wins, and
of several that end at the same character the longest.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher", "held_back"]


def held_back(text: str, tags: Sequence[str]) -> int:
    """Return how many characters at the end of `text` could be the beginning of a tag that is not complete yet.

    For a few short tags: the time it takes is the square of their length. Strings that a client chose have StopMatcher.
    """
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


class _Automaton:
    """All stop strings in one machine that takes a step per character (Aho and Corasick, 1975).

    A state is a beginning of a stop string: the longest one that the text ends with. State 0 is the empty one.
    depth[state]: its length. found[state]: the longest stop string that ends there, or None.
    """

    def __init__(self, stops: Sequence[str]):
        children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            state = 0
            for character in stop:
                known = children[state].get(character)
                if known is None:
                    known = len(children)
                    children[state][character] = known
                    children.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.found.append(None)
                state = known
            self.found[state] = stop
        self._children = children
        self._fall = self._falls()

    def _falls(self) -> list[int]:
        """Per state the next shorter beginning that it ends with. Fills `found` with stops inside of others."""
        fall, queue = [0] * len(self._children), deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if self.found[state] is None:
                self.found[state] = self.found[fall[state]]
            for character, child in self._children[state].items():
                at = fall[state]
                while at and character not in self._children[at]:
                    at = fall[at]
                fall[child] = self._children[at].get(character, 0)
                queue.append(child)
        return fall

    def step(self, state: int, character: str) -> int:
        """The state after one more character. n characters fall back at most n times."""
        while (known := self._children[state].get(character)) is None and state:
            state = self._fall[state]
        return known or 0


@functools.lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Answers to one request share it."""
    return _Automaton(stops)


class StopMatcher:
    """Finds stop strings: each fed piece returns the text to show and the stop string that was found, if any.

    Text before the stop string is returned exactly, the stop string and what follows it is not. Time is in proportion
    to the text, however many stop strings there are and whatever they look like.
    """

    def __init__(self, stops: Sequence[str]):
        self._machine = _automaton(tuple(stops)) if stops else None
        self._state = 0
        self._text = ""  # what the state stands for

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Return the text in which no stop string can begin any more, and the one that `piece` completed, if any."""
        machine = self._machine
        if machine is None:
            return piece, None
        text, state = self._text + piece, self._state
        for end, character in enumerate(piece, len(self._text) + 1):
            state = machine.step(state, character)
            stop = machine.found[state]
            if stop is not None:
                self._text, self._state = "", 0
                return text[: end - len(stop)], stop
        keep = len(text) - machine.depth[state]
        self._text, self._state = text[keep:], state
        return text[:keep], None

    def flush(self) -> str:
        """Return the text that was held back because it could have begun a stop string. Call once, at the end."""
        shown, self._text, self._state = self._text, "", 0
        return shown
