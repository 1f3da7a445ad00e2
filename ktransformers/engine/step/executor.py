"""Runs the scheduler's steps: many sequences in one flattened forward over a paged cache. Knows no text, no queue.

The state of a run is what sampling its next token needs. Everything else comes with each step: scheduler/records.py.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.damage.errors import NotFiniteError
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.sampling.sampler import RequestSampler, sample_each
from ktransformers.engine.step.context import ForwardBatch, OneTokenStep, paged_context
from ktransformers.engine.step.drafts import computed_rows, with_drafts
from ktransformers.engine.step.executor_parts import ExecutorParts
from ktransformers.engine.step.executor_runs import (
    FIRST_ROW,
    ONE_KEPT,
    ExecutorRun,
    KeptRows,
    StepRunner,
    StepTensors,
    begun_run,
    is_drafted,
    kept_of,
    last_token,
    needs_of,
    prompt_scores,
    rows_of,
    tower_spent,
    unread_result,
    with_pictures,
)
from ktransformers.engine.step.hidden import Pooled
from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.media.records import MEDIA_ID_BASE
from ktransformers.profiling.messages import StepRecord
from ktransformers.profiling.recorder import Recorder, Runtime
from ktransformers.scheduler.records import (
    NewSequence,
    PromptLogprobs,
    RowResult,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from ktransformers.scheduler.tier_records import TierResult

__all__ = ["PagedExecutor"]

logger = logging.getLogger(__name__)


class PagedExecutor:
    """Executes steps in their order. One caller at a time.

    recorder: takes what steps took while a profile is written; set between steps. counts_experts: whether somebody
    wants to know how often each expert was used. notify: called in steps that do not run apart, once others may have
    Python: right before they are computed. drafter, pictures, tiers: see ExecutorParts.
    """

    recorder: Recorder | None = None
    counts_experts = True
    notify: Callable[[], None] | None = None

    def __init__(
        self,
        runner: StepRunner,
        cache: PagedCache,
        pool: WorkerPool,
        vocab_size: int,
        parts: ExecutorParts | None = None,
    ):
        self.runner, self._cache, self._pool, self._vocab_size = runner, cache, pool, vocab_size
        self._parts = parts = parts or ExecutorParts()
        self.experts, self.drafter, self.pictures, self.tiers = (
            parts.experts,
            parts.drafter,
            parts.pictures,
            parts.tiers,
        )
        self._eos_token_ids = tuple(parts.eos_token_ids)
        self._pool_size = max((shape.index_pool for shape in cache.shapes), default=1)
        self._runs: dict[int, ExecutorRun] = {}
        self._previous: list[int] = []  # tokens that the step before sampled, by sampled row
        self._begun: dict[int, StepTensors] = {}  # by step
        self._held: StepTensors | None = None  # of the step that a GPU holds until its tokens are known
        self._has_lost_step = False  # such a one, until `reset`
        self._step = self._new_step()  # of `execute`, which ends before the next one is written

    @property
    def _family(self) -> PictureFamily:
        return PictureFamily(0) if self.pictures is None else self.pictures.family

    @property
    def num_runs(self) -> int:
        """Number of runs whose state is held."""
        return len(self._runs)

    def reset(self) -> None:
        """Forget all runs, after a step that failed: the scheduler starts every sequence anew."""
        self._runs.clear()
        self._previous = []
        self._begun.clear()
        self._has_lost_step = False
        steps = self.runner.held_steps
        if steps is not None:
            steps.drop_released()  # the next step is another one
        if self.drafter is not None:
            self.drafter.reset()
        if self.tiers is not None:
            self.tiers.reset()

    def recover(self) -> None:
        """Make the model whole again after a StageLostError, and forget all runs. Raises EngineError where it cannot
        be."""
        self._parts.recover()
        self.reset()

    def new_runtime(self) -> Runtime | None:
        """Return the runtime by which native code records in profiles; None without any."""
        return self._parts.new_runtime()

    def begin(self, plan: StepPlan) -> None:
        """Let the stages before this one, if there are any, compute the step already. To be called in order.

        Raises StageLostError.
        """
        if self.runner.begins_ahead and plan.rows and all(row.token_source is None for row in plan.rows):
            made = self._inputs(plan, self._new_step())
            self.runner.begin(made.batch)
            self._begun[plan.step_id] = made

    def prepare(self, plan: StepPlan) -> None:
        """Make the inputs of the step that `execute` gets next, but for tokens that are not sampled yet.

        From within `meanwhile` it is launched, too, where it can be: it goes on once they are.
        """
        if not plan.rows:
            return
        made = self._begun[plan.step_id] = self._inputs(plan, self._new_step())
        steps = self.runner.held_steps
        is_plain = self.drafter is None and self.recorder is None and plan.tiers is None
        if steps is None or not is_plain or any(run.pooled for run in made.runs):
            return
        if steps.launch_held(made.batch):
            self._held = made

    def _release(self, *, is_wanted: bool) -> None:
        """Let the step go on that is held, if any is. is_wanted: whether the tokens that it lacked are there."""
        held = self._held
        if held is None:
            return
        if is_wanted:
            self._complete(held)
        self._held, self._has_lost_step = None, True  # also where its tokens cannot be looked up: it goes on without
        steps = self.runner.held_steps
        assert steps is not None, "it holds a step"
        failed = steps.release(held.batch.token_ids, is_wanted=is_wanted)
        self._has_lost_step = not is_wanted
        if failed is not None:
            raise failed

    def _complete(self, inputs: StepTensors) -> None:
        """Fill in tokens that the step before has sampled."""
        for index, source in inputs.sources:
            inputs.batch.token_ids.numpy()[index] = self._previous[source]

    def _new_step(self) -> OneTokenStep:
        """For a step whose inputs are made while those of another one are read."""
        return OneTokenStep(self._cache, self._pool)

    def _inputs(self, plan: StepPlan, one_token: OneTokenStep) -> StepTensors:
        """What the step's rows come to, its new runs begun. one_token: what is written where there is but one."""
        for start in plan.starts:
            self._runs[start.run_id] = self._started(start)
        rows = plan.rows
        runs = [self._runs[row.run_id] for row in rows]
        if len(rows) == 1 and rows[0].num_tokens == 1 and runs[0].is_plain(rows[0], self._pool_size):
            return self._one_token(rows[0], runs, one_token)
        kept = kept_of(rows, runs)
        token_ids, sources = self._token_ids(rows)
        tables = [run.pages(row) for run, row in zip(runs, rows, strict=True)]
        positions, context = paged_context(self._cache, self._pool, rows, tables)
        positions, context = with_pictures(rows, runs, positions, context, self._family, self._pool_size)
        keep = torch.from_numpy(np.array(kept.rows, dtype=np.int64))
        batch = ForwardBatch(torch.from_numpy(token_ids), positions, context, keep)
        return StepTensors(runs, kept, batch, sources, tower_spent(runs))

    @staticmethod
    def _one_token(row: ScheduledSequence, runs: Sequence[ExecutorRun], step: OneTokenStep) -> StepTensors:
        """`_inputs` of a step of one token: what every token of a chat waits for."""
        context = step.context(row, runs[0].pages(row), runs[0].shift)
        if not row.is_sampled or runs[0].start.params.prompt_logprobs is not None:
            kept = kept_of([row], runs)
            keep = torch.zeros(len(kept.rows), dtype=torch.int64)
        else:
            kept, keep = ONE_KEPT, FIRST_ROW
        sources = () if row.token_source is None else ((0, row.token_source),)
        return StepTensors(runs, kept, ForwardBatch(step.token_ids, step.positions, context, keep), sources)

    @property
    def runs_apart(self) -> bool:
        """Whether `execute` calls `meanwhile` while GPUs compute."""
        return self.runner.runs_apart

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Run one step of the scheduler. A row that cannot be sampled gets an error of its own; an exception is about
        the whole step.

        meanwhile: called once the step's rows are on their way, where it `runs_apart`. Raises StageLostError where
        `recover` helps. Where experts cannot be read from their files, what the step was for ends with an error, and
        other requests go on.
        """
        began_ns = time.monotonic_ns()
        try:
            return self._computed(plan, meanwhile, began_ns)
        except ReadError as error:
            if self._has_lost_step:  # it has run with tokens that are none, and states with it
                raise
            logger.error("a step failed, and the answers that were in it end: %s", error)
            self._previous = [0] * sum(row.is_sampled for row in plan.rows)
            stored, stored_rows = self.experts.take_stored()
            if self.recorder is not None:  # native records go on with the next step
                times = began_ns, time.monotonic_ns(), 0
                record = self._record(plan, (), times, self.recorder.epoch)
                record = msgspec.structs.replace(record, stored=stored, stored_rows=stored_rows, has_failed=True)
                self.recorder.post(record)
            return msgspec.structs.replace(unread_result(plan, str(error)), stored=stored, stored_rows=stored_rows)

    def _computed(self, plan: StepPlan, meanwhile: Callable[[], None] | None, began_ns: int) -> StepResult:
        self._end(plan.ended)
        if plan.tiers is not None and self.tiers is not None:
            self.tiers.run(plan.tiers)
        if not plan.rows:
            return StepResult(step_id=plan.step_id, results=[], tiers=self._tier_result())
        copied_ns = time.monotonic_ns()
        begun = self._begun.pop(plan.step_id, None)
        inputs = begun or self._inputs(plan, self._step)
        self._complete(inputs)
        rows, draft_seconds = with_drafts(self.drafter, plan.rows, inputs)
        self.runner.meanwhile = meanwhile or self.notify
        kept, recorder = inputs.kept, self.recorder
        if recorder is not None:
            recorder.begin_step(plan.step_id, plan.num_tokens, [kept.rows[at] for at in kept.sampled])
        self.experts.hot.lend(plan.is_long)
        try:
            logits = self._forward(rows, inputs)
            sampling_ns = time.monotonic_ns()
            results = self._sample(rows, inputs.runs, rows_of(logits, kept.sampled, len(kept.rows)))
            results = self._embedded(rows, inputs.runs, results)
            self._previous = [last_token(result) for result in results]
            # Before the next step goes on, whose experts are counted in the same places.
            experts, counts = self.experts.take_counts() if self.counts_experts else ((0, 0, 0), b"")
            self._release(is_wanted=True)
        finally:
            self._release(is_wanted=False)  # of a step that failed: a GPU that waits for ever ends nothing
        sampling_ns = time.monotonic_ns() - sampling_ns
        scored = [self._score(row, _whole(logits)[at : at + count]) for row, at, count in kept.scored]
        observing_ns = time.monotonic_ns()
        if self.drafter is not None and plan.is_observed:
            self.drafter.observe(computed_rows(rows, inputs, results))
        ended_ns, (stored, stored_rows) = time.monotonic_ns(), self.experts.take_stored()
        if recorder is not None:
            drawn = [sum(1 for _ in result.tokens) for result in results]
            times = began_ns, ended_ns, sampling_ns
            record = self._record(plan, self._sampled(plan, kept, drawn), times, recorder.epoch)
            waited_ns = 0 if begun is not None else int(inputs.tower[1] * 1e9)  # else within another step
            recorder.end_step(
                msgspec.structs.replace(record, stored=stored, stored_rows=stored_rows, tower_ns=waited_ns)
            )
        return StepResult(
            step_id=plan.step_id,
            results=results,
            prompt_logprobs=scored,
            seconds=(ended_ns - began_ns) / 1e9,
            draft_seconds=draft_seconds,
            observe_seconds=(ended_ns - observing_ns) / 1e9,
            experts=experts,
            expert_counts=counts,
            hot=self.experts.hot.take(),
            stored=stored,
            stored_rows=stored_rows,
            tower=inputs.tower,
            failed=[(row.run_id, run.failure) for row, run in zip(rows, inputs.runs, strict=True) if run.failure],
            tiers=self._tier_result((ended_ns - copied_ns) / 1e9),
        )

    def _end(self, run_ids: Sequence[int]) -> None:
        """Drop the state of runs."""
        ended = [(run_id, run) for run_id in run_ids if (run := self._runs.pop(run_id, None)) is not None]
        if self.drafter is not None and ended:
            self.drafter.end([(run_id, run.block_table) for run_id, run in ended])

    def _tier_result(self, row_seconds: float = 0.0) -> TierResult | None:
        return None if self.tiers is None else self.tiers.result(row_seconds)

    def _sampled(self, plan: StepPlan, kept: KeptRows, drawn: Sequence[int]) -> list[tuple[str, int]]:
        """StepRecord.sampled. drawn: tokens of each sampled row."""
        sampled, at, counts = list[tuple[str, int]](), 0, iter(drawn)
        for row in plan.rows:
            if row.is_sampled:
                request_id = self._runs[row.run_id].start.request_id
                sampled += [(request_id, kept.rows[i]) for i in kept.sampled[at : at + next(counts)]]
                at += 1 + row.num_drafts
        return sampled

    def _record(
        self, plan: StepPlan, sampled: Sequence[tuple[str, int]], times: tuple[int, int, int], epoch: int
    ) -> StepRecord:
        """times: when the step began and ended, and how long sampling took, ns."""
        starts = [self._runs[row.run_id].start for row in plan.rows]
        return StepRecord(
            epoch=epoch,
            step_id=plan.step_id,
            began_ns=times[0],
            ended_ns=times[1],
            num_rows=plan.num_tokens,
            prefill_rows=sum(
                row.num_tokens for start, row in zip(starts, plan.rows, strict=True) if row.start < len(start.token_ids)
            ),
            num_seqs=len(plan.rows),
            sampled=sampled,
            sampling_ns=times[2] if sampled else None,
        )

    def _started(self, start: NewSequence) -> ExecutorRun:
        def sampler_of(prompt_ids: Sequence[int]) -> RequestSampler:
            mask = self._parts.mask_of(start)
            prompt_ids = [one for one in prompt_ids if one < self._vocab_size] if start.media else prompt_ids
            return RequestSampler(start.params, prompt_ids, self._vocab_size, mask, eos_token_ids=self._eos_token_ids)

        return begun_run(start, self.pictures, sampler_of)

    def _forward(self, rows: Sequence[ScheduledSequence], inputs: StepTensors) -> StepLogits:
        needs, pooled = needs_of(rows, inputs), [run.pooled for run in inputs.runs]
        if not any(pooled):
            return self.runner.reduced_step(inputs.batch, needs)
        with self.runner.hook.watch() as seen:
            logits = self.runner.reduced_step(inputs.batch, needs)
        first = 0
        for one, row in zip(pooled, rows, strict=True):
            if one is not None:
                one.add(seen[-1][first : first + row.num_tokens])
            first += row.num_tokens
        return logits

    def _embedded(
        self, rows: Sequence[ScheduledSequence], runs: Sequence[ExecutorRun], results: list[RowResult]
    ) -> list[RowResult]:
        """With the embeddings of prompts that are complete. results: of the sampled rows, in order."""
        if not any(run.pooled for run in runs):
            return results
        runs = [run for run, row in zip(runs, rows, strict=True) if row.is_sampled]
        pooled = [run.pooled for run in runs]
        for run in runs:
            run.pooled = None  # the embedding comes with the first token
        return [
            result if one is None or result.error is not None else self._with_embedding(result, one)
            for one, result in zip(pooled, results, strict=True)
        ]

    def _with_embedding(self, result: RowResult, pooled: Pooled) -> RowResult:
        try:
            return msgspec.structs.replace(result, embedding=pooled.vector())
        except NotFiniteError as error:
            return RowResult(None, error=self._said(error))

    def _said(self, error: KTransformersError) -> str:
        """What a row's error says, with the tensor that is damaged where one may be."""
        return str(error.with_damage(self._parts.find_damage()) if isinstance(error, NotFiniteError) else error)

    def _token_ids(self, rows: Sequence[ScheduledSequence]) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]]]:
        """The tokens of rows, one in the place of each pseudo-id, and which of them are still to be sampled: see
        StepTensors.sources."""
        found, sources = list[int](), list[tuple[int, int]]()
        for row in rows:
            if row.token_source is None:
                found += row.token_ids
            else:
                sources.append((len(found), row.token_source))
                found.append(0)
        token_ids = np.array(found, dtype=np.int64)
        token_ids[token_ids >= MEDIA_ID_BASE] = self._family.token_id
        return token_ids, sources

    def _sample(
        self, rows: Sequence[ScheduledSequence], runs: Sequence[ExecutorRun], logits: StepLogits
    ) -> list[RowResult]:
        """One result per sampled row, in order. logits: of the sampled rows, each with its draft tokens behind it.

        Draft tokens count one after the other: what is drawn behind one depends on those before it, by penalties and
        grammars.
        """
        sampled = [(run, row) for run, row in zip(runs, rows, strict=True) if row.is_sampled]
        if not any(row.num_drafts for _, row in sampled):
            return self._draw(sampled, 0, logits)
        found: list[list[RowResult]] = [[] for _ in sampled]
        firsts = [0, *itertools.accumulate(1 + row.num_drafts for _, row in sampled)]
        left, depth = list(range(len(sampled))), 0  # those whose next token is to be drawn
        while left:
            places = [firsts[i] + depth for i in left]
            results = self._draw([sampled[i] for i in left], depth, rows_of(logits, places, firsts[-1]))
            for i, result in zip(left, results, strict=True):
                if not depth or result.error is None:  # else the next step has the error, as without drafts
                    found[i].append(result)
            left = [i for i, result in zip(left, results, strict=True) if is_drafted(sampled[i][1], depth, result)]
            depth += 1
        return [first if not more else msgspec.structs.replace(first, more=more) for first, *more in found]

    def _draw(
        self, sampled: Sequence[tuple[ExecutorRun, ScheduledSequence]], depth: int, logits: StepLogits
    ) -> list[RowResult]:
        """The tokens behind the depth'th draft token of each row, which is right. logits: one row for each."""
        results, good = list[RowResult](), list[int]()
        samplers, positions = list[RequestSampler](), list[int]()
        for run, row in sampled:
            if run.sampler is not None:
                good.append(len(results))
                samplers.append(run.sampler)
                positions.append(row.start + row.num_tokens - row.num_drafts + depth)
            results.append(RowResult(None, error=run.error))
        tokens = sample_each(rows_of(logits, good, len(results)), samplers, positions, self._pool)
        for i, sampler, token in zip(good, samplers, tokens, strict=True):
            if isinstance(token, KTransformersError):
                results[i] = RowResult(None, error=self._said(token), is_refused=isinstance(token, ConfigError))
            else:
                sampler.commit(token.token_id)
                sampler.begin()
                results[i] = RowResult(token.token_id, token.logprobs)
        return results

    def _score(self, row: ScheduledSequence, logits: torch.Tensor) -> PromptLogprobs:
        """The log probabilities of the prompt tokens behind positions row.start, ..., from these positions' logits."""
        entries = prompt_scores(self._runs[row.run_id], row, logits, self._pool)
        return PromptLogprobs(run_id=row.run_id, start=row.start + 1, entries=entries)


def _whole(logits: StepLogits) -> torch.Tensor:
    """Of a step without needs."""
    assert isinstance(logits, torch.Tensor)
    return logits
