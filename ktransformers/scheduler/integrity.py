"""Checks what the scheduler's docstrings promise of its queues and runs. For tests: it reads everything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ktransformers.scheduler.batch import PlannedStep
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.sequence import Sequence

__all__ = ["Queues", "check_queues", "check_run"]


@dataclass(frozen=True, slots=True)
class Queues:
    """The places in which a request may be."""

    waiting: Collection[Sequence]
    running: Collection[Sequence]
    suspended: Collection[Sequence]


def check_queues(
    config: SchedulerConfig, queues: Queues, requests: Mapping[str, Sequence], deadlines: Mapping[str, float]
) -> None:
    """Raise AssertionError unless each request is in one place, and both queues are in order."""
    for queue in (queues.waiting, queues.running):
        assert all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order"
    assert len(queues.running) <= config.max_running, "more running than max_running"
    here = {seq.request_id: seq for seq in (*queues.waiting, *queues.running, *queues.suspended)}
    assert here == requests, "a lost request"
    places = len(queues.waiting) + len(queues.running) + len(queues.suspended)
    assert len(here) == places, "a request in two places"
    assert deadlines.keys() <= here.keys(), "a deadline without a request"
    assert all(seq.run is None for seq in queues.waiting), "a waiting sequence runs"
    assert all(seq.run is None for seq in queues.suspended), "a suspended sequence runs"


def check_run(config: SchedulerConfig, seq: Sequence, in_flight: Collection[PlannedStep]) -> None:
    """Raise AssertionError unless the lengths of a running sequence are as scheduler/sequence.py has them."""
    run = seq.run
    assert run is not None, "a running sequence has no run"
    rows = [row for step in in_flight for row in step.rows if row.run is run]
    size, total_len = config.page_size, seq.known_len + run.num_pending
    num_pending = sum(1 + len(row.drafts) for row in rows if row.is_sampled)
    assert run.num_pending == num_pending, "pending tokens are not those of the steps in flight"
    assert run.num_drafted == sum(len(row.drafts) for row in rows), "draft tokens are not those of the steps in flight"
    num_sampled = sum(row.is_sampled for row in rows)
    assert not run.num_drafted or num_sampled == 1, "a row is sampled beside one with draft tokens"
    assert run.num_published * size <= run.computed_len <= run.planned_len < total_len <= seq.limit_len, "lengths"
    assert run.computed_len < seq.known_len, "computed a token that nobody knows"
    assert len(run.block_table) == -(-run.planned_len // size), "pages do not just cover the plan"
    if config.has_prefix_cache:
        assert run.num_published == run.computed_len // size, "a full page is not shared"
    assert seq.drafter is None or len(seq.drafter) <= seq.known_len, "drafts know tokens that there are not"
