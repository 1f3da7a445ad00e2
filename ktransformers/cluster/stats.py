"""Adds the figures of replicas up, so that what counts from the start never falls when a replica goes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ktransformers.cluster.records import ReplicaReport
from ktransformers.scheduler.records import SchedulerStats
from ktransformers.scheduler.tier_records import TierStats
from ktransformers.server.backend.balance_stats import BalanceStats, ClusterStats, ReplicaFigures

__all__ = ["ClusterFigures"]

_NOW = ("num_running", "num_waiting", "num_suspended", "num_pages", "num_used_pages", "num_idle_pages")
_TIERS_NOW = ("host_bytes", "max_host_bytes", "disk_bytes", "max_disk_bytes")
SILENT_SECONDS = 10.0
"""A replica that has said nothing for so long is not shown any more."""


def _added(one: Any, other: Any) -> Any:
    """Two structs of numbers, field by field; None counts as nothing."""
    if one is None or other is None:
        return other if one is None else one
    if not isinstance(one, msgspec.Struct):
        return one + other
    names = one.__struct_fields__
    return type(one)(**{name: _added(getattr(one, name), getattr(other, name)) for name in names})


def _experts(one: Mapping[int, Sequence[int]], other: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    made = {layer: list(counts) for layer, counts in one.items()}
    for layer, counts in other.items():
        known = made.setdefault(layer, [])
        known += [0] * (len(counts) - len(known))
        for expert, count in enumerate(counts):
            known[expert] += count
    return made


def _summed(one: BalanceStats, other: BalanceStats) -> BalanceStats:
    cache_len = one.cache_len + other.cache_len
    used = one.cache_usage * one.cache_len + other.cache_usage * other.cache_len
    return BalanceStats(
        num_running=one.num_running + other.num_running,
        num_waiting=one.num_waiting + other.num_waiting,
        num_suspended=one.num_suspended + other.num_suspended,
        cache_usage=used / cache_len if cache_len else 0.0,
        cache_len=cache_len,
        scheduler=_added(one.scheduler, other.scheduler),
        engine=_added(one.engine, other.engine),
        num_engine_restarts=one.num_engine_restarts + other.num_engine_restarts,
        experts=_experts(one.experts, other.experts),
        expert_bytes=max(one.expert_bytes, other.expert_bytes),
    )


_NOTHING = BalanceStats(num_running=0, num_waiting=0)


def _past(stats: BalanceStats) -> BalanceStats:
    """What it has done, without what it had to do at the moment."""
    scheduler: SchedulerStats | None = stats.scheduler
    if scheduler is not None:
        tiers: TierStats | None = scheduler.tiers
        if tiers is not None:
            tiers = msgspec.structs.replace(tiers, **dict.fromkeys(_TIERS_NOW, 0))
        scheduler = msgspec.structs.replace(scheduler, **dict.fromkeys(_NOW, 0), tiers=tiers)
    done = replace(stats, num_running=0, num_waiting=0, num_suspended=0, cache_usage=0.0, cache_len=0)
    return replace(done, scheduler=scheduler)


class ClusterFigures:
    """The figures that replicas have reported. num_taken_over: counted by the backend."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._gone = _NOTHING
        self.num_taken_over = 0

    @property
    def reports(self) -> list[ReplicaReport]:
        """The last report of each replica that has spoken lately, by name."""
        return [report for _, (_, report) in sorted(self._reports.items())]

    def update(self, reports: Iterable[ReplicaReport], now: float) -> None:
        """Take in the reports of replicas. now: seconds, on any clock."""
        for report in reports:
            self._reports[report.replica] = now, report
        for name, (at, report) in list(self._reports.items()):
            if now - at > SILENT_SECONDS:
                self._gone = _summed(self._gone, _past(report.stats))
                del self._reports[name]

    def stats(self) -> ClusterStats:
        """Add up the figures of all replicas, those that are gone included."""
        total = self._gone
        for report in self.reports:
            total = _summed(total, report.stats)
        return ClusterStats(
            num_running=total.num_running,
            num_waiting=total.num_waiting,
            num_suspended=total.num_suspended,
            cache_usage=total.cache_usage,
            cache_len=total.cache_len,
            scheduler=total.scheduler,
            engine=total.engine,
            num_engine_restarts=total.num_engine_restarts,
            experts=total.experts,
            expert_bytes=total.expert_bytes,
            replicas=[ReplicaFigures(one.replica, one.node, one.pid, one.pause, one.stats) for one in self.reports],
            num_taken_over=self.num_taken_over,
        )
