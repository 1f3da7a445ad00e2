"""Learns how often draft tokens are right, by the length of the match before them. Pure counting."""

from __future__ import annotations

__all__ = ["AcceptanceRates"]

_LIFETIME = 256.0
"""Draft tokens behind matches of one length after which older ones count for little."""

_PRIOR_WEIGHT = 8.0
"""Draft tokens that the first assumption is worth."""


class AcceptanceRates:
    """The share of draft tokens that were right, for each length of the match before them, up to max_match.

    Drafts count whether a step ran them or not: what was not run costs nothing to compare. Until there are some, those
    behind a match of n tokens are taken to be right n times of n + 2.
    """

    def __init__(self, max_match: int) -> None:
        self._most = max_match
        self._rates = [length / (length + 2.0) for length in range(max_match + 1)]
        self._weights = [_PRIOR_WEIGHT] * (max_match + 1)

    def add(self, match_len: int, was_right: bool) -> None:
        """Note what became of a draft token behind a match of this length."""
        weight = min(self._weights[match_len] + 1.0, _LIFETIME)
        self._rates[match_len] += (was_right - self._rates[match_len]) / weight
        self._weights[match_len] = weight

    def chances(self, match_len: int, count: int) -> list[float]:
        """Return the chances that the first 1, 2, ... count draft tokens are all right: each makes the match longer."""
        chance, found = 1.0, []
        for i in range(count):
            chance *= self._rates[min(match_len + i, self._most)]
            found.append(chance)
        return found
