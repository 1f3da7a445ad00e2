"""Figures of balance_serve, apart from what starts its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ktransformers.scheduler.commands import EngineTotals
from ktransformers.scheduler.records import SchedulerStats
from ktransformers.server.backend.base import BackendStats

__all__ = ["BalanceStats", "ClusterStats", "ReplicaFigures"]


@dataclass(frozen=True, slots=True)
class BalanceStats(BackendStats):
    """Figures that metrics show of balance_serve besides those of every backend. Counts are from the start; scheduler
    None: it has not spoken yet.

    experts: how many rows each expert had, by layer, in the calls that were looked at. expert_bytes: see EngineFacts.
    """

    scheduler: SchedulerStats | None = None
    engine: EngineTotals = field(default_factory=EngineTotals)
    num_engine_restarts: int = 0
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    expert_bytes: float = 0.0

    @property
    def tiers(self) -> dict[str, int] | None:
        """Figures that /v1/status shows of the tiers below the cache, by the names of TierStats; None without any."""
        tiers = None if self.scheduler is None else self.scheduler.tiers
        return None if tiers is None else msgspec.structs.asdict(tiers)


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Figures of one of several replicas. node: where it is, as its manager names places. pid: of its process there.

    pause: see BackendInterfaceBase.
    """

    name: str
    node: str
    pid: int
    pause: str | None
    stats: BalanceStats


@dataclass(frozen=True, slots=True)
class ClusterStats(BalanceStats):
    """Figures of all replicas together. num_taken_over: how often an answer went on at another replica."""

    replicas: Sequence[ReplicaFigures] = ()
    num_taken_over: int = 0
