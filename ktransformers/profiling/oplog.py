"""Native records on their way to their steps: kept as they come, taken when a step's record says when it ran."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ktransformers.profiling.records import EXPERTS, HEADER, OP, STEP_BEGIN, Kind

__all__ = ["ExpertsCall", "OpLog", "StepOps", "critical_ns", "split_records"]

Ops = npt.NDArray[Any]
"""Of dtype OP."""

_HEADER = struct.Struct("<IHh")


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """The routing of one layer in a step.

    counts u32 [E] of all its rows; ids i16 [N, K] of the flattened rows row_index i32 [N].
    """

    layer: int
    counts: npt.NDArray[np.uint32]
    row_index: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class StepOps:
    """The operations and routings that were recorded inside of a step."""

    ops: Ops
    calls: Sequence[ExpertsCall] = ()


def split_records(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield (kind, layer, offset, nbytes) of each native record. Raises ValueError at one that cannot be."""
    at, end = 0, len(data)
    while at < end:
        if end - at < _HEADER.size:
            raise ValueError(f"{end - at} bytes are left over")
        nbytes, kind, layer = _HEADER.unpack_from(data, at)
        if nbytes < _HEADER.size or nbytes % 8 or nbytes > end - at:
            raise ValueError(f"a record of {nbytes} bytes with {end - at} left")
        yield kind, layer, at, nbytes
        at += nbytes


def _experts(data: bytes, at: int, nbytes: int) -> ExpertsCall:
    """Raises ValueError when the record's numbers go beyond its end."""
    head = np.frombuffer(data, EXPERTS, 1, at)[0]
    top_k, num_experts, num_ids = (int(head[name]) for name in ("top_k", "num_experts", "num_ids"))
    if min(top_k, num_experts, num_ids, int(head["layer"])) < 0:
        raise ValueError("negative numbers")
    sizes = (4 * num_experts, 4 * num_ids, 2 * num_ids * top_k)
    if EXPERTS.itemsize + sum(sizes) > nbytes:
        raise ValueError(f"{num_ids} rows of {top_k} experts in {nbytes} bytes")
    first = at + EXPERTS.itemsize
    counts = np.frombuffer(data, "<u4", num_experts, first)
    row_index = np.frombuffer(data, "<i4", num_ids, first + sizes[0])
    ids = np.frombuffer(data, "<i2", num_ids * top_k, first + sizes[0] + sizes[1])
    return ExpertsCall(int(head["layer"]), counts, row_index, ids.reshape(num_ids, top_k))


@dataclass(slots=True)
class OpLog:
    """The native records of one engine, until their steps take them.

    Ops are joined with steps by time; routing, which has no time, by the step that it lies in.
    num_lost: records that could not be read, or had no room. num_outside: ops that ran in no step.
    """

    max_ops: int = 1 << 18
    max_calls: int = 1 << 15
    num_lost: int = 0
    num_outside: int = 0
    _ops: Ops = field(default_factory=lambda: np.empty(0, OP))
    _calls: dict[int, list[ExpertsCall]] = field(default_factory=dict)
    _num_calls: int = 0
    _step_id: int = -1  # that native code is in

    def add(self, ops: Ops, calls: Iterable[ExpertsCall], step_id: int) -> None:
        """Add operations and routings of a step that do not come from native code."""
        self._add_ops(ops)
        for call in calls:
            self._add_call(call, step_id)

    def feed(self, data: bytes) -> None:
        """Take in whole native records, in their order. What follows one that cannot be is lost."""
        offsets: list[int] = []
        try:
            for kind, _, at, nbytes in split_records(data):
                if kind == Kind.OP and nbytes == OP.itemsize:
                    offsets.append(at)
                elif kind == Kind.EXPERTS and nbytes >= EXPERTS.itemsize:
                    self._add_call(_experts(data, at, nbytes), self._step_id)
                elif kind == Kind.STEP_BEGIN and nbytes == STEP_BEGIN.itemsize:
                    self._step_id = int(np.frombuffer(data, STEP_BEGIN, 1, at)[0]["step_id"])
                elif kind != Kind.STEP_END:
                    self.num_lost += 1
        except ValueError:
            self.num_lost += 1
        if offsets:
            self._add_ops(_gathered(data, offsets))

    def _add_ops(self, ops: Ops) -> None:
        room = max(self.max_ops - len(self._ops), 0)
        self.num_lost += max(len(ops) - room, 0)
        self._ops = np.concatenate((self._ops, ops[:room]))

    def _add_call(self, call: ExpertsCall, step_id: int) -> None:
        if self._num_calls >= self.max_calls:
            self.num_lost += 1
            return
        self._calls.setdefault(step_id, []).append(call)
        self._num_calls += 1

    def take(self, step_id: int, began_ns: int, ended_ns: int) -> StepOps:
        """Take out the operations and routings of a step.

        Steps are taken in their order: what is older belongs to none.
        """
        begins = self._ops["begin_ns"]
        is_later = begins >= ended_ns
        is_inside = (begins >= began_ns) & ~is_later
        ops = self._ops[is_inside]
        self.num_outside += len(self._ops) - int(is_later.sum()) - len(ops)
        self._ops = self._ops[is_later]
        calls: list[ExpertsCall] = []
        for known in [known for known in self._calls if known <= step_id]:
            found = self._calls.pop(known)
            self._num_calls -= len(found)
            if known == step_id:
                calls = found
        return StepOps(ops, calls)


def _gathered(data: bytes, offsets: Sequence[int]) -> Ops:
    words = OP.itemsize // 8
    index = np.asarray(offsets)[:, None] // 8 + np.arange(words)
    return np.frombuffer(data, "<u8", len(data) // 8)[index].reshape(-1).view(OP)


def critical_ns(ops: Ops) -> npt.NDArray[np.int64]:
    """Return how long a step had to wait for each op, int64 ns [len(ops)]: all of it, except what a GPU's work hides.

    With work on GPUs, a step takes as long as they do (waiting for the CPU is part of it), and what the CPU does
    meanwhile costs nothing.
    """
    durations = ops["duration_ns"].astype(np.int64)
    is_gpu = ops["device"] > 0
    if not is_gpu.any():
        return durations
    begins, ends = _union(ops["begin_ns"][is_gpu].astype(np.int64), durations[is_gpu])
    before = np.concatenate(([0], np.cumsum(ends - begins)[:-1]))

    def covered_until(times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        at = np.searchsorted(begins, times, "right") - 1
        known = np.maximum(at, 0)
        inside = before[known] + np.minimum(times, ends[known]) - begins[known]
        return np.where(at < 0, 0, inside)

    first = ops["begin_ns"].astype(np.int64)
    hidden = covered_until(first + durations) - covered_until(first)
    return np.where(is_gpu, durations, durations - hidden)


def _union(begins: npt.NDArray[np.int64], durations: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Disjoint intervals in order that cover the same."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate((begins + durations)[order])
    is_first = np.concatenate(([True], begins[1:] > ends[:-1]))
    is_last = np.concatenate((is_first[1:], [True]))
    return begins[is_first], ends[is_last]


assert OP.itemsize % 8 == 0
assert HEADER.itemsize == _HEADER.size
