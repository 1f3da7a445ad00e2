"""Native records as the extension writes them, and a runtime that records what it is told: no extension is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from ktransformers.profiling.records import EXPERTS, OP, PARTS, STEP_BEGIN, STEP_END, Kind


def _bytes(dtype: np.dtype, kind: Kind, layer: int = -1, extra: int = 0, **fields: int) -> bytes:
    record = np.zeros(1, dtype)
    record["nbytes"], record["kind"], record["layer"] = dtype.itemsize + extra, kind, layer
    for name, value in fields.items():
        record[name] = value
    return record.tobytes()


def step_begin(time_ns: int, step_id: int, num_rows: int = 1, num_keep: int = 1) -> bytes:
    return _bytes(STEP_BEGIN, Kind.STEP_BEGIN, time_ns=time_ns, step_id=step_id, num_rows=num_rows, num_keep=num_keep)


def step_end(time_ns: int, step_id: int) -> bytes:
    return _bytes(STEP_END, Kind.STEP_END, time_ns=time_ns, step_id=step_id)


def op(part: str, begin_ns: int, duration_ns: int, layer: int = -1, **fields: int) -> bytes:
    return _bytes(OP, Kind.OP, layer, part=PARTS.index(part), begin_ns=begin_ns, duration_ns=duration_ns, **fields)


def experts(layer: int, rows: dict[int, Sequence[int]], num_experts: int, counts: Sequence[int] | None = None) -> bytes:
    """rows: the experts of each flattened row that is told. counts: of all rows; those of these by default."""
    ids = np.array(list(rows.values()), "<i2").reshape(len(rows), -1)
    used = ids[ids >= 0]
    all_counts = np.bincount(used, minlength=num_experts) if counts is None else np.asarray(counts)
    tail = all_counts.astype("<u4").tobytes() + np.array(list(rows), "<i4").tobytes() + ids.tobytes()
    tail += bytes(-len(tail) % 8)
    return (
        _bytes(
            EXPERTS,
            Kind.EXPERTS,
            layer,
            len(tail),
            num_rows=int(all_counts.sum()) // max(ids.shape[1], 1),
            top_k=ids.shape[1],
            num_experts=num_experts,
            num_ids=len(rows),
        )
        + tail
    )


class FakeRuntime:
    """Two layers of four experts. Row r of step s had expert (s + r + layer) % 4; attention took a quarter, at most
    500 ns: callers say when a step ended before they come here, and may have waited for a processor in between."""

    NUM_LAYERS, NUM_EXPERTS = 2, 4

    def __init__(self) -> None:
        self._data, self._lock = bytearray(), threading.Lock()
        self._step: tuple[int, int, int, list[int]] | None = None
        self.is_on, self.dropped = False, 0

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        now = time.monotonic_ns()
        self._step = (step_id, num_rows, now, list(keep))
        self._put(step_begin(now, step_id, num_rows, len(keep)))

    def end_step(self) -> None:
        assert self._step is not None
        step_id, num_rows, began, keep = self._step
        now = time.monotonic_ns()
        quarter = min((now - began) // 4, 1000)
        data = b""
        for layer in range(self.NUM_LAYERS):
            at = began + layer * quarter
            data += op("attention", at, quarter // 2, layer, bytes=1000, busy_ns=quarter // 2, num_threads=1)
            rows = {row: [self.expert(step_id, row, layer)] for row in keep}
            counts = np.bincount(
                [self.expert(step_id, row, layer) for row in range(num_rows)], minlength=self.NUM_EXPERTS
            )
            if rows:
                data += experts(layer, rows, self.NUM_EXPERTS, counts)
        self._put(data + step_end(now, step_id))

    @classmethod
    def expert(cls, step_id: int, row: int, layer: int) -> int:
        return (step_id + row + layer) % cls.NUM_EXPERTS

    def _put(self, data: bytes) -> None:
        with self._lock:
            self._data += data

    def drain(self) -> bytes:
        with self._lock:
            data, self._data = bytes(self._data), bytearray()
        return data
