"""What kernels did and when, as records (docs/profiling.md). Knows pools and bytes, not steps' owners or files."""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.kernels.cpu.base import WorkerPool
from ktransformers.kernels.extension import extension

__all__ = ["PARTS", "RING_BYTES", "PoolProfile", "set_scope"]

PARTS: tuple[str, ...] = tuple(extension.profile_parts())
"""What a moment of a step is spent on, in the order of their numbers in records."""

RING_BYTES: int = extension.PROFILE_RING_BYTES

_NUMBERS = {part: number for number, part in enumerate(PARTS)}


class PoolProfile:
    """Records of what runs on a pool, from here until `stop`.

    ring_bytes: of memory for records that are not drained, which stays with the pool; a power of two. Raises ValueError
    for another number, and for a pool that has a ring of another size.
    """

    def __init__(self, pool: WorkerPool, ring_bytes: int = RING_BYTES) -> None:
        self._pool, self._native = pool, pool.handle.start_profile(ring_bytes)

    def stop(self) -> None:
        """Records that are there can still be drained."""
        self._pool.handle.stop_profile()

    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        """keep: rows whose experts are told in calls of so many rows that not all are."""
        self._native.begin_step(step_id, num_rows, keep)

    def end_step(self, step_id: int) -> None:
        """Ends the record of `begin_step`."""
        self._native.end_step(step_id)

    def drain(self) -> bytes:
        """Take the records that are complete. Other threads run meanwhile."""
        return self._native.drain()

    @property
    def num_dropped(self) -> int:
        """Records for which there was no room, since the pool has a ring."""
        return self._native.num_dropped


def set_scope(layer: int, part: str) -> tuple[int, str]:
    """What this thread's operations belong to from now on; returns what it was.

    layer: -1 for none. part: "other" leaves linear layers, norms and activations their own. Raises KeyError for a part
    that is none of PARTS.
    """
    old_layer, old_part = extension.set_profile_scope(layer, _NUMBERS[part])
    return old_layer, PARTS[old_part]
