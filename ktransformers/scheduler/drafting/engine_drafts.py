"""Draft tokens that the engine finds itself when a step begins: by a draft model, or by the model's own MTP layers.

A plan has UNKNOWN in their place, so that it says how many there are and not which. Knows how many were right, and so
how many to ask for; the tokens come with the results, as far as they were accepted.

Where the last tokens stood before in the text, what followed there may be likelier than what a model finds, and costs
nothing: then that is the draft.

Each further token of a step's longest draft takes the engine a step of its own, but where one pass makes a block of
them (DSpark): that takes as long for one as for all. Nothing is learnt of drafts that are not run, so that a few
always are, though they did not pay. An MTP layer has to be kept up to date besides, which costs all steps and prompts
something, and nothing where it does not draft: its share of each step with draft tokens counts as theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.prompt_lookup import PromptLookup
from ktransformers.scheduler.drafting.row_costs import DraftCost, ObserveCost

__all__ = ["DrafterHistory", "EngineDrafts"]

_MAX_STREAK = 4
"""Draft tokens of a sequence that were right one after the other: more tell no more."""

_PROBE, _LONGEST_PROBE = 128, 4096
"""Steps of decodes after which the engine drafts once more, though it did not pay: texts change. After each time that
its token was wrong twice as many; where it was right it goes on at once."""

_OBSERVED = 16
"""Steps behind and before one with draft tokens that an MTP layer is shown. It has nothing of the others: what it sees
of the target makes up for that, and running it for all tokens costs more than a few drafts would."""


class DrafterHistory:
    """What the engine's drafter takes, how often it is right, and when it is tried though it did not pay.

    rates: of the draft tokens of all sequences, by the streak and the depth.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.rates = AcceptanceRates(_MAX_STREAK, max(config.max_drafts - 1, 1))
        self._is_block = config.drafts_in_block
        # Another drafter is shown all steps, whether it drafts or not; so is a block's, to which that costs little.
        self._is_layer = config.drafter == "mtp" and not self._is_block
        self._draft_cost, self._observe_cost = DraftCost(), ObserveCost()
        self._probe, self._is_probing = _PROBE, False
        self._num_undrafted = 0  # steps since it last drafted

    def add_shown(self, seconds: float) -> float:
        """Note what it took to show the drafter a step. Returns the seconds that are not the step's own."""
        if not self._is_layer:
            return 0.0
        self._observe_cost.add(seconds)
        return seconds

    def add_steps(self, num_steps: int) -> None:
        """Count steps of decodes alone, with draft tokens or without."""
        self._num_undrafted += num_steps

    def add_drafts(self, longest: int, seconds: float) -> None:
        """Note what finding the draft tokens of a step took, which is counted, and how many the longest draft has."""
        is_behind, longest = self._num_undrafted > 1, 1 if self._is_block else longest
        if seconds > 0:
            self._draft_cost.add(longest, seconds, is_behind=is_behind)
        if is_behind:  # it ran what had waited, too
            self._observe_cost.add(max(seconds - longest * self._draft_cost.seconds, 0.0))
        self._observe_cost.drafted(is_soon=self._num_undrafted <= _OBSERVED)
        self._num_undrafted = 0

    def add_accepted(self) -> None:
        """Note that draft tokens were right. Where they were tried it goes on at once."""
        self._probe = _PROBE
        self._num_undrafted += self._is_probing * _PROBE

    def probes(self, *, pays: bool) -> bool:
        """Whether one draft token is to be tried now, whether there is room for it or not. pays: some are chosen."""
        self._is_probing = self.is_due and not pays
        if self._is_probing:
            self.rates.doubt()
            self._num_undrafted, self._probe = 0, min(2 * self._probe, _LONGEST_PROBE)
        return self._is_probing

    @property
    def is_due(self) -> bool:
        """Whether it has not drafted for so long that it is to be tried."""
        return self._num_undrafted >= self._probe

    @property
    def is_observed(self) -> bool:
        """Whether the drafter is shown the next step, see StepPlan."""
        return not self._is_layer or not _OBSERVED <= self._num_undrafted < self._probe - _OBSERVED

    @property
    def token_seconds(self) -> float:
        """What one more token of a step's longest draft takes: nothing where one pass makes them all."""
        return 0.0 if self._is_block else self._draft_cost.seconds

    @property
    def step_seconds(self) -> float:
        """What each step with draft tokens takes, however many: keeping the drafter up to date, or the pass that makes
        them all."""
        if self._is_block:
            return self._draft_cost.seconds
        return self._observe_cost.seconds if self._is_layer else 0.0


class EngineDrafts:
    """A Drafter of one sequence whose draft tokens the engine finds, or those of `lookup` where these are likelier.

    rates: of all sequences, by the streak and the depth. streak: draft tokens of the engine that were right since the
    last wrong one, up to _MAX_STREAK.
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
            self.streak = min(self.streak + num_accepted, _MAX_STREAK)
        else:
            self._rates.add(self.streak, False, num_accepted)
            self.streak = 0
