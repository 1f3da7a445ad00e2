"""Chooses the word for the effort of reasoning that a chat template takes, nearest to the one that a request has."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["EFFORT_VARIABLES", "nearest_effort"]

EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort")
"""What templates call the variable."""

_SCALE = (("none", "no_think", "off"), ("minimal",), ("low",), ("medium",), ("high",), ("xhigh",), ("max",))


def nearest_effort(word: str, is_taken: Callable[[str], bool]) -> str:
    """Return `word` if it is taken, else the nearest one that is, of two the one that thinks more; `word` if none is.

    Nothing but reasoning turned off is as near as "none" to a word for no reasoning, so that a word for some reasoning
    never turns it off unless nothing else is taken.
    """
    level = next((index for index, words in enumerate(_SCALE) if word in words), None)
    if level is None or is_taken(word):
        return word
    order = sorted(range(len(_SCALE)), key=lambda index: (index == 0 < level, abs(index - level), -index))
    return next((one for index in order for one in _SCALE[index] if is_taken(one)), word)
