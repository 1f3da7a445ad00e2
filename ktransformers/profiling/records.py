"""What is recorded: the native records of the ring as numpy dtypes, messages to the bridge as msgspec structs.

All times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share (time.monotonic_ns). No record
holds text.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

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
    "BridgeOptions",
    "DropsRecord",
    "Farewell",
    "Kind",
    "Message",
    "NativeRecords",
    "ProfileMeta",
    "RequestRecord",
    "StepRecord",
    "TokensRecord",
    "decode_messages",
    "encode_messages",
]

SCHEMA, SCHEMA_VERSION = "ktransformers-profile", 1

PARTS = (
    "other", "norm", "linear", "attention", "router", "experts", "shared_experts", "mlp", "embedding", "lm_head",
    "sampling", "wait_cpu", "copy", "host",
)  # fmt: skip
"""What an OP's part means, by number. wait_cpu: the GPU waits for the CPU's experts. copy: weights on their way to a
GPU. host: what is left of a step's wall time; no OP has it."""

HOST = PARTS[-1]


class Kind(enum.IntEnum):
    """Of a native record."""

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


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step that an engine has run. sampled: (request, flattened row that its next token was sampled from).

    sampling_ns: all of sampling, which native records of sampling lie within; None: not looked at.
    """

    epoch: int
    step_id: int
    began_ns: int
    ended_ns: int
    num_rows: int
    prefill_rows: int
    num_seqs: int
    sampled: Sequence[tuple[str, int]]
    sampling_ns: int | None = None


class NativeRecords(msgspec.Struct, frozen=True, tag=True):
    """Whole native records of an engine, in the order of their stream: 0 is the ring, 1 what `add_ops` is given."""

    epoch: int
    data: bytes
    stream: int = 0


class TokensRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a step led to, by whoever decides which tokens count. Sent for every step, with tokens or without.

    tokens: (request, index in the answer, position, token id). arrived_ns: of the requests whose first token is here.
    waiting: requests in the queue; None: there is none.
    """

    step_id: int
    time_ns: int
    tokens: Sequence[tuple[str, int, int, int]]
    arrived_ns: dict[str, int] = {}
    waiting: int | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request that has ended, or that was there when the profile stopped (finish_reason None).

    A time that is None has not come, or came before the profile began. num_starts: stays in the batch.
    """

    request: str
    prompt_len: int
    cached_len: int
    completion_len: int
    arrived_ns: int | None = None
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    ended_ns: int | None = None
    finish_reason: str | None = None
    num_starts: int = 0


class DropsRecord(msgspec.Struct, frozen=True, tag=True):
    """What its sender has lost so far: native records (the ring was full), and messages (the bridge was too slow).

    Sent now and then in any case, which says that the sender lives.
    """

    source: str
    records: int
    messages: int


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """The last message of a sender."""

    source: str


Message = StepRecord | NativeRecords | TokensRecord | RequestRecord | DropsRecord | Farewell


class ProfileMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first step; meta.json has it by these names. docs/profiling.md says what they mean."""

    backend: str
    version: str
    command: Sequence[str] = ()
    model: dict[str, Any] = {}
    placement: dict[str, Any] = {}
    machine: dict[str, Any] = {}


class BridgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the bridge process is started with. max_bytes: of all files. file_bytes: of one before it is rotated."""

    folder: str
    meta: ProfileMeta
    log_level: str = "info"
    max_bytes: int = 8 << 30
    file_bytes: int = 256 << 20


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def encode_messages(messages: Sequence[Message]) -> bytes:
    """msgpack of a list of them."""
    return _encoder.encode(messages)


def decode_messages(data: bytes) -> list[Message]:
    """Raises msgspec.ValidationError or DecodeError for anything else."""
    return _decoder.decode(data)
