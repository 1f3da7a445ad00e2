"""GPU records of a step converted to operations and routings like those of native records."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ktransformers.profiling.messages import GpuExpertCounts, GpuRecord, GpuTimes
from ktransformers.profiling.oplog import ExpertsCall, Ops
from ktransformers.profiling.records import OP, PARTS, Kind

__all__ = ["gpu_calls", "gpu_ops"]

_NUMBERS = {part: number for number, part in enumerate(PARTS)}


def gpu_ops(record: GpuRecord) -> Ops:
    """Return a step's operations on GPUs, device 1 + n for cuda:n, on this machine's clock.

    The last mark of all GPUs is taken for the step's end, and the GPUs' clocks for one, which they are to some
    microseconds. A step that was not timed is one operation.
    """
    times = [np.frombuffer(one.times, "<i8") for one in record.devices]
    last = max((int(one[-1]) for one in times if len(one)), default=0)
    made = [_ops_of(one, at, record, last) for one, at in zip(record.devices, times, strict=True) if len(at)]
    if not made and record.devices:
        ops = np.zeros(1, OP)
        ops["part"], ops["layer"], ops["device"] = _NUMBERS["gpu"], -1, 1 + record.devices[-1].device
        ops["begin_ns"], ops["duration_ns"] = record.began_ns, record.ended_ns - record.began_ns
        made.append(ops)
    ops = np.concatenate(made) if made else np.zeros(0, OP)
    ops["nbytes"], ops["kind"], ops["rows"] = OP.itemsize, Kind.OP, record.num_rows
    return ops


def _ops_of(one: GpuTimes, times: npt.NDArray[np.int64], record: GpuRecord, last: int) -> Ops:
    ops = np.zeros(len(times) - 1, OP)
    ops["device"] = 1 + one.device
    ops["part"] = [_NUMBERS.get(part, 0) for part, _ in one.labels[:-1]]
    ops["layer"] = [layer for _, layer in one.labels[:-1]]
    ops["begin_ns"] = np.maximum(times[:-1] + (record.ended_ns - last), 0)
    ops["duration_ns"] = np.maximum(times[1:] - times[:-1], 0)
    return ops


def gpu_calls(record: GpuRecord) -> Iterator[ExpertsCall]:
    """Yield the routing of each layer whose experts are on a GPU."""
    for one in record.experts:
        yield from _calls_of(one, record)


def _calls_of(one: GpuExpertCounts, record: GpuRecord) -> Iterator[ExpertsCall]:
    row_index = np.asarray(record.rows, np.int32)
    counted = np.frombuffer(one.counts, "<i8").reshape(-1, one.num_experts) if one.counts else None
    for layer, top_k in one.layers.items():
        if top_k in one.ids:
            shown = np.frombuffer(one.ids[top_k], "<i4").reshape(-1, len(row_index), top_k)[layer].astype(np.int16)
            rows = row_index
        else:
            shown, rows = np.zeros((0, top_k), np.int16), np.zeros(0, np.int32)
        if counted is not None:
            counts = counted[layer].astype(np.uint32)
        else:
            counts = np.bincount(shown.ravel(), minlength=one.num_experts)[: one.num_experts].astype(np.uint32)
        yield ExpertsCall(layer, counts, rows, shown)
