"""Figures of replicas that come and go."""

from __future__ import annotations

from ktransformers.cluster.records import ReplicaReport
from ktransformers.cluster.stats import SILENT_SECONDS, ClusterFigures
from ktransformers.scheduler.commands import EngineTotals
from ktransformers.scheduler.records import SchedulerStats
from ktransformers.server.backend.balance_stats import BalanceStats


def report(name: str, number: int) -> ReplicaReport:
    scheduler = SchedulerStats(
        num_running=number,
        num_waiting=1,
        num_pages=100,
        num_used_pages=number,
        num_idle_pages=0,
        num_preemptions=0,
        num_expired=0,
        num_engine_losses=0,
        prefix_query_len=10 * number,
        prefix_hit_len=number,
    )
    stats = BalanceStats(
        num_running=number,
        num_waiting=1,
        cache_usage=number / 100,
        cache_len=400,
        scheduler=scheduler,
        engine=EngineTotals(num_steps=number),
        experts={0: [number, 1]},
    )
    return ReplicaReport(name, stats)


def test_what_counts_from_the_start_outlives_its_replica() -> None:
    figures = ClusterFigures()
    figures.update([report("a", 3), report("b", 4)], now=0.0)
    both = figures.stats()
    assert (both.num_running, both.num_waiting, both.cache_len) == (7, 2, 800)
    assert both.cache_usage == (3 / 100 * 400 + 4 / 100 * 400) / 800
    assert both.experts == {0: [7, 2]}
    figures.update([report("b", 5)], now=SILENT_SECONDS / 2)
    assert figures.stats().num_running == 8  # one that is silent for a while is still there
    figures.update([report("b", 6)], now=SILENT_SECONDS + 1)
    left = figures.stats()
    assert [one.name for one in left.replicas] == ["b"]
    assert (left.num_running, left.num_waiting, left.cache_len) == (6, 1, 400)
    assert left.scheduler is not None
    assert (left.scheduler.prefix_query_len, left.scheduler.num_used_pages) == (90, 6)
    assert left.engine.num_steps == 9
    assert left.experts == {0: [9, 2]}


def test_nobody_there_is_nothing_to_add() -> None:
    stats = ClusterFigures().stats()
    assert (stats.num_running, stats.cache_usage, stats.scheduler) == (0, 0.0, None)
