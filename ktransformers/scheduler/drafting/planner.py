"""Decides how many draft tokens the rows of a step get: as many as make answers faster, by what steps take.

    tokens of a sequence = 1 + sum of the chances that a draft token and those before it are accepted
    chosen               the draft tokens with which the product of all sequences' tokens / seconds is greatest

The product, not the sum: a step that is longer for the sake of some is longer for all, and what one answer gains by
drafts must be more, as a ratio, than what the others lose.

With experts in RAM a second row reads most of its experts anew, so that a step of two rows may take 1.75 times as long:
then only drafts that are nearly sure pay. Where steps read the same weights whatever they carry, most do. Both are
found out, by timing each number of rows (row_costs.py) and by comparing drafts with what came (acceptance.py).

Where the engine finds the drafts, that takes time, which engine_drafts.py knows. Looking for drafts in the text takes
time, too: looks.py says which sequences are looked at. Nor are all steps timed where none has draft tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from collections.abc import Set
from typing import NamedTuple

from ktransformers.scheduler.batch import PlannedRow, PlannedStep
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.engine_drafts import DrafterHistory, EngineDrafts
from ktransformers.scheduler.drafting.looks import Looks
from ktransformers.scheduler.drafting.prompt_lookup import MAX_MATCH, PromptLookup
from ktransformers.scheduler.drafting.row_costs import RowCosts
from ktransformers.scheduler.records import UNKNOWN
from ktransformers.scheduler.sequence import Drafter, Sequence
from ktransformers.scheduler.step_times import size_of

__all__ = ["MARGIN", "DraftPlanner"]

MARGIN = 1.05
"""How many times as fast answers must become, in the mean: what is known of times and acceptance is not exact."""

_TRIES = 4
"""Steps with draft tokens of a size, soon after one another, of whose times the least is the first that counts: where
such steps are rare they find nothing in caches, and what seems slow is not tried again for long."""


class _Look(NamedTuple):
    """What drafts for a sequence, and how many tokens at most."""

    drafter: Drafter
    most: int


class DraftPlanner:
    """Drafts for the decodes of steps within the limits of `config`; none where its max_drafts is 0."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.most, self._chunk_size, self._has_stages = config.max_drafts, config.chunk_size, config.num_stages > 1
        max_rows = min(config.max_running * (1 + self.most), config.chunk_size)
        self._rates, self._costs = AcceptanceRates(MAX_MATCH), RowCosts(max_rows)
        self._engine = DrafterHistory(config) if config.drafts_in_engine else None
        self._looks = Looks()
        self._num_untimed = self._untimed_rows = 0  # steps of so many rows to come that are not timed
        self._tries: dict[int, list[float]] = {}  # of steps with draft tokens, by size: what the first ones took

    def add_row(self, row: PlannedRow, num_accepted: int, *, is_cut: bool) -> None:
        """Note what became of a row's draft tokens. is_cut: the answer ended, so that some were not looked at."""
        seq = row.seq
        if num_accepted:
            self._looks.add_accepted(seq, num_accepted)
        if isinstance(seq.drafter, EngineDrafts) and row.drafts[-1] == UNKNOWN:
            seq.drafter.took(len(row.drafts), num_accepted, is_cut=is_cut)
            if num_accepted and self._engine:
                self._engine.add_accepted()

    def add_step(
        self, step: PlannedStep, seconds: float, draft_seconds: float = 0.0, observe_seconds: float = 0.0
    ) -> None:
        """Note what a step took, with all that lies between steps, and what of that the engine took to find draft
        tokens, and to show its drafter what was computed. The step's tokens come later."""
        self._looks.add_step()
        if self._engine:
            seconds -= self._engine.add_shown(observe_seconds)
        if self._num_untimed and not step.num_drafted and len(step.rows) == self._untimed_rows:
            self._num_untimed -= 1
            return
        if not self.most or not step.rows or not all(row.is_decode for row in step.rows):
            return
        num_rows = len(step.rows) + step.num_drafted
        if self._engine:
            self._engine.add_steps(1)
        counted: float | None = seconds
        if step.num_drafted:
            counted = self._drafted(step, num_rows, seconds - draft_seconds, draft_seconds)
        else:
            self._looks.add_time(num_rows, seconds)
        if counted is not None:
            self._costs.add(num_rows, counted, is_ahead=step.is_ahead, is_drafted=step.num_drafted > 0)
            self._num_untimed, self._untimed_rows = self._costs.skip(num_rows), num_rows
            if self._engine:
                self._engine.add_steps(self._num_untimed)

    def _drafted(self, step: PlannedStep, num_rows: int, seconds: float, draft_seconds: float) -> float | None:
        """Note a step with draft tokens. Returns the seconds that count for its size, None for its first ones."""
        found = max((len(row.drafts) for row in step.rows if row.drafts and row.drafts[-1] == UNKNOWN), default=0)
        if found and self._engine:
            self._engine.add_drafts(found, draft_seconds)
        if self._costs.knows(num_rows):
            return seconds
        size = size_of(num_rows)
        tries = self._tries[size] = [*self._tries.get(size, ()), seconds]
        if len(tries) == _TRIES:
            del self._tries[size]
            return min(tries)
        self._looks.try_again(row.seq for row in step.rows)
        return None

    def drafts(self, decodes: Seq[Sequence], prefills: Seq[Sequence]) -> list[list[int]]:
        """Return the draft tokens that the next step is to run for each of these sequences.

        None beside prompts, which use the time better, nor where the last token of a sequence is not known yet.
        """
        none: list[list[int]] = [[]] * len(decodes)
        awake = self._awake(decodes, prefills)
        if not awake:
            return none
        for seq in decodes:
            if seq.run is None or seq.run.num_pending or not seq.completion_len:
                return none
        looks = self._drafters(decodes, awake)
        firsts = [one.drafter.chances(1) if one else [] for one in looks]
        counts, costly = self._chosen(decodes, looks, firsts)
        self._looks.take(decodes, awake, firsts)
        if not any(counts):
            return none
        return [
            [] if not count else [UNKNOWN] * count if is_costly or one is None else one.drafter.draft(count)
            for one, count, is_costly in zip(looks, counts, costly, strict=True)
        ]

    def _chosen(
        self, decodes: Seq[Sequence], looks: Seq[_Look | None], firsts: Seq[list[float]]
    ) -> tuple[Seq[int], Seq[bool]]:
        """How many draft tokens each sequence gets, and whether the engine has to find them. firsts: the chance of the
        first one, where there is one."""
        most = sum(one.most for one, first in zip(looks, firsts, strict=True) if one and first)
        if not most or not self._knows_alone(len(decodes)):
            return (), ()
        if max(firsts)[0] <= self._costs.least_chance(len(decodes), most, MARGIN) and not self._is_due:
            return (), ()
        chances = [one.drafter.chances(one.most) if one else [] for one in looks]
        costly: Seq[bool] = self._costly(looks, chances)
        counts, _ = self._counts(chances, costly)
        if self._engine and self._engine.probes(pays=any(counts)):
            costly = [one is not None for one in self._drafters(decodes, set(decodes))]
            counts = [int(one) for one in costly]
        return counts, costly

    def _drafters(self, seqs: Seq[Sequence], awake: Set[Sequence]) -> list[_Look | None]:
        """What drafts for each sequence that is awake and may have draft tokens."""
        return [
            _Look(self._drafter(seq), most) if seq in awake and (most := self._most_of(seq)) else None for seq in seqs
        ]

    def _awake(self, decodes: Seq[Sequence], prefills: Seq[Sequence]) -> Set[Sequence]:
        """Those that are looked at: none beside prompts, which do not rest."""
        if not self.most or prefills:
            self._looks.look_again()
            return frozenset()
        return self._looks.awake(decodes)

    def _knows_alone(self, num_rows: int) -> bool:
        """Whether it is known what a step without draft tokens takes now."""
        return self._costs.knows(num_rows) and not self._costs.is_stale(num_rows)

    @property
    def is_observed(self) -> bool:
        """Whether the engine's drafter is shown the next step, see StepPlan."""
        return self._engine is None or self._engine.is_observed

    @property
    def _is_due(self) -> bool:
        return self._engine is not None and self._engine.is_due

    def awaits_tokens(self, running: Seq[Sequence], decodes: Seq[Sequence], prefills: Seq[Sequence]) -> bool:
        """Whether the step in flight is to be committed before the next one is planned: it runs draft tokens, or the
        next one would if the first of them are right, and gain by that more than is lost by waiting in vain.

        Nobody goes on alone meanwhile: a step with half of the sequences would cost those the others lack as much.
        """
        if not self.most or self._has_stages:
            return False
        if any(seq.run is not None and seq.run.num_drafted for seq in running):
            return True
        awake = self._awake(decodes, prefills)
        if not awake or not self._knows_alone(len(decodes)):
            return False
        looks, costs = self._drafters(decodes, awake), self._costs
        found = [one.drafter.later(one.most) if one else (1.0, list[float]()) for one in looks]
        firsts, chances = [first for first, _ in found], [later for _, later in found]
        counts, gain = self._counts(chances, self._costly(looks, chances))
        self._looks.take(decodes, awake, chances)
        is_awaited = self._is_due and any(self._most_of(seq) for seq in decodes)
        if any(counts):
            first = min(chance for chance, count in zip(firsts, counts, strict=True) if count)
            # One wait is lost for sure. Drafts that are right `first` of the time go on for 1 / (1 - first) steps.
            lost = len(decodes) * math.log1p(costs.wait / costs.seconds(len(decodes)))
            is_awaited = first * gain > (1.0 - first) * lost
        if is_awaited:
            self._looks.wake(awake)
        return is_awaited

    def _drafter(self, seq: Sequence) -> Drafter:
        drafter = seq.drafter
        if drafter is None:
            lookup = PromptLookup(seq.token_ids, self._rates, seq.request.prediction_ids)
            drafter = EngineDrafts(lookup, self._engine.rates) if self._engine else lookup
            seq.drafter = drafter
            self._looks.begin(seq)
        elif seq.num_looks > 0 or len(drafter) == seq.known_len - 1:
            for token_id in seq.token_ids[len(drafter) :]:
                drafter.add(token_id)
        elif len(drafter) < seq.known_len:
            drafter.extend(seq.token_ids[len(drafter) :])
        return drafter

    def _most_of(self, seq: Sequence) -> int:
        """Draft tokens that a row of the sequence may have: a token is sampled behind each of them."""
        asked = seq.params.max_drafts
        most = self.most if asked is None else min(asked, self.most)
        return max(min(most, seq.limit_len - seq.known_len - 1), 0)

    def _costly(self, looks: Seq[_Look | None], chances: Seq[Seq[float]]) -> list[bool]:
        """Of each sequence, whether the engine has to find the draft tokens of these chances."""
        if not self._engine:
            return [False] * len(looks)
        found = zip(looks, chances, strict=True)
        return [look is not None and bool(one) and not look.drafter.copies(look.most) for look, one in found]

    def _counts(self, chances: list[list[float]], costly: Seq[bool]) -> tuple[list[int], float]:
        """How many draft tokens each sequence gets, and the logarithm of how many times as fast all of them together
        become by these, 0 without any. chances, costly: see `Drafter.chances` and `_costly`, of each."""
        counts, rows, costs = [0] * len(chances), len(chances), self._costs
        best, chosen = rows * math.log(MARGIN), 0
        most = math.fsum(math.log1p(sum(one)) for one in chances if one)  # what all of them would gain
        if not most or not costs.knows(rows):
            return counts, 0.0
        losses = costs.losses(rows)
        if len(losses) < 2 or most - losses[1] <= best:
            return counts, 0.0
        drafts = list[tuple[float, int, int]]()  # what a token gains, negative; its depth, and whose it is
        for index, one in enumerate(chances):
            tokens = 1.0
            for depth, chance in enumerate(one):
                drafts.append((-math.log1p(chance / tokens), depth, index))
                tokens += chance
        drafts.sort()
        gain, deepest, alone = 0.0, 0, costs.seconds(rows)
        per_token = self._engine.token_seconds / alone if self._engine else 0.0
        always = self._engine.step_seconds / alone if self._engine else 0.0
        for num, (less, depth, index) in enumerate(drafts[: min(self._chunk_size - rows, len(losses) - 1)], 1):
            gain, loss = gain - less, losses[num]
            if most - loss <= best:
                break  # nor do more of them gain what they lose
            if costly[index]:
                deepest = max(deepest, depth + 1)
            if deepest:
                loss = rows * math.log(math.exp(loss / rows) + deepest * per_token + always)
            if gain - loss > best:
                best, chosen = gain - loss, num
        for _, depth, index in drafts[:chosen]:
            counts[index] = max(counts[index], depth + 1)
        return counts, best if chosen else 0.0
