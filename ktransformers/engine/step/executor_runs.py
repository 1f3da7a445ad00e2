"""The runs of an executor, which rows' logits a step of theirs needs, and what computes it, as a protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ktransformers.core import TokenLogprobs
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.media.features import PictureEncoder
from ktransformers.engine.media.rows import PICTURE_FAILURES, RunPictures, pictures_in, why_failed
from ktransformers.engine.sampling.logits_request import BEST_TOKEN, StepLogits
from ktransformers.engine.sampling.sampler import RequestSampler, token_logprobs
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.hidden import HiddenStatesHook, Pooled
from ktransformers.errors import EngineError, KTransformersError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext
from ktransformers.scheduler.records import NewSequence, RowResult, ScheduledSequence, StepPlan, StepResult

__all__ = [
    "FIRST_ROW",
    "ONE_KEPT",
    "ExecutorRun",
    "KeptRows",
    "StepRunner",
    "StepTensors",
    "begun_run",
    "is_drafted",
    "kept_of",
    "last_token",
    "needs_of",
    "prompt_scores",
    "rows_of",
    "tower_spent",
    "unread_result",
    "with_pictures",
]


class HeldSteps(Protocol):
    """Launches steps of a GPU before their tokens are known, see ModelRunner."""

    def launch_held(self, batch: ForwardBatch) -> bool: ...

    def release(self, token_ids: torch.Tensor, *, is_wanted: bool = True) -> Exception | None: ...

    def drop_released(self) -> None: ...


class StepRunner(Protocol):
    """Computes flattened steps, see engine.step.runner.ModelRunner."""

    @property
    def hook(self) -> HiddenStatesHook: ...

    def reduced_step(self, batch: ForwardBatch, needs: Sequence[int] | None) -> StepLogits:
        """Run a step: logits of the rows in `keep`, or what is needed of each; None: all."""
        ...

    @property
    def begins_ahead(self) -> bool: ...

    @property
    def runs_apart(self) -> bool:
        """Whether a step is computed while `meanwhile` is called, which is set for it: by GPUs."""
        ...

    @property
    def held_steps(self) -> HeldSteps | None:
        """The runner's way to launch steps before their tokens are known; None where there is none."""
        ...

    meanwhile: Callable[[], None] | None
    """To be called once in the step for which it is set; by runners that do not run apart before they compute."""

    def begin(self, batch: ForwardBatch) -> None:
        """Have the stages before this one compute a step that comes to `reduced_step` later, in this order."""
        ...


@dataclass(slots=True)
class ExecutorRun:
    """The state of a run. error: why no token of it can be sampled, found when it started. block_table: pages that the
    plans have named so far, in `_pages`, which has room for more.

    pooled: the embedding of its prompt, on the way. pictures: of its prompt, None without any; `start` has a token in
    the place of their ids. failure: why they cannot be had; the run is over then.
    """

    start: NewSequence
    sampler: RequestSampler | None
    error: str | None = None
    pooled: Pooled | None = None
    pictures: RunPictures | None = None
    failure: str | None = None
    block_table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    _pages: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    def pages(self, row: ScheduledSequence) -> npt.NDArray[np.int32]:
        """Return the block table with what `row` says of it: [P], valid until the run's next row. The same array until
        a row says something."""
        num_pages = row.first_page + len(row.block_table)
        if row.block_table or num_pages != len(self.block_table):
            self._extend(row, num_pages)
        return self.block_table

    @property
    def shift(self) -> int:
        """The difference between rotary positions and indices behind the prompt, which pictures make."""
        return 0 if self.pictures is None else self.pictures.shift

    def is_plain(self, row: ScheduledSequence, pool: int) -> bool:
        """Whether nothing about pictures is to be done for a row but `shift`. pool: see RunPictures.is_plain."""
        return self.pictures is None or row.start >= self.pictures.prompt_len + pool - 1

    def _extend(self, row: ScheduledSequence, num_pages: int) -> None:
        if row.first_page > len(self.block_table):
            raise ValueError(f"run {row.run_id}: page {row.first_page} is named before page {len(self.block_table)}")
        if num_pages > self._pages.size:
            more = np.empty(max(num_pages - self._pages.size, self._pages.size), np.int32)
            self._pages = np.concatenate((self._pages, more))
        self._pages[row.first_page : num_pages] = row.block_table
        self.block_table = self._pages[:num_pages]


class KeptRows:
    """Which rows' logits a step needs: those that sample, and prompt rows whose next token is to be scored."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # indices into the flattened step
        self.sampled: list[int] = []  # indices into rows, of each row that samples and of its draft tokens
        self.scored: list[tuple[ScheduledSequence, int, int]] = []  # row, first index into rows, how many

    def add(self, row: ScheduledSequence, first: int, scored: int) -> None:
        """Add what is kept of a row's logits. first: flattened index of the row's first token; scored: how many of its
        tokens are followed by prompt."""
        if scored:
            self.scored.append((row, len(self.rows), scored))
            self.rows.extend(range(first, first + scored))
        if row.is_sampled:
            count = 1 + row.num_drafts
            self.sampled.extend(range(len(self.rows), len(self.rows) + count))
            self.rows.extend(range(first + row.num_tokens - count, first + row.num_tokens))


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step as the runner takes it, with the runs of the plan's rows, and which rows' logits are kept for what."""

    runs: Sequence[ExecutorRun]
    kept: KeptRows
    batch: ForwardBatch
    sources: Sequence[tuple[int, int]] = ()  # (index of a token, sampled row of the step before that it is)
    tower: tuple[int, float] = (0, 0.0)  # pictures that were computed for it, and the seconds that took


ONE_KEPT = KeptRows()
ONE_KEPT.sampled.append(0)
ONE_KEPT.rows.append(0)
FIRST_ROW = torch.zeros(1, dtype=torch.int64)
"""What is kept of a step of one token that samples."""


def kept_of(rows: Sequence[ScheduledSequence], runs: Sequence[ExecutorRun]) -> KeptRows:
    """Return what is kept of a step."""
    kept, first = KeptRows(), 0
    for run, row in zip(runs, rows, strict=True):
        scored = 0
        if run.start.params.prompt_logprobs is not None:
            scored = max(min(row.start + row.num_tokens, run.start.prompt_len - 1) - row.start, 0)
        kept.add(row, first, scored)
        first += row.num_tokens
    return kept


def begun_run(
    start: NewSequence,
    encoder: PictureEncoder | None,
    sampler_of: Callable[[Sequence[int]], RequestSampler],
) -> ExecutorRun:
    """Begin a run. sampler_of: makes its sampler, of the tokens of its prompt. What fails comes with its first row."""
    pictures, prompt_ids = None, start.token_ids[: start.prompt_len]
    if start.media:
        try:
            if encoder is None:
                raise EngineError("this engine reads no pictures")
            pictures = RunPictures(start, encoder)
        except PICTURE_FAILURES as error:
            return ExecutorRun(start, None, why_failed(error), failure=why_failed(error))
        start = msgspec.structs.replace(start, token_ids=pictures.token_ids)
        prompt_ids = pictures.prompt_tokens
    try:
        sampler = sampler_of(prompt_ids)
    except KTransformersError as error:
        return ExecutorRun(start, None, str(error), pictures=pictures)
    for token_id in start.token_ids[start.prompt_len :]:
        sampler.commit(token_id)
    sampler.begin()
    pooling = start.params.pooling if len(start.token_ids) == start.prompt_len else None
    return ExecutorRun(start, sampler, pooled=None if pooling is None else Pooled(pooling), pictures=pictures)


def with_pictures(
    rows: Sequence[ScheduledSequence],
    runs: Sequence[ExecutorRun],
    positions: torch.Tensor,
    context: ForwardContext,
    family: PictureFamily,
    pool: int,
) -> tuple[torch.Tensor, ForwardContext]:
    """Put the pictures of runs into a step: return its rotary positions and context. Notes which runs fail. pool: see
    pictures_in."""
    if all(run.pictures is None for run in runs):
        return positions, context
    shown = [(run.pictures, row.start, row.start + row.num_tokens) for run, row in zip(runs, rows, strict=True)]
    turned, pictures, failed = pictures_in(shown, positions, context.kv_lens, family, pool)
    for index, why in failed:
        runs[index].error = runs[index].failure = why
        runs[index].sampler = None
    return turned, replace(context, pictures=pictures, turned=turned if turned.dim() == 1 else None)


def tower_spent(runs: Sequence[ExecutorRun]) -> tuple[int, float]:
    """Return the pictures that the tower has computed for runs since the last call, and the seconds that it took."""
    spent = [run.pictures.take_spent() for run in runs if run.pictures is not None]
    return sum(count for count, _ in spent), sum(seconds for _, seconds in spent)


def prompt_scores(
    run: ExecutorRun, row: ScheduledSequence, logits: torch.Tensor, pool: WorkerPool
) -> list[TokenLogprobs | None]:
    """Return what the logits after positions row.start, ... say of the prompt's tokens that follow them: None of what
    shows pictures."""
    count, first = run.start.params.prompt_logprobs, row.start + 1
    assert count is not None
    if run.failure is not None:
        return [None] * len(logits)
    following, vocab_size = run.start.token_ids[first : first + len(logits)], logits.shape[-1]
    entries = token_logprobs(logits, [min(one, vocab_size - 1) for one in following], count, pool)
    pictures = run.pictures
    return [
        None if following[at - first] >= vocab_size or (pictures is not None and pictures.is_shown(at)) else one
        for at, one in enumerate(entries, first)
    ]


def needs_of(rows: Sequence[ScheduledSequence], inputs: StepTensors) -> list[int] | None:
    """Return what choosing tokens takes of kept rows (engine.sampling.logits_request); None where some are scored."""
    if inputs.kept.scored:
        return None
    needs: list[int] = []
    for run, row in zip(inputs.runs, rows, strict=True):
        if row.is_sampled:
            sampler = run.sampler
            needs.append(BEST_TOKEN if sampler is None else sampler.logits_request)
            needs += [BEST_TOKEN if sampler is None else sampler.later_request] * row.num_drafts
    return needs


def rows_of(logits: StepLogits, wanted: list[int], count: int) -> StepLogits:
    """Return rows in ascending order; no copy when they are all wanted. count: how many there are."""
    if len(wanted) == count:
        return logits
    return logits[wanted] if isinstance(logits, torch.Tensor) else logits.rows(wanted)


def is_drafted(row: ScheduledSequence, depth: int, result: RowResult) -> bool:
    """Whether the token behind the row's depth'th draft token is the next one."""
    return depth < row.num_drafts and result.token_id == row.token_ids[depth - row.num_drafts]


def last_token(result: RowResult) -> int:
    """Return the token that the next step begins with; 0 where none was drawn."""
    *_, last = result.tokens
    return 0 if last.token_id is None else last.token_id


def unread_result(plan: StepPlan, error: str) -> StepResult:
    """Return the result of a step of which nothing was computed: the requests that had rows in it end with `error`."""
    sampled = sum(row.is_sampled for row in plan.rows)
    failed = [(row.run_id, error) for row in plan.rows]
    return StepResult(step_id=plan.step_id, results=[RowResult(None, error=error)] * sampled, failed=failed)
