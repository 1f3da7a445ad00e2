"""Messages between the processes: msgspec structs as msgpack, never pickle. Who sends what: see __init__."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ktransformers.config import EngineConfig
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.scheduler.commands import ProfileOff, ProfileOn, RequestCommand
from ktransformers.scheduler.config import SchedulerConfig
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
    """Options with which the scheduler process is started."""

    config: SchedulerConfig
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

    scheduler: what a scheduler may count on; flags that the engine does not know are not in it yet. num_experts: of a
    layer, at most. expert_bytes: of one routed expert per layer on the CPU, added up. gpu_bytes: see ModelCard.
    profiled: what profiles say of the model. digest, weights: see ModelInfo. has_tower: whether the engine computes
    pictures.
    """

    scheduler: SchedulerConfig
    uses_gpus: bool = False
    num_experts: int = 0
    expert_bytes: float = 0.0
    gpu_bytes: int = 0
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
