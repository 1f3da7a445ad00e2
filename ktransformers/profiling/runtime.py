"""Switches the records of native kernels on and off, and names the layer and part of a model that they belong to.

Native layers know their number. Modules that run kernels one by one do not: hooks say it for them while records are
written. A step while they are not costs one attribute test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.profile import RING_BYTES, PoolProfile, set_scope
from ktransformers.profiling.messages import GpuRecord

__all__ = ["CpuProfilingRuntime", "ModuleScope"]


@dataclass(frozen=True, slots=True)
class ModuleScope:
    """The layer and part that a module's kernels belong to. layer: -1 leaves the one around it.

    part: of kernels.cpu.profile.PARTS.
    """

    module: nn.Module
    layer: int = -1
    part: str = "other"


class CpuProfilingRuntime:
    """Records of the native kernels of one pool.

    All but `drain` and `dropped` are called by the thread that runs steps, or while none runs.
    scopes: modules that run kernels one by one. ring_bytes: see PoolProfile.
    """

    def __init__(self, pool: WorkerPool, scopes: Sequence[ModuleScope] = (), ring_bytes: int = RING_BYTES) -> None:
        self.is_on = False
        self._pool, self._scopes, self._ring_bytes = pool, scopes, ring_bytes
        self._profile: PoolProfile | None = None
        self._handles: list[RemovableHandle] = []
        self._step_id = self._layer = -1
        self._dropped_before = 0

    def start(self) -> None:
        """Start writing records by kernels. Raises as PoolProfile. Starting twice does nothing."""
        if self.is_on:
            return
        self._profile = PoolProfile(self._pool, self._ring_bytes)
        self._profile.drain()  # of a profile that nobody read to its end
        self._dropped_before = self._profile.num_dropped
        for scope in self._scopes:
            self._handles += self._hooked(scope)
        self.is_on = True

    def stop(self) -> None:
        """Stop writing records; those that are there can still be drained. Stopping twice does nothing."""
        if not self.is_on or self._profile is None:
            return
        self.is_on = False
        self._profile.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        """Begin a step. keep: rows whose experts are wanted in any case; steps of up to 256 rows record all."""
        if self.is_on and self._profile is not None:
            self._step_id = step_id
            self._set(-1, "other")  # whatever a step that failed has left
            self._profile.begin_step(step_id, num_rows, keep)

    def end_step(self) -> GpuRecord | None:
        """End the step that was begun last. Returns None: StepRuntime knows GPUs."""
        if self.is_on and self._profile is not None:
            self._profile.end_step(self._step_id)
        return None

    def drain(self) -> bytes:
        """Take the records that are complete, whole ones, in the order in which they were begun. On any thread."""
        return b"" if self._profile is None else self._profile.drain()

    @property
    def dropped(self) -> int:
        """The number of records that were lost since the start because the ring was full."""
        return 0 if self._profile is None else self._profile.num_dropped - self._dropped_before

    def _set(self, layer: int, part: str) -> tuple[int, str]:
        self._layer = layer
        return set_scope(layer, part)

    def _hooked(self, scope: ModuleScope) -> list[RemovableHandle]:
        """Called also when the module raises."""
        before, after = self._hooks(scope)
        return [
            scope.module.register_forward_pre_hook(before),
            scope.module.register_forward_hook(after, always_call=True),
        ]

    def _hooks(self, scope: ModuleScope) -> tuple[Callable[..., None], Callable[..., None]]:
        around: list[tuple[int, str]] = []

        def before(*_: Any) -> None:
            layer = self._layer if scope.layer < 0 else scope.layer
            around.append(self._set(layer, scope.part))

        def after(*_: Any) -> None:
            if around:  # none where records were turned on within the module's forward
                self._set(*around.pop())

        return before, after
