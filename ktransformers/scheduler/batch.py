"""A step while it is put together, and the same step in flight. Knows budgets and rows, not why they were chosen."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ktransformers.scheduler.records import NewSequence, ScheduledSequence, StepPlan
from ktransformers.scheduler.sequence import RunningState, Sequence
from ktransformers.scheduler.tier_records import TierPlan

__all__ = ["Batch", "PlannedRow", "PlannedStep", "runnable"]


@dataclass(eq=False, slots=True)
class PlannedRow:
    """Positions start .. end - 1 of one run in one step, draft tokens last. Stale: seq.run is not this run by now."""

    seq: Sequence
    run: RunningState
    start: int
    end: int
    is_sampled: bool
    read_slot: int = -1
    saves: tuple[tuple[int, int], ...] = ()  # (length, slot) of states to keep
    drafts: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it runs one known token: what is left of a prompt may be one, too, and takes as long."""
        return self.end - self.start - len(self.drafts) == 1

    @property
    def is_stale(self) -> bool:
        return self.seq.run is not self.run


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned step that is in flight. num_drafted: draft tokens in it. is_ahead: it was planned while another one
    was in flight. look_seconds: what looking for draft tokens took before it; 0: nobody did."""

    step_id: int
    rows: tuple[PlannedRow, ...]
    num_sampled: int
    num_drafted: int = 0
    is_ahead: bool = False
    look_seconds: float = 0.0

    @property
    def seqs(self) -> dict[int, Sequence]:
        """The sequences of rows that count, by the ids of their runs."""
        return {row.run.run_id: row.seq for row in self.rows if not row.is_stale}

    @property
    def num_rows(self) -> int:
        """Number of tokens of all sequences in the step."""
        return sum(row.end - row.start for row in self.rows)

    @property
    def num_decodes(self) -> int:
        """Number of tokens of sequences with one known token: those, and the draft tokens behind them."""
        return sum(row.end - row.start for row in self.rows if row.is_decode)

    @property
    def num_prefilled(self) -> int:
        """Number of the step's tokens, if most of them are of prompts, else 0: what its time says of prefill."""
        total = self.num_rows
        return total if 2 * (total - self.num_decodes) > total else 0


class Batch:
    """A step while it is put together: at most chunk_size tokens; at most one row per sequence."""

    def __init__(self, chunk_size: int):
        self.budget = chunk_size  # tokens left
        self.num_sampled = 0  # rows that sample
        self.num_drafted = 0  # draft tokens
        self._rows: dict[Sequence, PlannedRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[PlannedRow]:
        return iter(self._rows.values())

    def add(
        self,
        seq: Sequence,
        run: RunningState,
        num_tokens: int,
        saves: tuple[tuple[int, int], ...] = (),
        drafts: Seq[int] = (),
    ) -> None:
        """Run the next num_tokens tokens of a sequence, and move its plan forward by them.

        saves: (length, slot) of the states that are to be kept. drafts: draft tokens behind those tokens, which are the
        last known ones then.
        """
        end = run.planned_len + num_tokens + len(drafts)
        is_sampled = end == seq.known_len + run.num_pending + len(drafts)
        row = PlannedRow(seq, run, run.planned_len, end, is_sampled, run.read_slot, saves, tuple(drafts))
        self._rows[seq] = row
        run.read_slot = run.state_slot
        self.budget -= end - row.start
        run.planned_len = end
        run.num_pending += is_sampled + len(drafts)
        run.num_drafted += len(drafts)
        self.num_sampled += is_sampled
        self.num_drafted += len(drafts)

    def limit(self, num_tokens: int) -> None:
        """Take at most so many more tokens."""
        self.budget = min(self.budget, num_tokens)

    def discard(self, seq: Sequence) -> None:
        """Take a sequence's row out again, if it has one. Its run must end: the plan is not moved back."""
        row = self._rows.pop(seq, None)
        if row is not None:
            self.budget += row.end - row.start
            self.num_sampled -= row.is_sampled
            self.num_drafted -= len(row.drafts)

    def plan(
        self,
        step_id: int,
        ended: list[int],
        tiers: TierPlan | None = None,
        *,
        is_observed: bool = True,
        is_long: bool = False,
    ) -> StepPlan:
        """Make the record of the step for the engine. Call once: it notes where each run's token will be found in the
        results."""
        starts, rows, num_sampled = [], [], 0
        for planned in self:
            seq, run, start = planned.seq, planned.run, planned.start
            if not run.is_started:
                run.is_started = True
                starts.append(_start_record(seq, run))
            token_ids = seq.token_ids[start : planned.end]
            token_ids += planned.drafts
            rows.append(
                ScheduledSequence(
                    run_id=run.run_id,
                    start=start,
                    token_ids=token_ids,
                    token_source=None if token_ids else run.sampled_index,
                    block_table=run.block_table[run.num_told :],
                    is_sampled=planned.is_sampled,
                    first_page=run.num_told,
                    read_slot=planned.read_slot,
                    write_slot=run.state_slot,
                    saves=_saves(planned),
                    num_drafts=len(planned.drafts),
                )
            )
            run.num_told = len(run.block_table)
            if planned.is_sampled:
                run.sampled_index = num_sampled
                num_sampled += 1
        return StepPlan(
            step_id=step_id,
            starts=starts,
            rows=rows,
            ended=ended,
            tiers=tiers,
            is_observed=is_observed,
            is_long=is_long,
        )


def runnable(running: Seq[Sequence], num_stages: int) -> tuple[list[Sequence], list[Sequence]]:
    """Return running sequences with tokens left to run, by rank: (one token, several tokens). With several stages those
    whose next token is known, and of those with one token this step's share."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    num_away = 0
    for seq in running:
        run = seq.run
        assert run is not None
        if run.num_drafted or (run.num_pending and num_stages > 1):
            num_away += 1
            continue
        total_len = len(seq.token_ids) + run.num_pending
        if total_len < seq.limit_len:  # else the step in flight samples its last token
            (decodes if total_len - run.planned_len == 1 else prefills).append(seq)
    share = -(-(num_away + len(decodes)) // num_stages)
    return decodes[:share], prefills


def _saves(row: PlannedRow) -> list[tuple[int, int]]:
    """Which tokens of the row leave a state, and in which slot. A row with draft tokens has no snapshots."""
    saves = [(length - row.start - 1, slot) for length, slot in row.saves]
    return saves + list(enumerate(row.run.draft_slots[: len(row.drafts)]))


def _start_record(seq: Sequence, run: RunningState) -> NewSequence:
    return NewSequence(
        run_id=run.run_id,
        request_id=seq.request_id,
        params=seq.params,
        prompt_len=seq.prompt_len,
        token_ids=seq.token_ids.copy(),
        media=list(seq.request.media),
    )
