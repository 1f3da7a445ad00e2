"""Texts cut into segments (tags and single characters), and what two texts share at their ends.

Comparing characters would cut tags in two: `</a><c>` and `<b><c>` share `><c>`, and that is no tag of anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["Splitter", "shared_end", "shared_start"]

_TAG = r"</?[^\s<>/][^<>\n]{0,80}>|\[/?[A-Z][A-Z_ ]{2,40}\]"


class Splitter:
    """Cuts texts into segments. tokens: the tokenizer's added tokens, each of which is a segment."""

    def __init__(self, tokens: Iterable[str]):
        known = sorted({token for token in tokens if token.strip()}, key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, known), _TAG, "."]), re.DOTALL)

    def split(self, text: str) -> list[str]:
        """Return the segments of a text, which together are the text."""
        return self._pattern.findall(text)

    def tags(self, text: str) -> list[str]:
        """Return the segments of a text that are tags."""
        return [part for part in self.split(text) if len(part) > 1]


def shared_start(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many segments both texts begin with."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def shared_end(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many segments both texts end with."""
    return shared_start(first[::-1], second[::-1])
