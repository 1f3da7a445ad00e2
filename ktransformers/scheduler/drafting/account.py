"""Decides whether draft tokens of one kind are looked for at all: for as long as they gain what they cost.

Counted in plain steps, which are those in which nobody looks for draft tokens. Looking, keeping a drafter up to date,
drafting, and the rows of draft tokens cost a share of a plain step each; accepted tokens save plain steps:

    balance = accepted tokens / sequences - (seconds of the step with draft tokens, and of finding them, / plain - 1)

    awake ── overdrawn ──> rests ── balance 0 ──> awake: tried again ── overdrawn ──> rests twice as long
                                                      └── gains ──> awake, and each plain step gained halves the rests

What is older than some 1 / _FADING steps counts for little, so that what gained much is given up as soon as it loses.
An overdrawn account rests for as many steps as make what it is overdrawn by a small share of them, and is tried again.
From one rest to the next that share is halved, down to _LEAST_SHARE: so that what never pays takes that much at most in
the long run, and what pays again is found out. Pure: knows no tokens and reads no clock.
"""

from __future__ import annotations

import math

__all__ = ["FIRST_SHARE", "Account"]

_FIRST, _MOST = 1.0, 16.0
"""Plain steps that may be lost at first, and behind any gains."""

_FADING = 1 / 32
"""The share of a balance that is forgotten with each step that is paid for."""

FIRST_SHARE, _LEAST_SHARE = 0.096, 0.003
"""The shares of a rest that were lost before it. Where the first one is smaller, drafts that pay well in the mean rest
for long behind a few that were wrong."""


class Account:
    """What draft tokens of one kind gained of late, less what they cost, in plain steps. `now` counts steps.
    first_share: the share of the first rest that may be lost before it."""

    def __init__(self, first_share: float = FIRST_SHARE) -> None:
        self.balance, self._profit, self._due = _FIRST, 0.0, 0.0
        self._share = self._first_share = first_share
        self.wakes_at, self._rests = 0, False

    def spend(self, steps: float) -> None:
        """Take what draft tokens cost in a step, of which the least share is free. What is spent in a rest, so that
        they can be tried behind it, is paid for when they are."""
        self._due += steps
        if not self._rests:
            self.balance -= _FADING * self.balance + self._due - _LEAST_SHARE
            self._due = 0.0

    def earn(self, steps: float) -> None:
        """Add what accepted draft tokens saved. Each plain step more that is saved with a balance doubles the share."""
        if self.balance > _FIRST:
            self._profit += steps
            self._share = min(self._share * 2.0 ** int(self._profit), self._first_share)
            self._profit %= 1.0
        self.balance = min(self.balance + steps, _MOST)

    def is_awake(self, now: int) -> bool:
        """Whether draft tokens are looked for now. An overdrawn account begins its rest."""
        if self.balance < 0:
            self.wakes_at = now + math.ceil(-self.balance / self._share)
            self._share, self.balance = max(self._share / 2, _LEAST_SHARE), 0.0
        self._rests = now < self.wakes_at
        return not self._rests
