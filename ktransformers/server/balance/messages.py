"""Messages between the processes: msgspec structs as msgpack, never pickle. Who sends what: see __init__."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ktransformers.config import EngineConfig
from ktransformers.core import SNAPSHOT_ALIGN
from ktransformers.media.records import Sight
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.scheduler.commands import ProfileOff, ProfileOn, RequestCommand
from ktransformers.scheduler.config import TierConfig
from ktransformers.scheduler.records import StepPlan
from ktransformers.weights.digests.states import FileState

__all__ = [
    "Anew",
    "Command",
    "EngineDown",
    "EngineFacts",
    "EngineFailed",
    "EngineLoading",
    "EngineOptions",
    "EngineReady",
    "EngineStatus",
    "EngineUp",
    "EngineWork",
    "SchedulerOptions",
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
    max_drafts: int = 0
    drafter: str = "ngram"
    long_chunk_size: int = 0
    long_prompt: int = 0
    picture_sight: Sight = Sight.NOTHING
    num_extra_ids: int = 0
    parent_pid: int
    commands: str
    news: str
    log_level: str
    step_seconds: float = 0.0  # see StepWatch; 0: an engine that hangs is not noticed
    checks_integrity: bool = False  # after every step; for tests
    has_traces: bool = False  # News.traces is wanted


class EngineUp(msgspec.Struct, frozen=True, tag=True):
    """Message that an engine of this epoch has loaded. The scheduler binds both endpoints, the engine connects."""

    epoch: int
    steps: str
    results: str


class EngineDown(msgspec.Struct, frozen=True, tag=True):
    """Message that the engine of this epoch is gone, and its cache with it."""

    epoch: int


class Anew(msgspec.Struct, frozen=True, tag=True):
    """Message that the scheduler knows that steps were lost (StepResult.recovering): it plans later ones anew."""


Command = RequestCommand | EngineUp | EngineDown | ProfileOn | ProfileOff

EngineWork = StepPlan | Anew | ProfileOn | ProfileOff
"""What the scheduler sends an engine, which does it in this order."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the loaded model that the other processes have to know.

    num_experts: of a layer, at most. expert_bytes: of one routed expert per layer on the CPU, added up. gpu_bytes: see
    ModelCard. profiled: what profiles say of the model. num_states, snapshot_interval, tiers, num_stages, max_drafts,
    drafter, long_chunk_size, long_prompt, picture_sight, num_extra_ids: see SchedulerConfig. digest, weights: see
    ModelInfo. has_tower: whether the engine computes pictures.
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
    max_drafts: int = 0
    drafter: str = "ngram"
    long_chunk_size: int = 0
    long_prompt: int = 0
    picture_sight: Sight = Sight.NOTHING
    num_extra_ids: int = 0
    has_tower: bool = False
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
