"""What the code below Python records of a step, on the CPU and on GPUs, for a Recorder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ktransformers.engine.gpu_profile import GpuProfile, GpuStep
from ktransformers.engine.profile_scopes import module_scopes
from ktransformers.engine.runner import ModelRunner
from ktransformers.operators.marks import Span
from ktransformers.profiling.recorder import Runtime
from ktransformers.profiling.records import EXPERTS, OP, PARTS, STEP_BEGIN, Kind
from ktransformers.profiling.runtime import CpuProfilingRuntime

__all__ = ["StepRuntime", "gpu_records"]

_NUMBERS = {part: number for number, part in enumerate(PARTS)}


class StepRuntime(Runtime):
    """Of a runner's steps. Records of GPUs are made when a step ends."""

    def __init__(self, runner: ModelRunner) -> None:
        self._cpu = CpuProfilingRuntime(runner.pool, module_scopes(runner.model))
        self._runner = runner
        self._gpus: GpuProfile | None = None
        self._step_id, self._keep = -1, list[int]()

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
        self._step_id = step_id
        if self._gpus is not None:
            self._gpus.latest = None
        self._cpu.begin_step(step_id, num_rows, keep)

    @override
    def end_step(self) -> bytes:
        self._cpu.end_step()
        latest = None if self._gpus is None else self._gpus.latest
        return b"" if latest is None else gpu_records(latest, self._step_id)

    @override
    def drain(self) -> bytes:
        return self._cpu.drain()


def gpu_records(step: GpuStep, step_id: int) -> bytes:
    """A step's native records of GPUs: its beginning, its operations, its experts. Device 1 + n is cuda:n."""
    begins = [spans[0].begin for spans in step.spans.values() if spans]
    begin = np.zeros(1, STEP_BEGIN)
    _head(begin, Kind.STEP_BEGIN)
    begin["time_ns"], begin["step_id"], begin["num_rows"] = min(begins, default=0), step_id, step.num_rows
    parts = [begin.tobytes()]
    parts += [_ops(name, spans, step.num_rows).tobytes() for name, spans in step.spans.items() if spans]
    if step.counts is not None:
        parts += _experts(step, step.counts)
    return b"".join(parts)


def _head(records: npt.NDArray[np.void], kind: Kind, layers: Sequence[int] | int = -1) -> None:
    records["nbytes"], records["kind"], records["layer"] = records.dtype.itemsize, kind, layers


def _ops(device: str, spans: Sequence[Span], num_rows: int) -> npt.NDArray[np.void]:
    ops = np.zeros(len(spans), OP)
    _head(ops, Kind.OP, [span.label.layer for span in spans])
    ops["device"], ops["rows"] = 1 + int(device.rpartition(":")[2]), num_rows
    ops["part"] = [_NUMBERS[span.label.part] for span in spans]
    ops["begin_ns"] = [span.begin for span in spans]
    ops["duration_ns"] = [span.duration for span in spans]
    return ops


def _experts(step: GpuStep, counts: npt.NDArray[np.int64]) -> list[bytes]:
    """Layers that kept ids by how many each row has; else those that have counts."""
    if not step.ids:
        layers = np.flatnonzero(counts.sum(axis=1)).tolist()
        return [_experts_of(layers, counts, np.zeros((len(layers), 0, 1), np.int32), step.num_rows)]
    ordered = sorted(step.ids, key=lambda layer: (step.ids[layer].shape[1], layer))
    by_width = groupby(ordered, lambda layer: step.ids[layer].shape[1])
    return [
        _experts_of(layers, counts, np.stack([step.ids[layer] for layer in layers]), step.num_rows)
        for layers in (list(group) for _, group in by_width)
    ]


def _experts_of(layers: list[int], counts: npt.NDArray[np.int64], ids: npt.NDArray[np.int32], num_rows: int) -> bytes:
    """ids: [layers, rows that are kept, K]."""
    _, num_ids, top_k = ids.shape
    width = -(-(EXPERTS.itemsize + 4 * counts.shape[1] + 4 * num_ids + 2 * num_ids * top_k) // 8) * 8
    fields = [
        *((name, EXPERTS.fields[name][0]) for name in EXPERTS.names or ()),  # type: ignore[index]
        ("counts", "<u4", (counts.shape[1],)),
        ("row_index", "<i4", (num_ids,)),
        ("ids", "<i2", (num_ids * top_k,)),
        ("padding", "u1", (width - EXPERTS.itemsize - 4 * counts.shape[1] - 4 * num_ids - 2 * num_ids * top_k,)),
    ]
    records = np.zeros(len(layers), np.dtype(fields))
    _head(records, Kind.EXPERTS, layers)
    records["num_rows"], records["top_k"], records["num_ids"] = num_rows, top_k, num_ids
    records["num_experts"] = counts.shape[1]
    records["counts"] = counts[layers]
    records["row_index"] = np.arange(num_ids)
    records["ids"] = ids.reshape(len(layers), -1)
    return records.tobytes()
