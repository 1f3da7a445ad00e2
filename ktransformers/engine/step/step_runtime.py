"""Records what the code below Python tells of a step, on the CPU and on GPUs, for a Recorder."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from ktransformers.engine.step.gpu_profile import GpuProfile
from ktransformers.engine.step.profile_scopes import module_scopes
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.profiling.messages import GpuRecord
from ktransformers.profiling.recorder import Runtime
from ktransformers.profiling.runtime import CpuProfilingRuntime

__all__ = ["StepRuntime"]


class StepRuntime(Runtime):
    """The Runtime of a runner's steps, on the CPU and on GPUs."""

    def __init__(self, runner: ModelRunner) -> None:
        self._cpu = CpuProfilingRuntime(runner.pool, module_scopes(runner.model))
        self._runner = runner
        self._gpus: GpuProfile | None = None

    @property
    @override
    def dropped(self) -> int:
        return self._cpu.dropped

    @override
    def start(self) -> None:
        self._cpu.start()
        self._gpus = self._runner.profile_gpus(True)

    @override
    def stop(self) -> None:
        self._cpu.stop()
        if self._gpus is not None:
            self._gpus = self._runner.profile_gpus(False)

    @override
    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        if self._gpus is not None:
            self._gpus.expect(num_rows, keep)
        self._cpu.begin_step(step_id, num_rows, keep)

    @override
    def end_step(self) -> GpuRecord | None:
        self._cpu.end_step()
        return None if self._gpus is None else self._gpus.latest

    @override
    def drain(self) -> bytes:
        return self._cpu.drain()
