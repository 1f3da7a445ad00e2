"""Records what kernels did and when (docs/profiling.md). Knows pools and bytes, not steps' owners or files."""

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
    """Recorder of what runs on a pool, from its construction until `stop`.

    ring_bytes: of memory for records that are not drained, which stays with the pool; a power of two. Raises ValueError
    for another number, and for a pool that has a ring of another size.
    """

    def __init__(self, pool: WorkerPool, ring_bytes: int = RING_BYTES) -> None:
        self._pool, self._native = pool, pool.handle.start_profile(ring_bytes)

    def stop(self) -> None:
        """Stop recording; records that are there can still be drained."""
        self._pool.handle.stop_profile()

    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        """Begin the record of a step. keep: rows whose experts are recorded in calls of too many rows to record all."""
        self._native.begin_step(step_id, num_rows, keep)

    def end_step(self, step_id: int) -> None:
        """End the record of the step that `begin_step` began."""
        self._native.end_step(step_id)

    def drain(self) -> bytes:
        """Take the records that are complete. Other threads run meanwhile."""
        return self._native.drain()

    @property
    def num_dropped(self) -> int:
        """Number of records for which there was no room, since the pool has a ring."""
        return self._native.num_dropped


def set_scope(layer: int, part: str) -> tuple[int, str]:
    """Set the layer and part to which this thread's operations belong from now on; returns the previous ones.

    layer: -1 for none. part: "other" leaves linear layers, norms and activations their own. Raises KeyError for a part
    that is none of PARTS.
    """
    old_layer, old_part = extension.set_profile_scope(layer, _NUMBERS[part])
    return old_layer, PARTS[old_part]
