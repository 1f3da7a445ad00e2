"""What the scheduler counts, and its figures of a moment."""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.scheduler.page_tables import PageTables
from ktransformers.scheduler.records import SchedulerStats

__all__ = ["SchedulerTotals", "stats_of"]


@dataclass(slots=True)
class SchedulerTotals:
    """What SchedulerStats counts from the start."""

    num_preemptions: int = 0
    num_expired: int = 0
    num_engine_losses: int = 0
    prefix_query_len: int = 0
    prefix_hit_len: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def stats_of(
    totals: SchedulerTotals, pages: PageTables, num_running: int, num_waiting: int, num_suspended: int
) -> SchedulerStats:
    """Return the figures of a scheduler with so many requests."""
    num_available = pages.num_available
    return SchedulerStats(
        num_running=num_running,
        num_waiting=num_waiting,
        num_suspended=num_suspended,
        num_pages=pages.num_pages,
        num_used_pages=pages.num_pages - num_available,
        num_idle_pages=pages.num_idle,
        num_preemptions=totals.num_preemptions,
        num_expired=totals.num_expired,
        num_engine_losses=totals.num_engine_losses,
        prefix_query_len=totals.prefix_query_len,
        prefix_hit_len=totals.prefix_hit_len,
        num_drafted=totals.num_drafted,
        num_accepted=totals.num_accepted,
        tiers=None if pages.kv_offload is None else pages.kv_offload.stats(),
    )
