"""The figures of balance_serve, apart from what starts its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ktransformers.scheduler.records import SchedulerStats
from ktransformers.server.backend.base import BackendStats
from ktransformers.server.balance.messages import EngineTotals

__all__ = ["BalanceStats"]


@dataclass(frozen=True, slots=True)
class BalanceStats(BackendStats):
    """What metrics show besides. Counts are from the start; scheduler None: it has not spoken yet."""

    scheduler: SchedulerStats | None = None
    engine: EngineTotals = field(default_factory=EngineTotals)
    num_engine_restarts: int = 0
