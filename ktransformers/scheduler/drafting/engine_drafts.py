"""Draft tokens that the engine finds itself when a step begins: by a draft model, or by the model's own MTP layers.

A plan has UNKNOWN in their place, so that it says how many there are and not which. Knows how many were right, and so
how many to ask for; the tokens come with the results, as far as they were accepted.

Where the last tokens stood before in the text, what followed there may be likelier than what a model finds, and costs
nothing: then that is the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.prompt_lookup import PromptLookup

__all__ = ["MAX_STREAK", "EngineDrafts"]

MAX_STREAK = 4
"""Draft tokens of a sequence that were right one after the other: more tell no more."""


class EngineDrafts:
    """A Drafter of one sequence whose draft tokens the engine finds, or those of `lookup` where these are likelier.

    rates: of all sequences, by the streak and the depth. streak: draft tokens of the engine that were right since the
    last wrong one, up to MAX_STREAK.
    """

    def __init__(self, lookup: PromptLookup, rates: AcceptanceRates) -> None:
        self._lookup, self._rates = lookup, rates
        self.streak = 0

    def __len__(self) -> int:
        """Number of the sequence's tokens."""
        return len(self._lookup)

    def add(self, token_id: int) -> bool | None:
        """Take a token, see Drafter.add. What became of the engine's draft tokens is for `took`."""
        return self._lookup.add(token_id)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take several tokens, see Drafter.extend."""
        self._lookup.extend(token_ids)

    def copies(self, most: int) -> bool:
        """Whether its first `most` draft tokens are copied from the text, which takes no time, see Drafter.copies."""
        return sum(self._lookup.chances(most)) > sum(self._rates.chances(self.streak, most))

    def chances(self, most: int) -> list[float]:
        """Return the chances of the first `most` draft tokens, see Drafter.chances."""
        return self._lookup.chances(most) if self.copies(most) else self._rates.chances(self.streak, most)

    def later(self, most: int) -> tuple[float, list[float]]:
        """Return the chances behind the next token, see Drafter.later: the engine's are the same, whatever that is."""
        return self._lookup.later(most) if self.copies(most) else (1.0, self._rates.chances(self.streak, most))

    def draft(self, most: int) -> list[int]:
        """Return `most` tokens that are copied from the text."""
        return self._lookup.draft(most)

    def took(self, num_drafted: int, num_accepted: int, *, is_cut: bool) -> None:
        """Learn of draft tokens that the engine found: `lookup` learns of its own by itself. is_cut: the answer ended
        there, which says nothing of tokens that were not accepted."""
        for depth in range(num_accepted):
            self._rates.add(self.streak, True, depth)
        if num_accepted == num_drafted or is_cut:
            self.streak = min(self.streak + num_accepted, MAX_STREAK)
        else:
            self._rates.add(self.streak, False, num_accepted)
            self.streak = 0
