"""Learns how often draft tokens are right, by what is known before they are tried. Pure counting."""

from __future__ import annotations

__all__ = ["AcceptanceRates"]

_LIFETIME = 256.0
"""Draft tokens of one kind after which older ones count for little."""

_PRIOR_WEIGHT = 8.0
"""Draft tokens that the first assumption is worth."""

_MODEL_PRIOR = 0.6
"""What is assumed of a draft token that a model has found, behind right ones."""


class AcceptanceRates:
    """The share of draft tokens that were right, given that those before them in the draft were, by two keys.

    match_len: tokens before the first draft token that were as drafted, up to max_match. depth: the place of a token in
    its draft, from 0 up to max_depth. Where max_depth is 0, drafts are copies of text: each right token is one more of
    the match, which alone counts, and until there are some, those behind a match of n tokens are taken to be right n
    times of n + 2. Else a model finds them, each from those before: then both keys count.
    """

    def __init__(self, max_match: int, max_depth: int = 0) -> None:
        self._max_match, self._max_depth = max_match, max_depth
        depths = range(max_depth + 1)
        self._rates = [
            [_MODEL_PRIOR if max_depth else length / (length + 2.0) for _ in depths] for length in range(max_match + 1)
        ]
        self._weights = [[_PRIOR_WEIGHT] * (max_depth + 1) for _ in range(max_match + 1)]

    def add(self, match_len: int, was_right: bool, depth: int = 0) -> None:
        """Note what became of a draft token behind a match of this length, at this place of its draft."""
        match_len, depth = min(match_len, self._max_match), min(depth, self._max_depth)
        rates, weights = self._rates[match_len], self._weights[match_len]
        weights[depth] = min(weights[depth] + 1.0, _LIFETIME)
        rates[depth] += (was_right - rates[depth]) / weights[depth]

    def doubt(self) -> None:
        """Let what is learnt from now on count for more than what was: it has not been tried for long."""
        self._weights = [[min(weight, _PRIOR_WEIGHT) for weight in weights] for weights in self._weights]

    def chances(self, match_len: int, count: int) -> list[float]:
        """Return the chances that the first 1, 2, ... count draft tokens are all right."""
        chance, found = 1.0, []
        for i in range(count):
            grown = match_len if self._max_depth else match_len + i  # a copy's match is longer by each right token
            chance *= self._rates[min(grown, self._max_match)][min(i, self._max_depth)]
            found.append(chance)
        return found
