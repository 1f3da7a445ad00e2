"""Drives a paged engine with random tokens and measures it: prefill of one sequence, decode of many.

Tokens are drawn anew for every pass, those that are "generated" too: sampled ones run in circles on random weights, and
then choose the same experts, which caches would make fast. The last step of every pass samples, so its result is on the
host when the clock stops.

Distinct experts are counted in a pass of its own before the measured ones, in every layer and step; it also warms up.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.router import KRouter
from ktransformers.optimize.decode_bound import is_embedding, reads_of
from ktransformers.optimize.plan import Plan
from ktransformers.scheduler.long_prompts import LongPrompts
from ktransformers.scheduler.records import NewSequence, ScheduledSequence, StepPlan, StepResult, counts_in

__all__ = ["DecodeCase", "Figure", "OfflineRuns", "StepWeights", "slots_needed"]

COUNTED_STEPS = 8
"""Decode steps in which distinct experts are counted: a few hundred layers of a large model."""

LEARNING_STEPS = 256
"""Decode steps before a figure, where experts change places on a GPU: until nearly all that are hot are there."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """A case of decoding. steps: tokens of each sequence in one pass. prompt_len: tokens in its cache before."""

    steps: int
    prompt_len: int


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The weights that a step reads at least, in bytes.

    dense: everything but experts, the embedding table and other tables of which a token reads a few rows. expert: one
    expert of every MoE layer together, num_layers of them, each with num_experts.
    """

    dense: float
    expert: float
    num_layers: int
    num_experts: int

    @classmethod
    def of_plan(cls, plan: Plan) -> StepWeights:
        """Count the weights of a plan by their resident bytes, on whatever device."""
        experts = {key: op.num_experts for key, op in plan.operators.items() if isinstance(op, KTransformersExperts)}
        heads = set(plan.shared.values())
        dense, expert = 0.0, 0.0
        for entry in plan.entries:
            nbytes = sum(reads_of(entry).values())
            if entry.key in experts:
                expert += nbytes / experts[entry.key]
            elif entry.key in heads or not is_embedding(entry):
                dense += nbytes
        return cls(dense, expert, len(experts), max(experts.values(), default=0))

    def touched(self, distinct: float) -> float:
        """Return the bytes of a step whose MoE layers touch `distinct` experts in the mean."""
        return self.dense + distinct * self.expert

    def even(self, top_k: float, num_tokens: int) -> float:
        """Return the distinct experts expected of a layer when each token takes top_k of them, all equally likely."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1.0 - (1.0 - top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of prefill or decode. tokens: of the prompt, or sequences per step. passes: how often it was measured.
    context: tokens that were cached before, None of prefill.

    distinct_experts: per layer and step, the mean; even_experts: what even routing would touch. Both, and gb_s with
    them, are None when the engine did not count; without experts they are 0. hot_percent: of the experts that decode
    steps used, those that had a slot on a GPU; None without slots.
    """

    phase: str
    tokens: int
    tokens_per_s: float
    ms_per_step: float
    gb_s: float | None
    distinct_experts: float | None
    even_experts: float | None
    passes: int
    hot_percent: float | None = None
    context: int | None = None


@dataclass(slots=True)
class _Counts:
    """Sums over the steps of a pass, see StepResult.experts. step_tokens: of each step."""

    rows: int = 0
    samples: int = 0
    touched: int = 0
    step_tokens: list[int] = field(default_factory=list)

    def add(self, result: StepResult, num_tokens: int) -> None:
        rows, samples, touched = result.experts
        self.rows, self.samples, self.touched = self.rows + rows, self.samples + samples, self.touched + touched
        self.step_tokens.append(num_tokens)


def _top_k_of(plan: Plan) -> int | None:
    """Experts of a token by the routers, where kernels know them; layers on a GPU do not tell what they computed."""
    routers = [operator.spec for operator in plan.operators.values() if isinstance(operator, KRouter)]
    found = {spec.top_k for spec in routers if spec is not None}
    return found.pop() if len(found) == 1 else None


def _pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def _row(
    run_id: int, start: int, token_ids: list[int], block_table: list[int], index: int, *, is_sampled: bool = True
) -> ScheduledSequence:
    """index: of the sequence, and of its slot for states."""
    return ScheduledSequence(
        run_id=run_id,
        start=start,
        token_ids=token_ids,
        token_source=None,
        block_table=block_table,
        is_sampled=is_sampled,
        read_slot=index if start else -1,
        write_slot=index,
    )


def slots_needed(prefills: list[int], batches: list[int], case: DecodeCase, page_size: int) -> int:
    """Return the slots of a cache in which every figure can be measured, one after the other."""
    each = _pages(case.prompt_len + case.steps, page_size)
    pages = [_pages(count, page_size) for count in prefills] + [batch * each for batch in batches]
    return max(pages) * page_size


class OfflineRuns:
    """Measures prefill and decode of one engine.

    seconds: passes of a figure are repeated until they took as long. lends: whether slots are lent to long prompts,
    where the engine would.
    """

    lends: bool = True

    def __init__(self, engine: Engine, seconds: float, seed: int = 0):
        self._engine, self._seconds = engine, seconds
        self._rng = np.random.default_rng(seed)
        self._step_ids, self._run_ids = itertools.count(), itertools.count()
        self._ended: list[int] = []
        self.weights = StepWeights.of_plan(engine.plan)
        self._top_k = _top_k_of(engine.plan)
        self._picks: list[bytes] = []  # of decode steps, see StepResult.expert_counts

    def quarter_share(self) -> float | None:
        """The share that the most used quarter of each layer's experts has of decode steps' picks; None: no picks.

        Steps of few tokens have a most used quarter by chance alone.
        """
        layers: dict[int, Counter[int]] = {}
        for layer, expert, rows in counts_in(b"".join(self._picks)):
            layers.setdefault(layer, Counter())[expert] += rows
        quarter, total = self.weights.num_experts // 4, sum(each.total() for each in layers.values())
        most = sum(rows for each in layers.values() for _, rows in each.most_common(quarter))
        return most / total if total else None

    def prefill(self, num_tokens: int) -> Figure:
        """Measure a prompt of num_tokens in chunks as the scheduler makes them, until its first token is sampled."""

        def one_pass() -> _Counts:
            run, counts = self._prompt(num_tokens, first_page=0)
            self._ended.append(run)
            return counts

        counted = one_pass()
        return self._measured("prefill", num_tokens, num_tokens, counted, one_pass)

    def decode(self, batch: int, case: DecodeCase) -> Figure:
        """Measure the decoding of `batch` sequences of case.prompt_len tokens, case.steps tokens further."""
        each = _pages(case.prompt_len + case.steps, self._engine.cache.page_size)
        runs = [self._prompt(case.prompt_len, first_page=i * each, index=i)[0] for i in range(batch)]
        tables = [list(range(i * each, (i + 1) * each)) for i in range(batch)]

        def rows(position: int) -> list[ScheduledSequence]:
            pairs = enumerate(zip(runs, tables, strict=True))
            return [_row(run, position, self._tokens(1), table, i) for i, (run, table) in pairs]

        def one_pass(steps: int = case.steps) -> _Counts:
            counts, plan = _Counts(), self._plan(rows(case.prompt_len))
            for position in range(case.prompt_len + 1, case.prompt_len + steps + 1):
                following = self._plan(rows(position)) if position < case.prompt_len + steps else None
                result = self._execute(plan, following)
                counts.add(result, batch)
                self._picks.append(result.expert_counts)
                plan = following or plan
            return counts

        if self._engine.hot.gpus:
            for _ in range(-(-LEARNING_STEPS // case.steps)):
                one_pass()
        counted = one_pass(min(case.steps, COUNTED_STEPS))
        figure = self._measured("decode", batch, batch * case.steps, counted, one_pass)
        self._ended.extend(runs)
        return replace(figure, context=case.prompt_len)

    def _measured(
        self, phase: str, size: int, num_tokens: int, counted: _Counts, one_pass: Callable[[], _Counts]
    ) -> Figure:
        """num_tokens: of one pass. counted: of a pass in which experts were counted."""
        hot = self._engine.hot.totals()
        began, passes, num_steps, seconds = time.perf_counter(), 0, 0, 0.0
        while passes == 0 or seconds < self._seconds:
            num_steps += len(one_pass().step_tokens)
            passes += 1
            seconds = time.perf_counter() - began
        reads, hits = (now - before for now, before in zip(self._engine.hot.totals()[:2], hot[:2], strict=True))
        distinct, even = self._experts(counted)
        per_step = None if distinct is None else self.weights.touched(distinct)
        return Figure(
            phase=phase,
            tokens=size,
            tokens_per_s=passes * num_tokens / seconds,
            ms_per_step=1e3 * seconds / num_steps,
            gb_s=None if per_step is None else num_steps * per_step / seconds / 1e9,
            distinct_experts=distinct,
            even_experts=even,
            passes=passes,
            hot_percent=100 * hits / reads if reads else None,
        )

    def _experts(self, counted: _Counts) -> tuple[float | None, float | None]:
        """Distinct experts per layer and step: counted, and as even routing would have it."""
        if not self.weights.num_layers:
            return 0.0, 0.0
        if not counted.samples:
            return None, None
        top_k = self._top_k or counted.rows / (self.weights.num_layers * sum(counted.step_tokens))
        even = [self.weights.even(top_k, num_tokens) for num_tokens in counted.step_tokens]
        return counted.touched / counted.samples, sum(even) / len(even)

    def _prompt(self, num_tokens: int, first_page: int, index: int = 0) -> tuple[int, _Counts]:
        """Run a new sequence's prompt, in chunks. Returns its run, which stays until it is named in _ended."""
        counts = _Counts()
        page_size, long = self._engine.cache.page_size, LongPrompts(self._engine.scheduler_config)
        token_ids, run_id = self._tokens(num_tokens), next(self._run_ids)
        table = list(range(first_page, first_page + _pages(num_tokens, page_size)))
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        starts = [
            NewSequence(
                run_id=run_id, request_id=str(run_id), params=params, prompt_len=num_tokens, token_ids=token_ids
            )
        ]
        start = 0
        while start < num_tokens:
            size = self._engine.config.chunk_size + (long.more_of(num_tokens - start) if self.lends else 0)
            part = token_ids[start : start + size]
            row = _row(run_id, start, part, table, index, is_sampled=start + len(part) == num_tokens)
            counts.add(self._execute(self._plan([row], starts, is_long=long.is_on)), len(part))
            starts, start = [], start + len(part)
        return run_id, counts

    def _tokens(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._engine.model.vocab_size, count).tolist()
        return ids

    def _plan(
        self, rows: list[ScheduledSequence], starts: list[NewSequence] | None = None, *, is_long: bool = False
    ) -> StepPlan:
        number = next(self._step_ids)
        plan = StepPlan(step_id=number, starts=starts or [], rows=rows, ended=self._ended, is_long=is_long)
        self._ended = []
        return plan

    def _execute(self, plan: StepPlan, following: StepPlan | None = None) -> StepResult:
        """Run a step. following: the one behind it, which is prepared meanwhile, as a server does."""
        executor = self._engine.executor
        if following is None or not executor.runs_apart:
            return executor.execute(plan)
        return executor.execute(plan, lambda: executor.prepare(following))
