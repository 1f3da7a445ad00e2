"""Decides how many draft tokens the rows of a step get: as many as make answers faster, by what steps take.

    tokens of a sequence = 1 + sum of the chances that a draft token and those before it are accepted
    chosen               the draft tokens with which the product of all sequences' tokens / seconds is greatest

The product, not the sum: a step that is longer for the sake of some is longer for all, and what one answer gains by
drafts must be more, as a ratio, than what the others lose.

With experts in RAM a second row reads most of its experts anew, so that a step of two rows may take 1.75 times as long:
then only drafts that are nearly sure pay. Where steps read the same weights whatever they carry, most do. Both are
found out, by timing each number of rows (row_costs.py) and by comparing drafts with what came (acceptance.py).

Where the engine finds the drafts (engine_drafts.py), each further one of a step's longest draft takes it a step of its
own, whose time is measured, too. Nothing is learnt of drafts that are not run, so that a few always are.

Looking for drafts takes time, too, which counts where steps take less than a millisecond. Where hardly any is accepted
it pauses for as long as that makes it cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ktransformers.scheduler.batch import PlannedStep
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.engine_drafts import MAX_STREAK, EngineDrafts
from ktransformers.scheduler.drafting.prompt_lookup import MAX_MATCH, PromptLookup
from ktransformers.scheduler.drafting.row_costs import DraftCost, RowCosts
from ktransformers.scheduler.records import UNKNOWN
from ktransformers.scheduler.sequence import Drafter, Sequence

__all__ = ["MARGIN", "DraftPlanner"]

MARGIN = 1.05
"""How many times as fast answers must become, in the mean: what is known of times and acceptance is not exact."""

_PROBE = 128
"""Steps of decodes after which the engine drafts once more, though it did not pay: texts change."""

_WINDOW = 32
"""Steps after which it is decided whether to pause."""

_FEW = 0.05
"""The share of tokens that were accepted below which there may be a pause."""

_LOOKUP_SECONDS, _MOST_TIME = 15e-6, 0.005
"""What drafting takes a sequence and step, and the share of a step's time that it may take for nothing."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """The depth'th draft token of the index'th sequence, and the logarithm of what that has more tokens by it."""

    index: int
    depth: int
    gain: float


def _drafts_of(index: int, chances: Seq[float]) -> Iterator[_Draft]:
    """The draft tokens of a sequence, each of less gain than the one before."""
    tokens = 1.0
    for depth, chance in enumerate(chances):
        yield _Draft(index, depth, math.log1p(chance / tokens))
        tokens += chance


class DraftPlanner:
    """Drafts for the decodes of steps within the limits of `config`; none where its max_drafts is 0."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.most, self._chunk_size, self._has_stages = config.max_drafts, config.chunk_size, config.num_stages > 1
        max_rows = min(config.max_running * (1 + self.most), config.chunk_size)
        self._rates, self._costs = AcceptanceRates(MAX_MATCH), RowCosts(max_rows)
        self._by_engine = config.drafts_in_engine
        self._engine_rates, self._draft_cost = AcceptanceRates(MAX_STREAK, max(self.most - 1, 1)), DraftCost()
        self._num_undrafted = 0  # steps since the engine last drafted
        self._has_drafted = False  # in the last step
        self._num_steps = self._num_tokens = self._num_accepted = 0  # of the window
        self._pause = 0  # steps that are left of it

    def add_token(self, seq: Sequence, *, is_accepted: bool) -> None:
        """Note that an answer has a token more. Its draft is compared with it, whether a step ran that or not."""
        if seq.params.max_drafts != 0:
            self._num_tokens += 1
            self._num_accepted += is_accepted
        if seq.drafter is not None and not self._pause and len(seq.drafter) == seq.known_len - 1:
            seq.drafter.add(seq.token_ids[-1])

    def add_row(self, seq: Sequence, num_drafted: int, num_accepted: int, *, is_cut: bool) -> None:
        """Note what became of a row's draft tokens. is_cut: the answer ended, so that some were not looked at."""
        if isinstance(seq.drafter, EngineDrafts):
            seq.drafter.took(num_drafted, num_accepted, is_cut=is_cut)

    def add_step(self, step: PlannedStep, seconds: float, draft_seconds: float = 0.0) -> None:
        """Note what a step took, with all that lies between steps, and what of that the engine took to find draft
        tokens. The step's tokens come later."""
        has_drafted, self._has_drafted = self._has_drafted, False
        if not self.most or not all(row.is_decode for row in step.rows):
            return
        deepest = max((len(row.drafts) for row in step.rows), default=0)
        self._costs.add(step.num_rows, seconds - draft_seconds, is_ahead=step.is_ahead, is_drafted=deepest > 0)
        found = max((len(row.drafts) for row in step.rows if row.drafts and row.drafts[-1] == UNKNOWN), default=0)
        if found and draft_seconds > 0:  # copies of the text cost the engine nothing
            self._draft_cost.add(found, draft_seconds, is_behind=not has_drafted)
            self._has_drafted = True
        if self._by_engine:
            self._num_undrafted = 0 if found else self._num_undrafted + 1
            return
        if self._pause:
            self._pause -= 1
            return
        self._num_steps += 1
        if self._num_steps == _WINDOW:
            if self._num_accepted < _FEW * self._num_tokens and seconds > 0:
                share = len(step.rows) * _LOOKUP_SECONDS / seconds
                self._pause = round(_WINDOW * max(share / _MOST_TIME - 1.0, 0.0))
            self._num_steps = self._num_tokens = self._num_accepted = 0

    def drafts(self, decodes: Seq[Sequence], prefills: Seq[Sequence]) -> list[list[int]]:
        """Return the draft tokens that the next step is to run for each of these sequences.

        None beside prompts, which use the time better, nor where the last token of a sequence is not known yet.
        """
        if not self.most or self._pause or prefills or not self._may_pay(decodes):
            return [[] for _ in decodes]
        counts, _ = self._counts([self._chances(seq, self._most_of(seq)) for seq in decodes], self._costly(decodes))
        if self._is_due and not any(counts):
            self._engine_rates.doubt()
            self._num_undrafted = 0  # tried, whether there is room for it or not
            counts = [int(self._most_of(seq) > 0) for seq in decodes]
        return [self._drafter(seq).draft(count) if count else [] for seq, count in zip(decodes, counts, strict=True)]

    def _may_pay(self, decodes: Seq[Sequence]) -> bool:
        """Whether all last tokens are known, and any draft token is likely enough. Most steps end here."""
        if not self._costs.knows(len(decodes)):
            return False  # what a step without drafts takes has to be known first
        likeliest = 0.0
        for seq in decodes:
            if seq.run is None or seq.run.num_pending or not seq.completion_len:
                return False
            likeliest = max(likeliest, *self._chances(seq, min(self._most_of(seq), 1)), 0.0)
        return likeliest > self._costs.least_chance(len(decodes), MARGIN) or self._is_due

    @property
    def _is_due(self) -> bool:
        return self._num_undrafted >= _PROBE

    def awaits_tokens(self, running: Seq[Sequence], decodes: Seq[Sequence], prefills: Seq[Sequence]) -> bool:
        """Whether the step in flight is to be committed before the next one is planned: it runs draft tokens, or the
        next one would if the first of them are right, and gain by that more than is lost by waiting in vain.

        Nobody goes on alone meanwhile: a step with half of the sequences would cost those the others lack as much.
        """
        if not self.most or self._has_stages:
            return False
        if any(seq.run is not None and seq.run.num_drafted for seq in running):
            return True
        if prefills or self._pause:
            return False
        chances, firsts, costs = list[list[float]](), list[float](), self._costs
        for seq in decodes:
            most = self._most_of(seq)
            first, later = self._drafter(seq).later(most) if most else (1.0, [])
            chances.append(later)
            firsts.append(first)
        counts, gain = self._counts(chances, self._costly(decodes))
        if not any(counts):
            return self._is_due and any(self._most_of(seq) for seq in decodes)
        first = min(chance for chance, count in zip(firsts, counts, strict=True) if count)
        # One wait is lost for sure. Drafts that are right `first` of the time go on for 1 / (1 - first) steps.
        lost = len(decodes) * math.log1p(costs.wait / costs.seconds(len(decodes)))
        return first * gain > (1.0 - first) * lost

    def _drafter(self, seq: Sequence) -> Drafter:
        drafter = seq.drafter
        if drafter is None:
            lookup = PromptLookup(seq.token_ids, self._rates, seq.request.prediction_ids)
            drafter = EngineDrafts(lookup, self._engine_rates) if self._by_engine else lookup
            seq.drafter = drafter
        elif len(drafter) < seq.known_len:  # behind a pause
            drafter.extend(seq.token_ids[len(drafter) :])
        return drafter

    def _most_of(self, seq: Sequence) -> int:
        """Draft tokens that a row of the sequence may have: a token is sampled behind each of them."""
        asked = seq.params.max_drafts
        most = self.most if asked is None else min(asked, self.most)
        return max(min(most, seq.limit_len - seq.known_len - 1), 0)

    def _chances(self, seq: Sequence, count: int) -> list[float]:
        """Of its first 1, 2, ... count draft tokens, to be all accepted."""
        return self._drafter(seq).chances(count) if count > 0 else []

    def _costly(self, seqs: Seq[Sequence]) -> list[bool]:
        """Of each sequence, whether the engine has to find its draft tokens."""
        drafters = ((seq.drafter, self._most_of(seq)) for seq in seqs)
        return [isinstance(drafter, EngineDrafts) and not drafter.copies(most) for drafter, most in drafters]

    def _counts(self, chances: list[list[float]], costly: Seq[bool]) -> tuple[list[int], float]:
        """How many draft tokens each sequence gets, and the logarithm of how many times as fast all of them together
        become by these, 0 without any. chances, costly: see `_chances` and `_costly`, of each."""
        counts, rows, costs = [0] * len(chances), len(chances), self._costs
        if not any(chances) or not costs.knows(rows):
            return counts, 0.0
        drafts = [draft for i, one in enumerate(chances) for draft in _drafts_of(i, one)]
        drafts.sort(key=lambda draft: (-draft.gain, draft.depth))
        gain, best, chosen, alone = 0.0, rows * math.log(MARGIN), 0, costs.seconds(rows)
        deepest, per_step = 0, self._draft_cost.seconds
        for num, draft in enumerate(drafts[: min(self._chunk_size, costs.most_rows) - rows], 1):
            gain += draft.gain
            if costly[draft.index]:
                deepest = max(deepest, draft.depth + 1)
            left = gain - rows * math.log((costs.seconds(rows, num) + deepest * per_step) / alone)
            if left > best:
                best, chosen = left, num
        for draft in drafts[:chosen]:
            counts[draft.index] = max(counts[draft.index], draft.depth + 1)
        return counts, best if chosen else 0.0
