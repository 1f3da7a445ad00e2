"""Learns how often draft tokens are right, by what is known before they are tried. Pure counting."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

__all__ = ["AcceptanceRates"]

_LIFETIME = 256.0
"""Draft tokens of one kind after which older ones count for little."""

_PRIOR_WEIGHT = 8.0
"""Draft tokens that the first assumption is worth."""

_MODEL_PRIOR = 0.6
"""What is assumed of a draft token that a model has found, behind right ones."""

_NEARLY = 0.01
"""How far a rate has to move before chances are computed anew: they are asked for in every step."""


class AcceptanceRates:
    """The share of draft tokens that were right, given that those before them in the draft were, by two keys.

    match_len: tokens before the first draft token that were as drafted, up to max_match. depth: the place of a token in
    its draft, from 0 up to max_depth. Where max_depth is 0, drafts are copies of text: each right token is one more of
    the match, which alone counts, and until there are some, those behind a match of n tokens are taken to be right n
    times of n + 2. Else a model finds them, each from those before: then both keys count.
    """

    def __init__(self, max_match: int, max_depth: int = 0) -> None:
        self._max_match, self._max_depth = max_match, max_depth
        if max_depth:
            self._rates = [[_MODEL_PRIOR] * (max_depth + 1) for _ in range(max_match + 1)]
        else:
            self._rates = [[length / (length + 2.0) for length in range(max_match + 1)]]
        self._weights = [[_PRIOR_WEIGHT] * len(rates) for rates in self._rates]
        self._used = [rates.copy() for rates in self._rates]  # those that chances were computed of
        self._chances: dict[tuple[int, int], tuple[float, ...]] = {}

    def add(self, match_len: int, was_right: bool, depth: int = 0, times: int = 1) -> None:
        """Note what became of `times` draft tokens behind a match of this length, at this place of their draft."""
        at, row = min(match_len, self._max_match), 0
        if self._max_depth:
            row, at = at, min(depth, self._max_depth)
        rates, weights = self._rates[row], self._weights[row]
        weights[at] = weight = min(weights[at] + times, _LIFETIME)
        rates[at] = rate = rates[at] + (was_right - rates[at]) * times / weight
        if abs(rate - self._used[row][at]) > _NEARLY:
            self._used[row][at] = rate
            self._chances.clear()

    def doubt(self) -> None:
        """Let what is learnt from now on count for more than what was: it has not been tried for long."""
        self._weights = [[min(weight, _PRIOR_WEIGHT) for weight in weights] for weights in self._weights]

    def chances(self, match_len: int, count: int) -> tuple[float, ...]:
        """Return the chances that the first 1, 2, ... count draft tokens are all right, to about _NEARLY."""
        found = self._chances.get((match_len, count))
        if found is None:
            at = min(match_len, self._max_match)
            rates = self._used[at][:count] if self._max_depth else self._used[0][at : at + count]
            last = self._used[at if self._max_depth else 0][-1]
            rates = rates + [last] * (count - len(rates))
            found = self._chances[match_len, count] = tuple(accumulate(rates, mul))
        return found
