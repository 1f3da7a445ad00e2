"""Decides how many draft tokens the rows of a step get: as many as make tokens cheaper, by what steps take.

    tokens of a step = rows + sum of the chances that a draft token and those before it are accepted
    chosen           the draft tokens, the likeliest first, with which tokens / seconds(rows + drafts) is greatest

With experts in RAM a second row reads most of its experts anew, so that a step of two rows may take 1.75 times as long:
then only drafts that are nearly sure pay. Where steps read the same weights whatever they carry, most do. Both are
found out, by timing each number of rows (row_costs.py) and by comparing drafts with what came (acceptance.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ktransformers.scheduler.batch import PlannedStep
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.prompt_lookup import MAX_MATCH, PromptLookup
from ktransformers.scheduler.drafting.row_costs import RowCosts
from ktransformers.scheduler.sequence import Drafter, Sequence

__all__ = ["MARGIN", "DraftPlanner"]

MARGIN = 1.03
"""What draft tokens must gain, by what is known of times and acceptance, which is not exact."""

_LIKELY = 0.5
"""The chance of a draft token from which on it is worth waiting to see whether it is right."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """The depth'th draft token of the index'th sequence, and the chance that it is accepted."""

    index: int
    depth: int
    chance: float


class DraftPlanner:
    """Drafts for the decodes of steps within the limits of `config`; none where its max_drafts is 0."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.most, self._chunk_size, self._has_stages = config.max_drafts, config.chunk_size, config.num_stages > 1
        max_rows = min(config.max_running * (1 + self.most), config.chunk_size)
        self._rates, self._costs = AcceptanceRates(MAX_MATCH), RowCosts(max_rows)

    def add_token(self, seq: Sequence, token_id: int) -> None:
        """Take the next token of an answer: its draft is compared with it, whether a step ran that or not."""
        if seq.drafter is not None:
            seq.drafter.add(token_id)

    def add_step(self, step: PlannedStep, seconds: float) -> None:
        """Note what a step took, with all that lies between steps."""
        if self.most and step.num_decodes == step.num_rows:
            self._costs.add(step.num_rows, seconds)

    def drafts(self, decodes: Seq[Sequence], prefills: Seq[Sequence]) -> list[list[int]]:
        """Return the draft tokens that the next step is to run for each of these sequences.

        None beside prompts, which use the time better, nor where the last token of a sequence is not known yet.
        """
        known = [seq for seq in decodes if seq.run is not None and not seq.run.num_pending and seq.completion_len]
        if not self.most or prefills or len(known) < len(decodes):
            return [[] for _ in decodes]
        counts = self._counts([self._chances(seq, self._most_of(seq)) for seq in decodes])
        return [self._drafter(seq).draft(count) if count else [] for seq, count in zip(decodes, counts, strict=True)]

    def awaits_tokens(self, running: Seq[Sequence], decodes: Seq[Sequence], prefills: Seq[Sequence]) -> bool:
        """Whether the step in flight is to be committed before the next one is planned: it runs draft tokens, or the
        next one would if the first of them are right.

        Nobody goes on alone meanwhile: a step with half of the sequences would cost those the others lack as much.
        """
        if not self.most or self._has_stages:
            return False
        if any(seq.run is not None and seq.run.num_drafted for seq in running):
            return True
        if prefills:
            return False
        chances = []
        for seq in decodes:
            later = self._chances(seq, self._most_of(seq) + 1)
            is_likely = bool(later) and later[0] > _LIKELY
            chances.append([chance / later[0] for chance in later[1:]] if is_likely else [])
        return any(self._counts(chances))

    def _drafter(self, seq: Sequence) -> Drafter:
        if seq.drafter is None:
            seq.drafter = PromptLookup(seq.token_ids, self._rates, seq.request.prediction_ids)
        return seq.drafter

    def _most_of(self, seq: Sequence) -> int:
        """Draft tokens that a row of the sequence may have: a token is sampled behind each of them."""
        asked = seq.params.max_drafts
        most = self.most if asked is None else min(asked, self.most)
        return max(min(most, seq.limit_len - seq.known_len - 1), 0)

    def _chances(self, seq: Sequence, count: int) -> list[float]:
        """Of its first 1, 2, ... count draft tokens, to be all accepted."""
        return self._drafter(seq).chances(count) if count > 0 else []

    def _counts(self, chances: list[list[float]]) -> list[int]:
        """How many draft tokens each sequence gets. chances: see `_chances`, of each."""
        counts, rows, costs = [0] * len(chances), len(chances), self._costs
        if not any(chances) or not costs.knows(rows):
            return counts  # what a step without drafts takes has to be known first
        drafts = [_Draft(i, depth, chance) for i, one in enumerate(chances) for depth, chance in enumerate(one)]
        drafts.sort(key=lambda draft: (-draft.chance, draft.depth))
        tokens, best, chosen = float(rows), MARGIN * rows / costs.seconds(rows), 0
        for num, draft in enumerate(drafts[: min(self._chunk_size, costs.most_rows) - rows], 1):
            tokens += draft.chance
            rate = tokens / costs.seconds(rows + num)
            if rate > best:
                best, chosen = rate, num
        for draft in drafts[:chosen]:
            counts[draft.index] = max(counts[draft.index], draft.depth + 1)
        return counts
