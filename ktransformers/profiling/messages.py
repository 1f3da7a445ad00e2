"""The messages of recorders to the bridge: msgspec structs as msgpack, never pickle.

No numpy here: the scheduler has none.
All times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share (time.monotonic_ns). No message
holds text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ktransformers.profiling.stored_counts import NOTHING_STORED, StoredCounts

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "BridgeOptions",
    "DropsRecord",
    "Farewell",
    "GpuExpertCounts",
    "GpuRecord",
    "GpuTimes",
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


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A record of a step that an engine has run.

    sampled: (request, flattened row that its next token was sampled from).
    sampling_ns: all of sampling, which native records of sampling lie within; None: not looked at. stored, stored_rows:
    of experts in files and of rows of tables in files, see StepResult. has_failed: whether it came to nothing, because
    experts could not be read. tower_ns: of making hidden states of pictures, as far as the step waited for it.
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
    stored: StoredCounts = NOTHING_STORED
    stored_rows: StoredCounts = NOTHING_STORED
    has_failed: bool = False
    tower_ns: int = 0


class GpuTimes(msgspec.Struct, frozen=True):
    """The times of one GPU in a step.

    labels: (part, layer or -1) that begin at times, int64 ns of its clock; the last ends.
    Both are empty where the parts of the step were not timed.
    """

    device: int
    labels: Sequence[tuple[str, int]]
    times: bytes


class GpuExpertCounts(msgspec.Struct, frozen=True):
    """The tokens for which one GPU's experts were chosen in a step, by L layers of the model.

    layers: experts of a token, K, of each layer that has any there. ids: int32 [L, rows, K] by K, of the record's rows.
    counts: int64 [L, num_experts] of all rows; empty where the ids are of all rows.
    """

    num_experts: int
    layers: dict[int, int]
    ids: dict[int, bytes]
    counts: bytes


class GpuRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A record of the work of GPUs in a step, on the way from its launch to its results.

    rows: flattened, whose experts are recorded.
    """

    num_rows: int
    began_ns: int
    ended_ns: int
    devices: Sequence[GpuTimes]
    rows: Sequence[int]
    experts: Sequence[GpuExpertCounts]
    epoch: int = 0
    step_id: int = -1


class NativeRecords(msgspec.Struct, frozen=True, tag=True):
    """A batch of whole native records of an engine, in the order in which they were begun."""

    epoch: int
    data: bytes


class TokensRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A record of a step's tokens, by whoever decides which tokens count. Sent for every step, with tokens or without.

    tokens: (request, index in the answer, position, token id). arrived_ns: of the requests whose first token is here.
    waiting: requests in the queue; None: there is none. suspended_ns: of requests whose tokens are here, how long they
    were suspended since the token before, or since they came.
    """

    step_id: int
    time_ns: int
    tokens: Sequence[tuple[str, int, int, int]]
    arrived_ns: dict[str, int] = {}
    waiting: int | None = None
    suspended_ns: dict[str, int] = {}


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A record of a request that has ended, or that was there when the profile stopped (finish_reason None).

    A time that is None has not come, or came before the profile began. num_starts: stays in the batch, but for those
    after it was suspended. suspended: from when to when, see Pauses. num_drafted, num_accepted: draft tokens that were
    run for the answer, and those of them that are the answer's.
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
    suspended: Sequence[tuple[int, int | None]] = ()
    num_drafted: int = 0
    num_accepted: int = 0


class DropsRecord(msgspec.Struct, frozen=True, tag=True):
    """A record of losses so far: native records (the ring was full), and messages (the bridge was too slow).

    Sent now and then in any case, which says that the sender lives.
    """

    source: str
    records: int
    messages: int


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """The last message of a sender."""

    source: str


Message = StepRecord | NativeRecords | GpuRecord | TokensRecord | RequestRecord | DropsRecord | Farewell


class ProfileMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a profile that are known before the first step; meta.json has them by these names.

    docs/profiling.md says what they mean.
    """

    backend: str
    version: str
    command: Sequence[str] = ()
    model: dict[str, Any] = {}
    placement: dict[str, Any] = {}
    machine: dict[str, Any] = {}


class BridgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the bridge process is started with. max_bytes: of all files.

    file_bytes: of one before it is rotated.
    """

    folder: str
    meta: ProfileMeta
    log_level: str = "info"
    max_bytes: int = 8 << 30
    file_bytes: int = 256 << 20


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def encode_messages(messages: Sequence[Message]) -> bytes:
    """Encode a list of messages as msgpack."""
    return _encoder.encode(messages)


def decode_messages(data: bytes) -> list[Message]:
    """Decode a list of messages from msgpack. Raises msgspec.ValidationError or DecodeError for anything else."""
    return _decoder.decode(data)
