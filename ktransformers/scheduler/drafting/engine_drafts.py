"""Draft tokens that the engine finds itself when a step begins: by a draft model, or by the model's own MTP layers.

A plan has UNKNOWN in their place, so that it says how many there are and not which. Knows how many were right, and so
how many to ask for; the tokens come with the results, as far as they were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.records import UNKNOWN

__all__ = ["MAX_STREAK", "EngineDrafts"]

MAX_STREAK = 4
"""Draft tokens of a sequence that were right one after the other: more tell no more."""


class EngineDrafts:
    """A Drafter of one sequence whose draft tokens the engine finds. rates: of all sequences, by the streak and the
    depth. streak: draft tokens that were right since the last wrong one, up to MAX_STREAK."""

    def __init__(self, known_len: int, rates: AcceptanceRates) -> None:
        self._len, self._rates = known_len, rates
        self.streak = 0

    def __len__(self) -> int:
        """Number of the sequence's tokens."""
        return self._len

    def add(self, token_id: int) -> None:
        """Count a token, see Drafter.add. Whether it was drafted, and rightly, is what `took` is told."""
        self._len += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count several tokens, see Drafter.extend."""
        self._len += len(token_ids)

    def chances(self, most: int) -> list[float]:
        """Return the chances of the first `most` draft tokens, see Drafter.chances."""
        return self._rates.chances(self.streak, most)

    def later(self, most: int) -> list[float]:
        """Return the chances behind the next token, see Drafter.later: the same, whatever that is."""
        return self.chances(most)

    def draft(self, most: int) -> list[int]:
        """Return places for `most` tokens, which the engine fills in."""
        return [UNKNOWN] * most

    def took(self, num_drafted: int, num_accepted: int, *, is_cut: bool) -> None:
        """Learn from a step. is_cut: the answer ended there, which says nothing of tokens that were not accepted."""
        for depth in range(num_accepted):
            self._rates.add(self.streak, True, depth)
        if num_accepted == num_drafted or is_cut:
            self.streak = min(self.streak + num_accepted, MAX_STREAK)
        else:
            self._rates.add(self.streak, False, num_accepted)
            self.streak = 0
