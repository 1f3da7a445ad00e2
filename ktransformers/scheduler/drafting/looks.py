"""Decides which sequences are looked at for draft tokens, so that looking costs little where it finds nothing.

Looking takes time, which counts where steps take less than a few milliseconds. So a sequence has a number of looks:
each takes one of them, each accepted draft token brings some back. Without any left it rests: it is looked at every few
steps, so that this takes the share _MOST_TIME of a step's time, and after rests that are twice as long each time where
that finds nothing. What is copied goes on for longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq

from ktransformers.scheduler.sequence import Sequence

__all__ = ["Looks"]

_FIRST, _MOST, _SAVED = 8, 32, 0.1
"""Looks that a sequence has at first, half of those that the one before it had if nothing was accepted since, and at
most; and the share of a token's time that an accepted draft token is taken to save, in which as many looks as it brings
back may take place."""

_SECONDS, _MOST_TIME, _SHORTEST_REST, _LONGER = 20e-6, 0.005, 32, 8
"""What a look takes at the end of a rest, the share of a step's time that it may take, the most steps that the shortest
rest has for that, and how many times as long rests become, twice each time, where they find nothing."""

_ANEW = 2.0
"""Looks that a sequence has at least whose draft tokens ran in a step of a size that is not known yet."""


class Looks:
    """The looks of all sequences: num_looks, rest and wakes_at of a Sequence are counted here."""

    def __init__(self) -> None:
        self._first, self._per_token = float(_FIRST), 1.0
        self._num_steps = 0
        self._all_rest_until = self._num_resting = 0  # a step up to which the last sequences all rest, and how many
        self._num_rows, self._seconds = 1, 0.0  # of the last step without draft tokens that was timed

    def add_step(self) -> None:
        """Count a step."""
        self._num_steps += 1

    def add_time(self, num_rows: int, seconds: float) -> None:
        """Note what a step without draft tokens took."""
        self._num_rows, self._seconds = num_rows, seconds

    def add_accepted(self, seq: Sequence, num_accepted: int) -> None:
        """Bring looks back for draft tokens that were right."""
        self._first = float(_FIRST)
        seq.num_looks = min(max(seq.num_looks, 0) + self._per_token * num_accepted, _MOST)
        self._all_rest_until = seq.rest = 0

    def begin(self, seq: Sequence) -> None:
        """Give a sequence that was never looked at its first looks."""
        seq.num_looks = self._first
        self._first = max(self._first / 2, 1.0)

    def awake(self, decodes: Seq[Sequence]) -> Set[Sequence]:
        """Return those that are looked at. Where nothing pays, most steps end here."""
        if self._num_steps < self._all_rest_until and len(decodes) == self._num_resting:
            return frozenset()
        return {seq for seq in decodes if seq.num_looks > 0 or seq.wakes_at <= self._num_steps}

    def look_again(self) -> None:
        """Others than those that rest may come."""
        self._all_rest_until = 0

    def wake(self, seqs: Iterable[Sequence]) -> None:
        """Look at these in the next step again."""
        self._all_rest_until = 0
        for seq in seqs:
            seq.wakes_at = 0

    def try_again(self, seqs: Iterable[Sequence]) -> None:
        """Give looks to sequences whose draft tokens ran in a step that was too rare for its time to be known."""
        self._all_rest_until = 0
        for seq in seqs:
            seq.num_looks = max(seq.num_looks, _ANEW)

    def take(self, decodes: Seq[Sequence], awake: Set[Sequence], found: Seq[Seq[float]]) -> None:
        """Count that these were looked at, and say when they are again. found: what was found for each decode: where
        there is something rests become no longer, though it did not pay."""
        looks = self._seconds / self._num_rows / _SECONDS  # as long as a token of an answer takes
        shortest = min(round(1.0 / (_MOST_TIME * looks)), _SHORTEST_REST) if looks else 0
        self._per_token = _SAVED * looks
        for seq, one in zip(decodes, found, strict=True):
            if seq not in awake:
                continue
            seq.num_looks -= 1
            if seq.num_looks <= 0:
                seq.rest = shortest if one else min(max(2 * seq.rest, shortest), _LONGER * shortest)
                seq.wakes_at = self._num_steps + seq.rest
        self._all_rest_until = min(0 if seq.num_looks > 0 else seq.wakes_at for seq in decodes)
        self._num_resting = len(decodes)
