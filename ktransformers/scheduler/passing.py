"""Chooses which prompt may pass those before it, and how far: the shortest, by a quarter of the rows that prompts have.

A question of nine tokens should not wait until six prompts of 8,000 are done, and these should not wait for questions
that never end: the part that passes is saved up, row by row, and spent. Pure; knows ranks and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ktransformers.scheduler.sequence import Sequence

__all__ = ["Passing"]

_SHARE = 4
"""One of so many rows of prompts may be of one that passes."""

_LEAST_SAVED = 64
"""Rows that may be saved up, however small chunks are."""


class Passing:
    """Decides which short prompt may pass longer ones of its priority. chunk_size: most tokens of a step."""

    def __init__(self, chunk_size: int):
        self._most = max(chunk_size // _SHARE, _LEAST_SAVED)
        self._saved = float(self._most)

    @staticmethod
    def choose(prefills: Seq[Sequence]) -> Sequence | None:
        """Choose, of running sequences with tokens left to plan, by rank, the one that may pass: it has the fewest of
        those of the first one's priority. None where the first one has."""
        first = prefills[0]
        alike = (seq for seq in prefills if seq.request.priority == first.request.priority)
        shortest = min(alike, key=lambda seq: (seq.num_unplanned, seq.rank))
        return None if shortest is first else shortest

    def shortest(self, prefills: Seq[Sequence], passing: Sequence | None) -> int:
        """Count the tokens left of the shortest prompt if all of them may be in the next step, else 0."""
        if passing is None:
            return prefills[0].num_unplanned
        return passing.num_unplanned if passing.num_unplanned <= self._saved else 0

    def part(self, passing: Sequence | None, num_rows: int) -> int:
        """Return how many of the num_rows rows that a step has for prompts go to the one that passes."""
        if passing is None:
            return 0
        self._saved = min(self._saved + num_rows / _SHARE, self._most)
        return min(int(self._saved), num_rows, passing.num_unplanned)

    def spend(self, num_rows: int) -> None:
        """Note that num_rows rows went to the one that passed."""
        self._saved -= num_rows
