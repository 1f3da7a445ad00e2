"""What a step has to do with a drafter of the engine: before it runs, its draft tokens are filled in; behind it, the
drafter is shown what was computed. Knows no model.

    plan: known token, UNKNOWN, UNKNOWN ──> draft() ──> the step's inputs ── forward, sampling ──> observe()

A drafter's cache has the same pages as the target's. What it lacks there (prefixes that came from a tier or a session's
file, say) makes its tokens worse, and no answer wrong: each is compared with what is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ktransformers.engine.media.rows import RunPictures
from ktransformers.engine.sampling.sampler import RequestSampler
from ktransformers.engine.step.executor_runs import StepTensors
from ktransformers.errors import EngineError
from ktransformers.scheduler.records import UNKNOWN, RowResult, ScheduledSequence

__all__ = ["ComputedRow", "DraftRequest", "EngineDrafter", "computed_rows", "with_drafts"]

_Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that wants draft tokens behind its last known token, `token_id` at `position`.

    pages: its block table, which covers the draft tokens, too. sampler: how its next token is chosen.
    """

    run_id: int
    position: int
    token_id: int
    num_drafts: int
    pages: _Pages
    sampler: RequestSampler


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """Tokens of a sequence that a step has computed, draft tokens among them as far as they were accepted.

    They have the positions from `start` on, and are the step's rows from `first` on. next_id: the token behind them.
    pictures: of the sequence, whose positions have a token in the place of theirs; None: it has none.
    """

    run_id: int
    start: int
    token_ids: Sequence[int]
    next_id: int
    first: int
    pages: _Pages
    pictures: RunPictures | None = None


class EngineDrafter(Protocol):
    """Finds draft tokens by a model, for sequences in pages. One caller at a time."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return num_drafts token ids for each request."""
        ...

    def observe(self, rows: Sequence[ComputedRow]) -> None:
        """Take in what the step that ran last has computed."""
        ...

    def end(self, runs: Sequence[tuple[int, _Pages]]) -> None:
        """Forget runs that are over, with the pages that they had: these may have new owners from this step on."""
        ...

    def reset(self) -> None:
        """Forget all runs."""
        ...


def with_drafts(
    drafter: EngineDrafter | None, rows: Sequence[ScheduledSequence], inputs: StepTensors
) -> tuple[Sequence[ScheduledSequence], float]:
    """Return the rows with their draft tokens, which go into its token ids, too, and the seconds that took.

    Raises EngineError for a plan that leaves them to an engine without a drafter.
    """
    wanted = [i for i, row in enumerate(rows) if row.num_drafts and row.token_ids[-1] == UNKNOWN]
    if not wanted:
        return rows, 0.0
    if drafter is None:
        raise EngineError("a step was planned with draft tokens of the engine, which has no drafter")
    began, ids = time.perf_counter(), inputs.batch.token_ids.numpy()
    firsts = np.cumsum([0, *(row.num_tokens for row in rows)]).tolist()
    requests, asked = list[DraftRequest](), list[int]()
    filled = list(rows)
    for i in wanted:
        row, run = rows[i], inputs.runs[i]
        filled[i] = _filled(row, [0] * row.num_drafts)
        if run.sampler is not None:  # else the row gets an error, whatever is drafted
            at = row.num_tokens - row.num_drafts - 1
            known = row.start + at, int(ids[firsts[i] + at])
            requests.append(DraftRequest(row.run_id, *known, row.num_drafts, run.block_table, run.sampler))
            asked.append(i)
    for i, drafts in zip(asked, drafter.draft(requests), strict=True):
        filled[i] = _filled(rows[i], drafts)
    for i in wanted:
        end = firsts[i] + rows[i].num_tokens
        ids[end - rows[i].num_drafts : end] = filled[i].token_ids[-rows[i].num_drafts :]
    return filled, time.perf_counter() - began


def _filled(row: ScheduledSequence, drafts: Sequence[int]) -> ScheduledSequence:
    return msgspec.structs.replace(row, token_ids=[*row.token_ids[: -row.num_drafts], *drafts])


def computed_rows(
    rows: Sequence[ScheduledSequence], inputs: StepTensors, results: Sequence[RowResult]
) -> list[ComputedRow]:
    """Return what a step computed of sequences that may have draft tokens. results: of its sampled rows."""
    found, remaining, first = list[ComputedRow](), iter(results), 0
    ids = inputs.batch.token_ids.tolist()
    for run, row in zip(inputs.runs, rows, strict=True):
        result = next(remaining) if row.is_sampled else None
        begin, first = first, first + row.num_tokens
        params = run.start.params
        if params.max_drafts == 0 or params.pooling is not None or run.sampler is None:
            continue
        num_known, next_id = row.num_tokens - row.num_drafts, None
        if result is not None:
            num_known += len(result.more)
            *_, last = result.tokens
            next_id = last.token_id
        elif row.start + row.num_tokens < len(run.start.token_ids):
            next_id = run.start.token_ids[row.start + row.num_tokens]
        if next_id is not None:
            tokens = ids[begin : begin + num_known]
            found.append(ComputedRow(row.run_id, row.start, tokens, next_id, begin, run.block_table, run.pictures))
    return found
