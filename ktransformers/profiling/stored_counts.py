"""Counts of what is read from files while a model runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NOTHING_STORED", "StoredCounts", "sum_stored"]

StoredCounts = tuple[int, int, int, float, int]
"""Counts of what stays in files while a model runs, experts or rows of tables: uses of what was in RAM, uses of what
was not, bytes read, seconds waited for them, reads that failed."""

NOTHING_STORED: StoredCounts = (0, 0, 0, 0.0, 0)


def sum_stored(counts: Sequence[StoredCounts], before: StoredCounts = NOTHING_STORED) -> StoredCounts:
    """Add counts up, less those of before."""
    return (
        sum(one[0] for one in counts) - before[0],
        sum(one[1] for one in counts) - before[1],
        sum(one[2] for one in counts) - before[2],
        sum(one[3] for one in counts) - before[3],
        sum(one[4] for one in counts) - before[4],
    )
