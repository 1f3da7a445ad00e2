"""Draft tokens that the engine finds itself when a step begins: by a draft model, or by the model's own MTP layers.

A plan has UNKNOWN in their place, so that it says how many there are and not which. How many were right comes with the
results; by that it is known how many to ask for.

Each further token of a step's longest draft takes the engine a step of its own, but where one pass makes a block of
them (DSpark): that takes as long for one as for all. Nothing is learnt of drafts that are not run: so for as long as
the account is awake some are, and it is their gains and losses that decide whether that goes on. An MTP layer has to be
kept up to date besides, which costs all steps and prompts something, and nothing where it rests: the account pays for
that, too.
"""

from __future__ import annotations

from ktransformers.scheduler.batch import PlannedStep
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.account import FIRST_SHARE, Account
from ktransformers.scheduler.drafting.row_costs import DraftCost
from ktransformers.scheduler.records import UNKNOWN
from ktransformers.scheduler.sequence import Sequence

__all__ = ["EngineDrafts"]

_MAX_STREAK = 4
"""Draft tokens of a sequence that were right one after the other: more tell no more."""

_FIRST_SHARE = FIRST_SHARE / 8
"""Its rests are longer from the first one on: a try takes more than a look at a text does."""

_OBSERVED = 4
"""Steps before the end of a rest from which on an MTP layer is shown what is computed. It has nothing of the others:
what it sees of the target makes up for that, and running it for all tokens costs more than a few drafts would."""

_SPREAD = 128
"""Decode steps over which it is spread what showing a prompt took, or running what had waited."""


class EngineDrafts:
    """What the engine's drafter takes, how often it is right, and what that gains.

    Of each sequence it counts `streak`: draft tokens that were right since the last wrong one, up to _MAX_STREAK.
    in_block: whether one pass makes all draft tokens of a step.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.account = Account(_FIRST_SHARE)
        self._rates = AcceptanceRates(_MAX_STREAK, max(config.max_drafts - 1, 1))
        self.in_block = config.drafts_in_block
        # Another drafter is shown all steps, whether it drafts or not; so is a block's, to which that costs little.
        self._is_layer = config.drafter == "mtp" and not self.in_block
        self._cost, self._owed, self._rests = DraftCost(), 0.0, False
        self._num_undrafted = 0  # steps since it last drafted

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Return the chances that the first 1, 2, ... `most` draft tokens of a sequence are all right."""
        return self._rates.chances(seq.streak, most)

    def is_awake(self, now: int) -> bool:
        """Whether it drafts now, see Account. Behind a rest, what it learnt before counts for little."""
        is_awake = self.account.is_awake(now)
        if is_awake and self._rests:
            self._rates.doubt()
        self._rests = not is_awake
        return is_awake

    @property
    def observed_from(self) -> int:
        """The step from which on a layer that rests is shown what is computed; of another drafter, the rest's end."""
        return self.account.wakes_at - (_OBSERVED if self._is_layer else 0)

    def is_observed(self, now: int) -> bool:
        """Whether the drafter is shown the next step, see StepPlan."""
        return not self._is_layer or now >= self.observed_from

    @property
    def token_seconds(self) -> float:
        """What one more token of a step's longest draft takes, or the pass that makes a block of them."""
        return self._cost.seconds

    def add_prompt(self, observe_seconds: float) -> None:
        """Note what it took to show the drafter a step with prompts."""
        if self._is_layer:
            self._owed += observe_seconds

    def add_decode(self, step: PlannedStep, draft_seconds: float, observe_seconds: float) -> tuple[float, float]:
        """Note what a step of decodes alone took to find its draft tokens, and to show the drafter what was computed.

        Returns the seconds of that which are not the step's own, and those which the account has to pay.
        """
        longest = max((len(row.drafts) for row in step.rows if row.drafts and row.drafts[-1] == UNKNOWN), default=0)
        passes = min(longest, 1) if self.in_block else longest
        observed = observe_seconds if self._is_layer else 0.0
        paid = observed
        if passes:
            if draft_seconds > 0:
                self._cost.add(passes, draft_seconds, is_behind=self._num_undrafted > 0)
            finding = min(draft_seconds, passes * self._cost.seconds)
            self._owed += draft_seconds - finding
            paid += finding
        self._num_undrafted = 0 if longest else self._num_undrafted + 1
        part = self._owed / _SPREAD
        self._owed -= part
        return draft_seconds + observed, paid + part

    def took(self, seq: Sequence, num_drafted: int, num_accepted: int, *, is_cut: bool) -> None:
        """Learn of draft tokens that the engine found. is_cut: the answer ended there, which says nothing of tokens
        that were not accepted."""
        for depth in range(num_accepted):
            self._rates.add(seq.streak, True, depth)
        if num_accepted == num_drafted or is_cut:
            seq.streak = min(seq.streak + num_accepted, _MAX_STREAK)
        else:
            self._rates.add(seq.streak, False, num_accepted)
            seq.streak = 0
