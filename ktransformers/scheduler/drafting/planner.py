"""Drafts for the steps of a scheduler: looks for draft tokens where that pays, and learns from steps what does.

    plain step      nobody looked for draft tokens: what all others are compared with
    looked at       what each sequence's draft tokens are likely to gain (acceptance.py), beside what steps of more rows
                    take (row_costs.py), says how many each gets (choice.py)
    afterwards      what was gained and lost, in plain steps, is put to account (account.py): of drafts from the text,
                    and of those that the engine finds. An overdrawn one rests

With experts in RAM a second row reads most of its experts anew, so that a step of two rows may take 1.75 times as long:
then only drafts that are nearly sure pay. Where steps read the same weights whatever they carry, most do. Both are
found out, by timing each number of rows and by comparing drafts with what came.

Looking takes time, too, which counts where steps take less than a few milliseconds: it is timed. Where all accounts
rest, a step costs nothing but counting it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from ktransformers.scheduler.batch import PlannedRow, PlannedStep
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.account import Account
from ktransformers.scheduler.drafting.choice import choose
from ktransformers.scheduler.drafting.engine_drafts import EngineDrafts
from ktransformers.scheduler.drafting.prompt_lookup import MAX_MATCH, PromptLookup
from ktransformers.scheduler.drafting.row_costs import RowCosts
from ktransformers.scheduler.records import UNKNOWN
from ktransformers.scheduler.sequence import Drafter, Sequence

__all__ = ["DraftPlanner"]

_TIMED = 4
"""Steps at the end of a rest that are timed, to be compared with those behind it."""


class DraftPlanner:
    """Drafts for the decodes of steps within the limits of `config`; none where its max_drafts is 0. clock: seconds, by
    which its own looking is timed."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most, self._chunk_size, self._has_stages = config.max_drafts, config.chunk_size, config.num_stages > 1
        self._rates = AcceptanceRates(MAX_MATCH)
        self._costs = RowCosts(min(config.max_running * (1 + self.most), config.chunk_size))
        self._text, self._engine = Account(), EngineDrafts(config) if config.drafts_in_engine else None
        self._clock, self._look_seconds = clock, 0.0
        self._num_steps, self._rests_until = 0, 0 if self.most else sys.maxsize
        self._num_seqs = 1  # of the step that was added last

    # What came of steps.

    def add_step(
        self, step: PlannedStep, seconds: float, draft_seconds: float = 0.0, observe_seconds: float = 0.0
    ) -> None:
        """Note what a step took, with all that lies between steps, and what of that the engine took to find draft
        tokens, and to show its drafter what was computed. The step's tokens come later."""
        self._num_steps += 1
        if self._num_steps <= self._rests_until or not step.rows:
            return
        if not all(row.is_decode for row in step.rows):
            self._costs.skip(1)
            if self._engine:
                self._engine.add_prompt(observe_seconds)
            return
        self._num_seqs = len(step.rows)
        paid, seconds = 0.0, seconds - step.look_seconds
        if self._engine:
            others, paid = self._engine.add_decode(step, draft_seconds, observe_seconds)
            seconds -= others
        if step.num_drafted or not step.look_seconds:
            num_rows, is_drafted = self._num_seqs + step.num_drafted, step.num_drafted > 0
            self._costs.add(num_rows, seconds, is_ahead=step.is_ahead, is_drafted=is_drafted)
        else:
            self._costs.skip(1)
        if self._costs.knows(self._num_seqs) and (step.look_seconds or paid):
            self._pay(step, paid)

    def _pay(self, step: PlannedStep, engine_seconds: float) -> None:
        """Put to account what a step lost by looking, drafting, and the rows of its draft tokens."""
        plain, num_drafted = self._costs.seconds(self._num_seqs), step.num_drafted
        more = min(num_drafted, self._costs.most_rows - self._num_seqs)
        lost = self._costs.seconds(self._num_seqs, more) / plain - 1.0
        if self._engine:
            found = sum(len(row.drafts) for row in step.rows if row.drafts and row.drafts[-1] == UNKNOWN)
            by_engine = lost * found / num_drafted if num_drafted else 0.0
            self._engine.account.spend(by_engine + engine_seconds / plain)
            lost -= by_engine
        self._text.spend(lost + step.look_seconds / plain)

    def add_row(self, row: PlannedRow, num_accepted: int, *, is_cut: bool) -> None:
        """Note what became of a row's draft tokens, of the step that was added last. is_cut: the answer ended, so that
        some were not looked at."""
        account = self._text
        if self._engine and row.drafts[-1] == UNKNOWN:
            self._engine.took(row.seq, len(row.drafts), num_accepted, is_cut=is_cut)
            account = self._engine.account
        account.earn(num_accepted / self._num_seqs)

    # What the next step runs.

    @property
    def is_observed(self) -> bool:
        """Whether the engine's drafter is shown the next step, see StepPlan."""
        return self._engine is None or self._engine.is_observed(self._num_steps)

    def take_look_seconds(self) -> float:
        """Return the seconds of looking for draft tokens since the last call: those of the step that is planned now."""
        seconds, self._look_seconds = self._look_seconds, 0.0
        return seconds

    def drafts(self, decodes: Seq[Sequence], prefills: Seq[Sequence]) -> Seq[Seq[int]]:
        """Return the draft tokens that the next step is to run for each of these sequences.

        None beside prompts, which use the time better, nor where the last token of a sequence is not known yet.
        """
        none: list[Seq[int]] = [()] * len(decodes)
        if self._num_steps < self._rests_until or prefills or not decodes:
            return none
        has_text, has_engine = self._awake()
        if not (has_text or has_engine) or not self._knows_plain(len(decodes)):
            return none
        for seq in decodes:
            if seq.run is None or seq.run.num_pending or not seq.completion_len:
                return none
        mosts = [self._most_of(seq) for seq in decodes]
        if not any(mosts):
            return none
        began = self._clock()
        drafts = self._looked(decodes, mosts, has_text=has_text, has_engine=has_engine)
        self._look_seconds += self._clock() - began
        return none if drafts is None else drafts

    def _looked(
        self, decodes: Seq[Sequence], mosts: Seq[int], *, has_text: bool, has_engine: bool
    ) -> list[Seq[int]] | None:
        """The draft tokens of each sequence, from its text or from the engine; None: none has any."""
        chances: list[tuple[float, ...]] = [()] * len(decodes)
        if has_text:
            chances = [self._drafter(seq).chances(most) for seq, most in zip(decodes, mosts, strict=True)]
        costly = [False] * len(decodes)
        if has_engine:
            chances, costly = self._likelier(decodes, mosts, chances)
        counts, _ = self._counts(chances, costly)
        if not any(counts):
            if not has_engine:
                return None
            room = min(self._costs.most_rows, self._chunk_size) - len(decodes)
            costly = [most > 0 for most in mosts]  # one token each: what does not pay is found out by the account
            counts = [int(one and sum(costly[:at]) < room) for at, one in enumerate(costly)]
        return [
            () if not count else [UNKNOWN] * count if is_costly or seq.drafter is None else seq.drafter.draft(count)
            for seq, count, is_costly in zip(decodes, counts, costly, strict=True)
        ]

    def _likelier(
        self, seqs: Seq[Sequence], mosts: Seq[int], texts: Seq[tuple[float, ...]]
    ) -> tuple[list[tuple[float, ...]], list[bool]]:
        """Of each sequence, the chances of the text's draft tokens or of the engine's, and whether it is the engine's:
        what followed the last tokens where they stood before may be likelier, and takes no time to find."""
        assert self._engine is not None
        found = [self._engine.chances(seq, most) for seq, most in zip(seqs, mosts, strict=True)]
        costly = [sum(one) > sum(text) for one, text in zip(found, texts, strict=True)]
        return [one if own else text for one, own, text in zip(found, costly, texts, strict=True)], costly

    def awaits_tokens(self, running: Seq[Sequence], decodes: Seq[Sequence], prefills: Seq[Sequence]) -> bool:
        """Whether the step in flight is to be committed before the next one is planned: it runs draft tokens, or the
        next one would if the first of them are right, and gain by that more than is lost by waiting in vain.

        Nobody goes on alone meanwhile: a step with half of the sequences would cost those the others lack as much.
        """
        if self._num_steps < self._rests_until or self._has_stages:
            return False
        if any(seq.run is not None and seq.run.num_drafted for seq in running):
            return True
        if prefills or not decodes:
            return False
        has_text, has_engine = self._awake()
        if not (has_text or has_engine) or not self._knows_plain(len(decodes)):
            return False
        mosts = [self._most_of(seq) for seq in decodes]
        if has_engine and any(mosts):
            return True
        began = self._clock()
        is_awaited = has_text and self._pays_to_wait(decodes, mosts)
        self._look_seconds += self._clock() - began
        return is_awaited

    def _pays_to_wait(self, decodes: Seq[Sequence], mosts: Seq[int]) -> bool:
        """Whether draft tokens from the text, behind tokens that are not known yet, are worth a wait."""
        found = [
            self._drafter(seq).later(most) if most else (1.0, ()) for seq, most in zip(decodes, mosts, strict=True)
        ]
        counts, gain = self._counts([later for _, later in found], [False] * len(decodes))
        if not any(counts):
            return False
        first = min(chance for (chance, _), count in zip(found, counts, strict=True) if count)
        # One wait is lost for sure. Drafts that are right `first` of the time go on for 1 / (1 - first) steps.
        lost = len(decodes) * math.log1p(self._costs.wait / self._costs.seconds(len(decodes)))
        return first * gain > (1.0 - first) * lost

    def _awake(self) -> tuple[bool, bool]:
        """Whether the text is looked at now, and whether the engine drafts. Where neither does, steps up to the end of
        the first rest are only counted."""
        now, engine = self._num_steps, self._engine
        has_text, has_engine = self._text.is_awake(now), engine is not None and engine.is_awake(now)
        if not (has_text or has_engine):
            wakes_at = self._text.wakes_at if engine is None else min(self._text.wakes_at, engine.observed_from)
            if wakes_at - _TIMED > now:
                self._rests_until = wakes_at - _TIMED
                self._costs.skip(self._rests_until - now)
        return has_text, has_engine

    def _knows_plain(self, num_rows: int) -> bool:
        """Whether it is known what a plain step takes now; else the next one is to be one."""
        return self._costs.knows(num_rows) and not self._costs.is_stale(num_rows)

    def _drafter(self, seq: Sequence) -> Drafter:
        """What drafts for the sequence from its text, of all tokens that are known."""
        drafter = seq.drafter
        if drafter is None:
            drafter = seq.drafter = PromptLookup(seq.token_ids, self._rates, seq.request.prediction_ids)
        elif len(drafter) < len(seq.token_ids):
            drafter.extend(seq.token_ids[len(drafter) :])
        return drafter

    def _most_of(self, seq: Sequence) -> int:
        """Draft tokens that a row of the sequence may have: a token is sampled behind each of them."""
        asked = seq.params.max_drafts
        most = self.most if asked is None else min(asked, self.most)
        return max(min(most, seq.limit_len - len(seq.token_ids) - 1), 0)

    def _counts(self, chances: Seq[tuple[float, ...]], costly: Seq[bool]) -> tuple[list[int], float]:
        """How many draft tokens each sequence gets, and the logarithm of how many times as fast all of them together
        become by these, see `choose`. chances, costly: of each, see `_likelier`."""
        if not any(chances):
            return [0] * len(chances), 0.0
        rows, share, in_block = len(chances), 0.0, False
        if self._engine and any(costly):
            share, in_block = self._engine.token_seconds / self._costs.seconds(rows), self._engine.in_block
        losses = self._costs.losses(rows)[: self._chunk_size - rows + 1]
        return choose(chances, costly, losses, share, in_block=in_block)
