"""The native records of the ring as numpy dtypes, and the parts of a step. csrc/runtime/profile.cpp writes them.

All times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share (time.monotonic_ns).
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from ktransformers.profiling.messages import SCHEMA, SCHEMA_VERSION

__all__ = [
    "EXPERTS",
    "HEADER",
    "HOST",
    "OP",
    "PARTS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "STEP_BEGIN",
    "STEP_END",
    "TOWER",
    "Kind",
]

PARTS = (
    "other", "norm", "linear", "attention", "recurrent", "router", "experts", "shared_experts", "mlp", "embedding",
    "lm_head", "sampling", "wait_cpu", "copy", "wait_disk", "gpu", "host", "tower",
)  # fmt: skip
"""What an OP's part means, by number. recurrent: convolutions, scans and gated norms of recurrent layers. wait_cpu: the
GPU waits for the CPU's experts. copy: weights on their way to a GPU. wait_disk: the CPU waits for experts that are
read from files. gpu: all that a GPU does in a step whose parts were not timed there. host: what is left of a step's
wall time. tower: hidden states of pictures are made, which native code does not know. No OP has host or tower."""

HOST, TOWER = "host", "tower"


class Kind(enum.IntEnum):
    """The kind of a native record."""

    STEP_BEGIN = 1
    STEP_END = 2
    OP = 3
    EXPERTS = 4


def _record(*fields: tuple[str, str]) -> np.dtype[Any]:
    return np.dtype([("nbytes", "<u4"), ("kind", "<u2"), ("layer", "<i2"), *fields])


HEADER = _record()
"""nbytes: of the whole record, a multiple of 8. layer: -1 for none."""

STEP_BEGIN = _record(("time_ns", "<u8"), ("step_id", "<i8"), ("num_rows", "<i4"), ("num_keep", "<i4"))
STEP_END = _record(("time_ns", "<u8"), ("step_id", "<i8"))

OP = _record(
    ("part", "u1"),
    ("op", "u1"),
    ("device", "<u2"),
    ("rows", "<i4"),
    ("begin_ns", "<u8"),
    ("duration_ns", "<u8"),
    ("bytes", "<u8"),
    ("busy_ns", "<u8"),
    ("wait_ns", "<u8"),
    ("num_jobs", "<u4"),
    ("num_threads", "<u4"),
)
"""One piece of work. device: 0 is the CPU, 1 + n is GPU n. bytes: read, of weights and cache. busy_ns: in tasks, all
threads together. wait_ns: of hand-overs. Those of one device never overlap."""

EXPERTS = _record(("num_rows", "<i4"), ("top_k", "<i4"), ("num_experts", "<i4"), ("num_ids", "<i4"))
"""Followed by u32 rows of each expert [num_experts], i32 row_index [num_ids], i16 ids [num_ids, top_k] padded to 8
bytes (-1: skipped)."""
