"""Reads the native records of a profile by the layout that csrc/runtime/profile.h states: no code of the package."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

PARTS = (
    "other", "norm", "linear", "attention", "recurrent", "router", "experts", "shared_experts", "mlp", "embedding",
    "lm_head", "sampling", "wait_cpu", "copy", "wait_disk", "gpu", "host",
)  # fmt: skip


@dataclass
class StepBegin:
    time_ns: int
    step: int
    rows: int
    num_keep: int


@dataclass
class StepEnd:
    time_ns: int
    step: int


@dataclass
class Op:
    layer: int
    part: str
    op: int
    device: int
    rows: int
    begin_ns: int
    duration_ns: int
    bytes: int
    busy_ns: int
    wait_ns: int
    num_jobs: int
    num_threads: int


@dataclass
class Experts:
    layer: int
    rows: int
    counts: list[int]
    ids: dict[int, list[int]] = field(default_factory=dict)  # by row


Record = StepBegin | StepEnd | Op | Experts


def records_in(data: bytes) -> list[Record]:
    found: list[Record] = []
    at = 0
    while at < len(data):
        nbytes, kind, layer = struct.unpack_from("<IHh", data, at)
        assert nbytes % 8 == 0
        assert nbytes >= 24
        found.append(_record(data[at + 8 : at + nbytes], kind, layer))
        at += nbytes
    assert at == len(data)
    return found


def _record(body: bytes, kind: int, layer: int) -> Record:
    if kind == 1:
        return StepBegin(*struct.unpack("<Qqii", body))
    if kind == 2:
        return StepEnd(*struct.unpack("<Qq", body))
    if kind == 3:
        part, *rest = struct.unpack("<BBHiQQQQQII", body)
        return Op(layer, PARTS[part], *rest)
    assert kind == 4
    rows, top_k, experts, num_ids = struct.unpack_from("<iiii", body)
    counts = list(struct.unpack_from(f"<{experts}I", body, 16))
    index = struct.unpack_from(f"<{num_ids}i", body, 16 + 4 * experts)
    start = 16 + 4 * experts + 4 * num_ids
    ids = {row: list(struct.unpack_from(f"<{top_k}h", body, start + 2 * i * top_k)) for i, row in enumerate(index)}
    assert len(body) + 8 == (8 + start + 2 * num_ids * top_k + 7) // 8 * 8
    return Experts(layer, rows, counts, ids)
