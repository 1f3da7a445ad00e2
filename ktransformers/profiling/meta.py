"""The facts in a profile's meta.json: the model, the machine, when, and what was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ktransformers.errors import ConfigError, reason_of
from ktransformers.profiling.lines import check_version
from ktransformers.profiling.records import SCHEMA

__all__ = ["GpuInfo", "MachineInfo", "Meta", "ProfiledModel", "read_meta"]


class GpuInfo(msgspec.Struct, frozen=True):
    """A GPU of a profile's machine. memory_gbps: measured read bandwidth, 1e9 bytes/s."""

    name: str = ""
    memory_gbps: float | None = None


class MachineInfo(msgspec.Struct, frozen=True):
    """The machine that a profile was recorded on. memory_gbps: measured read bandwidth of all threads, 1e9 bytes/s."""

    cpu: str = ""
    num_threads: int = 0
    isa: str = ""
    memory_gbps: float | None = None
    gpus: tuple[GpuInfo, ...] = ()


class ProfiledModel(msgspec.Struct, frozen=True):
    """The model that a profile records. expert_bytes: of one expert, per layer; 0 for a layer without experts."""

    name: str = ""
    architecture: str = ""
    num_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_bytes: tuple[int, ...] = ()
    types: dict[str, Any] = {}


class Meta(msgspec.Struct, frozen=True):
    """The content of a profile's meta.json. Times of all files are seconds since began_unix_ns."""

    v: int
    schema: str = SCHEMA
    began_unix_ns: int = 0
    began_monotonic_ns: int = 0
    stopped_unix_ns: int | None = None
    version: str = ""
    command: tuple[str, ...] = ()
    backend: str = ""
    model: ProfiledModel = ProfiledModel()
    machine: MachineInfo = MachineInfo()
    placement: dict[str, Any] = {}
    dropped: dict[str, int] = {}
    overlaps: int = 0
    """Steps whose parts took longer than the step: their figures are wrong."""

    @property
    def experts_on_gpu(self) -> tuple[int, ...]:
        """The number of experts of each layer that lie on a GPU; empty where the profile does not say."""
        return tuple(self.placement.get("experts_on_gpu") or ())


def read_meta(folder: Path) -> Meta:
    """Read a profile's meta.json. Raises ConfigError when the folder holds no profile, or one of a later schema."""
    path = folder / "meta.json"
    if not path.exists():
        raise ConfigError(f"{folder} holds no profile (no meta.json): name the folder that --profile was given")
    text = path.read_bytes()
    try:
        check_version(msgspec.json.decode(text, type=Meta).v, path)
        meta = msgspec.json.decode(text, type=Meta)
    except msgspec.MsgspecError as error:
        try:
            head = msgspec.json.decode(text)
        except msgspec.MsgspecError:
            head = None
        if isinstance(head, dict) and isinstance(head.get("v"), int):
            check_version(head["v"], path)
        raise ConfigError(f"{path} is no meta.json of a profile: {reason_of(error)}") from None
    if meta.schema != SCHEMA:
        raise ConfigError(f"{path} is of another program: its schema is {meta.schema[:80]!r}, not {SCHEMA!r}")
    return meta
