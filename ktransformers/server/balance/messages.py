"""Messages between the processes: msgspec structs as msgpack, never pickle. Who sends what: see __init__."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ktransformers.config import EngineConfig
from ktransformers.core import SNAPSHOT_ALIGN, FinishReason
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.scheduler.config import TierConfig
from ktransformers.scheduler.records import Request, RequestUpdate, SchedulerStats, StepPlan
from ktransformers.weights.digests.states import FileState

__all__ = [
    "Add",
    "Anew",
    "ChunkTrace",
    "Command",
    "EngineDown",
    "EngineFacts",
    "EngineFailed",
    "EngineLoading",
    "EngineLoss",
    "EngineOptions",
    "EngineReady",
    "EngineStatus",
    "EngineTotals",
    "EngineUp",
    "EngineWork",
    "Finish",
    "News",
    "ProfileOff",
    "ProfileOn",
    "Resume",
    "SchedulerOptions",
    "Suspend",
    "Traces",
    "decode",
    "encode",
]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options with which an engine process is started. Addresses are ZMQ endpoints.

    factory: "module:function" that builds the engine from these options. spare_bytes: host memory that the spare
    process will take beside it.
    """

    epoch: int
    parent_pid: int
    steps: str
    results: str
    status: str
    log_level: str
    config: EngineConfig
    page_size: int
    max_batch_size: int
    factory: str
    spare_bytes: int = 0


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options with which the scheduler process is started. Those before parent_pid are SchedulerConfig's."""

    num_pages: int
    page_size: int
    chunk_size: int
    max_batch_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int | None
    has_prefix_cache: bool
    num_states: int = 0
    snapshot_interval: int = 0
    num_stages: int = 1
    snapshot_align: int = SNAPSHOT_ALIGN
    tiers: TierConfig | None = None
    max_itl_ratio: float = 0.0
    max_gap_ms: float = 0.0
    parent_pid: int
    commands: str
    news: str
    log_level: str
    step_seconds: float = 0.0  # see StepWatch; 0: an engine that hangs is not noticed
    checks_integrity: bool = False  # after every step; for tests
    has_traces: bool = False  # News.traces is wanted


class Add(msgspec.Struct, frozen=True, tag=True):
    """Message with a new request. Its deadline is on the monotonic clock, which all processes of a machine share.

    twins: (request_id, seed) of others that differ in nothing else: their prompt and their fields are sent once.
    """

    request: Request
    twins: Sequence[tuple[str, int]] = ()

    def requests(self) -> Iterator[Request]:
        """Yield all requests of the message. They share their prompt and what is in their params."""
        yield self.request
        for request_id, seed in self.twins:
            params = replace(self.request.params, seed=seed)
            yield msgspec.structs.replace(self.request, request_id=request_id, params=params)


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Message of the API process that ends a request: its text held a stop string, or its client left.

    completion_len: tokens of the answer up to the stop string; the scheduler may know more by now.
    """

    request_id: str
    reason: FinishReason
    completion_len: int | None = None


class Suspend(msgspec.Struct, frozen=True, tag=True):
    """Message that suspends a request: it gives its pages back and waits for Resume. Its deadline goes on."""

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Message that resumes a suspended request. Those that are not, or have ended, are left alone."""

    request_id: str


class EngineUp(msgspec.Struct, frozen=True, tag=True):
    """Message that an engine of this epoch has loaded. The scheduler binds both endpoints, the engine connects."""

    epoch: int
    steps: str
    results: str


class EngineDown(msgspec.Struct, frozen=True, tag=True):
    """Message that the engine of this epoch is gone, and its cache with it."""

    epoch: int


class ProfileOn(msgspec.Struct, frozen=True, tag=True):
    """Message by which scheduler and engine record for the bridge that listens at this endpoint. The engines to come do
    so, too.
    """

    endpoint: str


class ProfileOff(msgspec.Struct, frozen=True, tag=True):
    """Message by which scheduler and engine stop recording."""


class Anew(msgspec.Struct, frozen=True, tag=True):
    """Message that the scheduler knows that steps were lost (StepResult.recovering): it plans later ones anew."""


Command = Add | Finish | Suspend | Resume | EngineUp | EngineDown | ProfileOn | ProfileOff

EngineWork = StepPlan | Anew | ProfileOn | ProfileOff
"""What the scheduler sends an engine, which does it in this order."""


class EngineTotals(msgspec.Struct, frozen=True):
    """Counts of the engines' work from the start, over all epochs."""

    num_steps: int = 0
    num_tokens: int = 0  # rows computed, prompts and answers
    busy_seconds: float = 0.0
    num_poisoned: int = 0  # requests that were ended because they killed engines
    num_expert_rows: int = 0  # (token, expert) pairs
    num_expert_samples: int = 0  # layer calls
    num_touched_experts: int = 0  # distinct experts in those, added up
    num_hot_reads: int = 0  # experts that decode steps used, of layers with slots on a GPU
    num_hot_hits: int = 0  # of those, experts that had a slot
    num_hot_uploads: int = 0
    hot_upload_bytes: int = 0


class EngineLoss(msgspec.Struct, frozen=True):
    """Note of the scheduler that it knows that the engine of this epoch is gone.

    explained: epochs, this one perhaps among them, that died of a request which has now been found and ended.
    """

    epoch: int
    explained: tuple[int, ...] = ()


class ChunkTrace(msgspec.Struct, frozen=True, array_like=True):
    """Times of a part of a request's prompt that a step computed; see server/backend/timeline.py. Also when it is
    recomputed.
    """

    request_id: str
    began: float
    ended: float
    position: int
    num_tokens: int
    num_rows: int


class Traces(msgspec.Struct, frozen=True):
    """Times of requests and steps for traces. planned: requests whose run began, and when, in seconds on the monotonic
    clock. chunks: of steps that ended.
    """

    planned: Sequence[tuple[str, float]]
    chunks: Sequence[ChunkTrace]


class News(msgspec.Struct, frozen=True):
    """The scheduler's message about what happened since the last one. prefill_seconds: from admission to the first
    token, of requests that got it.

    losses: answers to EngineDown, one to each. hanging: the epoch of an engine whose step takes too long.
    expert_counts: of steps that ended, see StepResult. traces: with SchedulerOptions.has_traces only.
    """

    updates: list[RequestUpdate]
    stats: SchedulerStats
    totals: EngineTotals
    prefill_seconds: dict[str, float]
    losses: list[EngineLoss] = []
    hanging: int | None = None
    expert_counts: bytes = b""
    traces: Traces | None = None


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the loaded model that the other processes have to know.

    num_experts: of a layer, at most. expert_bytes: of one routed expert per layer on the CPU, added up. gpu_bytes: see
    ModelCard. profiled: what profiles say of the model. num_states, snapshot_interval, tiers,
    num_stages: see SchedulerConfig. digest, weights: see ModelInfo.
    """

    num_pages: int
    page_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int | None
    chunk_size: int  # most tokens of a step
    uses_gpus: bool = False
    num_experts: int = 0
    expert_bytes: float = 0.0
    gpu_bytes: int = 0
    num_states: int = 0
    snapshot_interval: int = 0
    tiers: TierConfig | None = None
    num_stages: int = 1
    profiled: ProfileMeta | None = None
    digest: bytes = b""
    weights: tuple[FileState, ...] = ()


class EngineLoading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading the engine, in bytes; name: the module that was loaded last."""

    epoch: int
    done: int
    total: int
    name: str


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Message of the engine that the model is loaded. facts: what the scheduler may count on."""

    epoch: int
    facts: EngineFacts


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """Message of the engine that it cannot start. error: the name of a class in errors.py."""

    epoch: int
    error: str
    message: str


EngineStatus = EngineLoading | EngineReady | EngineFailed


def _from_plain(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"messages hold no {kind.__name__}")


def encode(message: Any) -> bytes:
    """Return a message as msgpack; paths become text."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode(data: bytes, kind: Any) -> Any:
    """Return the message of type `kind` in these bytes. Raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)
