"""The inputs of steps of one token, which are written in place: what they say, and who may still read those before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.core import SamplingParams
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext
from ktransformers.scheduler.records import NewSequence, ScheduledSequence, StepPlan

PAGE, PAGES, VOCAB = 4, 60, 16


class Recorder:
    """A runner that keeps what steps are told, as plain numbers, and as it is; the token after t is t + 1."""

    begins_ahead = True
    runs_apart = False
    held_steps = None
    meanwhile: Callable[[], None] | None = None
    hook: Any = None

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.contexts: list[ForwardContext] = []
        self.begun: list[torch.Tensor] = []

    def begin(self, batch: ForwardBatch) -> None:
        self.begun.append(batch.token_ids)

    def reduced_step(self, batch: ForwardBatch, needs: Any) -> torch.Tensor:
        token_ids, positions, context, keep = batch.token_ids, batch.positions, batch.context, batch.keep
        self.contexts.append(context)
        names = ("slot_mapping", "seq_ids", "kv_lens", "block_table")
        numbers = {name: getattr(context, name).tolist() for name in names}
        self.seen.append({"ids": token_ids.tolist(), "positions": positions.tolist(), "keep": keep.tolist(), **numbers})
        return torch.eye(VOCAB)[(token_ids[keep] + 1) % VOCAB]


class World:
    """Sequences whose pages are told as they come, and an executor; the oracle is in plain Python."""

    def __init__(self) -> None:
        self.runner = Recorder()
        self.executor = PagedExecutor(self.runner, PagedCache((), PAGES, PAGE), WorkerPool(1), VOCAB)
        self.pages: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}
        self._free = list(range(PAGES))
        random.Random(5).shuffle(self._free)
        self._steps = 0

    def row(self, run_id: int, token_ids: Sequence[int], told_from: int | None = None) -> ScheduledSequence:
        """The next tokens of a run. told_from: the page from which on the table is told again."""
        table, start = self.pages.setdefault(run_id, []), self.lens.get(run_id, 0)
        first = len(table) if told_from is None else told_from
        self.lens[run_id] = end = start + len(token_ids)
        while len(table) * PAGE < end:
            table.append(self._free.pop())
        return ScheduledSequence(
            run_id=run_id,
            start=start,
            token_ids=token_ids,
            token_source=None,
            block_table=table[first:],
            first_page=first,
            is_sampled=True,
        )

    def plan(self, *rows: ScheduledSequence) -> StepPlan:
        params = SamplingParams(temperature=0.0, seed=1)
        starts = [
            NewSequence(run_id=row.run_id, request_id="a", params=params, prompt_len=1, token_ids=[1])
            for row in rows
            if row.start == 0
        ]
        self._steps += 1
        return StepPlan(step_id=self._steps, starts=starts, rows=rows, ended=[])

    def wanted(self, row: ScheduledSequence) -> dict[str, Any]:
        places = range(row.start, row.start + row.num_tokens)
        table = self.pages[row.run_id]
        return {
            "ids": list(row.token_ids),
            "positions": list(places),
            "keep": [row.num_tokens - 1],
            "slot_mapping": [table[at // PAGE] * PAGE + at % PAGE for at in places],
            "seq_ids": [0] * row.num_tokens,
            "kv_lens": [at + 1 for at in places],
            "block_table": [table],
        }

    def run(self, *rows: ScheduledSequence) -> list[int | None]:
        return [result.token_id for result in self.executor.execute(self.plan(*rows)).results]


def test_steps_of_one_token_say_what_they_are() -> None:
    """Pages come, are told again, and come in steps of several sequences in between."""
    world = World()
    world.run(world.row(1, [3, 4, 5]), world.row(2, [6]))
    for token_id in range(30):
        for run_id in (1, 2, 2):
            row = world.row(run_id, [token_id % VOCAB])
            assert world.run(row) == [(token_id + 1) % VOCAB]
            assert world.runner.seen[-1] == world.wanted(row)
        world.run(world.row(1, [1, 2]), world.row(2, [3]))
        if token_id == 9:  # as when another run has published the same page first
            world.pages[1][0] = world._free.pop()
            row = world.row(1, [7], told_from=0)
            world.run(row)
            assert world.runner.seen[-1] == world.wanted(row)


def test_a_context_is_made_for_new_pages_only_and_keeps_nothing_derived() -> None:
    world = World()
    world.run(world.row(1, [3]))
    for _ in range(PAGE):
        world.run(world.row(1, [3]))
        context = world.runner.contexts[-1]
        context.derived("what", context.kv_lens, lambda lens: lens.tolist())
    one, *same, other = world.runner.contexts
    assert all(context is one for context in same)
    assert other is not one
    made = other.derived("what", other.kv_lens, lambda lens: lens.tolist())
    world.run(world.row(1, [3]))
    assert other.derived("what", other.kv_lens, lambda lens: lens.tolist()) == [PAGE + 2] != made


def test_pages_that_the_cache_does_not_have_are_refused() -> None:
    world = World()
    row = world.row(1, [3])
    world.pages[1][0] = PAGES
    with pytest.raises(ValueError, match="a block table names pages 60 to 60; the cache has 60"):
        world.run(ScheduledSequence(
            run_id=1, start=0, token_ids=[3], token_source=None, block_table=[PAGES], is_sampled=row.is_sampled
        ))  # fmt: skip


@pytest.mark.parametrize("ahead", ["prepare", "begin"])
def test_inputs_that_are_made_ahead_are_not_those_of_the_step_that_runs(ahead: str) -> None:
    """Of as many steps as are under way."""
    world = World()
    world.run(world.row(1, [3]))
    plans = [world.plan(world.row(run_id, [token_id])) for run_id, token_id in ((1, 4), (2, 5), (1, 6))]
    for plan in plans:
        getattr(world.executor, ahead)(plan)
    for plan, token_id in zip(plans, (4, 5, 6), strict=True):
        assert [result.token_id for result in world.executor.execute(plan).results] == [token_id + 1]
    assert [seen["ids"] for seen in world.runner.seen] == [[3], [4], [5], [6]]
    assert [seen["kv_lens"] for seen in world.runner.seen] == [[1], [2], [1], [3]]


def test_a_token_that_is_not_known_when_its_step_is_prepared() -> None:
    world = World()
    first = world.plan(world.row(1, [3]))
    row = world.row(1, [0])
    known = {name: getattr(row, name) for name in ("run_id", "start", "block_table", "first_page", "is_sampled")}
    second = world.plan(ScheduledSequence(token_ids=[], token_source=0, **known))
    world.executor.prepare(first)
    world.executor.prepare(second)
    world.executor.execute(first)
    assert [result.token_id for result in world.executor.execute(second).results] == [5]
    assert world.runner.seen[-1]["ids"] == [4]
