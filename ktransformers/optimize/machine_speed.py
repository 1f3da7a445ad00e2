"""Measured speeds of a machine, in plain types, and the file that remembers them.

Knows neither torch nor models: `bench/probe/cpu.py` measures, `optimize/predict.py` predicts from it, the server reads
the file and never measures. Times are in seconds, rates per second.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ktransformers import __version__
from ktransformers.kernels.formats import FORMATS
from ktransformers.system.cores import allowed_cpus, cpu_quota
from ktransformers.system.cpu_names import cpu_name
from ktransformers.system.user_files import replace_own
from ktransformers.system.user_folders import user_cache_dir

__all__ = [
    "CpuSpeed",
    "Curve",
    "GpuSpeed",
    "MachineSpeed",
    "Peak",
    "SpeedFile",
    "StepCost",
    "best_of",
    "machine_key",
    "nearest_type",
]

logger = logging.getLogger(__name__)

FORMAT = 3
"""Of the file. A file of another format is stale."""

_BITS = {record.name: 8 * record.nbytes / record.block for record in FORMATS.values()}
_GROUP_BITS = {"I4": 4.5, "I8": 8.5, "F8": 8.25, "MXFP8": 8.25, "NVFP4": 4.5}
"""Of weights in groups, by what their names begin with."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of a number: straight lines between points, behind the last one through the last two.

    at: increasing. Below the first point the first one holds. Raises ValueError for what is no such function.
    """

    at: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        is_ordered = all(a < b for a, b in zip(self.at, self.at[1:], strict=False))
        if not self.at or len(self.at) != len(self.seconds) or not is_ordered or min(self.seconds) < 0:
            raise ValueError(f"no curve: {self.at}, {self.seconds}")

    def of(self, x: float) -> float:
        """Return the seconds at a number, never less than 0."""
        if x <= self.at[0] or len(self.at) == 1:
            return self.seconds[0]
        upper = next((i for i, at in enumerate(self.at) if at >= x), len(self.at) - 1)
        (x0, x1), (y0, y1) = self.at[upper - 1 : upper + 1], self.seconds[upper - 1 : upper + 1]
        return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak operations a second in registers: of one core, and of all together. 0 where the processor has none."""

    one: float
    all: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step when its weights weigh nothing: launches, hand-overs, Python, by the rows it carries.

    layer: of each decoder layer. step: once, however many layers there are.
    """

    layer: Curve
    step: Curve


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """Speeds of the worker pool with `threads` threads.

    read: bytes a second by number of threads. node_read: by the threads of a NUMA node alone, where there are several.
    linear, experts: by type, the time for a byte of the weights that are multiplied, by rows: of the step, and of a
    touched expert in the mean. attention: "grouped" and "latent", the time for a multiplication and addition of a query
    with a key or a probability with a value, by the rows that a sequence brings. steps: by kind of layer.
    """

    threads: int
    isa: str
    read: dict[int, float]
    node_read: dict[int, float] = field(default_factory=dict)
    peaks: dict[str, Peak] = field(default_factory=dict)
    linear: dict[str, Curve] = field(default_factory=dict)
    experts: dict[str, Curve] = field(default_factory=dict)
    attention: dict[str, Curve] = field(default_factory=dict)
    steps: dict[str, StepCost] = field(default_factory=dict)

    @property
    def best_read(self) -> float:
        """Bytes a second that the threads read at best."""
        return max(self.read.values())


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Speeds of a GPU. read: bytes a second that a copy within it reads and writes. matmul: operations a second in
    bf16.

    to_gpu, from_gpu: bytes a second over PCIe, pinned. launch: of a small kernel in a replayed graph. hand_over: what a
    layer of experts on the CPU adds to a step besides their computation. linear, experts: as in CpuSpeed, with the
    GPU's kernels, beyond what the smallest such kernel takes; attention by the rows of a step, of prompts only where
    the kernels of decode steps serve them too. steps: of decode steps. replayed: of prompts' steps of up to
    replayed_rows rows, which are replayed as decode steps are. launches: of longer ones, the time of the program that
    launches them.
    """

    name: str
    read: float
    matmul: float
    to_gpu: float
    from_gpu: float
    launch: float
    hand_over: float
    linear: dict[str, Curve] = field(default_factory=dict)
    experts: dict[str, Curve] = field(default_factory=dict)
    attention: dict[str, Curve] = field(default_factory=dict)
    steps: dict[str, StepCost] = field(default_factory=dict)
    replayed: dict[str, StepCost] = field(default_factory=dict)
    replayed_rows: int = 0
    launches: dict[str, StepCost] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Speeds of a machine. measured_at: seconds since 1970. took: how long measuring took. gpus: by the name of the
    device, "cuda:0".
    """

    measured_at: float
    took: float
    cpu: CpuSpeed
    gpus: dict[str, GpuSpeed] = field(default_factory=dict)


def best_of(one: MachineSpeed, other: MachineSpeed) -> MachineSpeed:
    """Return the faster of two measurements of one machine, point by point: neighbours make a machine slower, never
    faster.

    What only one of them has is its own; peaks, nodes and other rates of GPUs are those of `one`.
    """
    a, b = one.cpu, other.cpu
    cpu = replace(
        a,
        read={count: max(rate, b.read.get(count, 0.0)) for count, rate in a.read.items()},
        linear=_best_curves(a.linear, b.linear),
        experts=_best_curves(a.experts, b.experts),
        attention=_best_curves(a.attention, b.attention),
        steps=_best_costs(a.steps, b.steps),
    )
    gpus = {name: _best_gpu(gpu, other.gpus.get(name, gpu)) for name, gpu in one.gpus.items()}
    return replace(one, cpu=cpu, gpus=gpus)


def _best_gpu(a: GpuSpeed, b: GpuSpeed) -> GpuSpeed:
    return replace(
        a,
        linear=_best_curves(a.linear, b.linear),
        experts=_best_curves(a.experts, b.experts),
        attention=_best_curves(a.attention, b.attention),
        steps=_best_costs(a.steps, b.steps),
        replayed=_best_costs(a.replayed, b.replayed),
        launches=_best_costs(a.launches, b.launches),
    )


def _best_costs(one: Mapping[str, StepCost], other: Mapping[str, StepCost]) -> dict[str, StepCost]:
    return {kind: _best_cost(cost, other.get(kind, cost)) for kind, cost in one.items()}


def _best_cost(one: StepCost, other: StepCost) -> StepCost:
    return StepCost(_best_curve(one.layer, other.layer), _best_curve(one.step, other.step))


def _best_curves(one: Mapping[str, Curve], other: Mapping[str, Curve]) -> dict[str, Curve]:
    return {**other, **{name: _best_curve(curve, other.get(name, curve)) for name, curve in one.items()}}


def _best_curve(one: Curve, other: Curve) -> Curve:
    return Curve(one.at, tuple(map(min, one.seconds, other.seconds))) if one.at == other.at else one


def nearest_type(name: str, known: Mapping[str, object]) -> str:
    """Return the measured type whose weights are as wide as those of `name`, or most nearly so. Raises ValueError for
    none.
    """
    if name in known:
        return name
    bits = _bits(name)
    candidates = sorted(known, key=lambda one: (abs(_bits(one) - bits), one))
    if not candidates:
        raise ValueError("no type was measured")
    return candidates[0]


def _bits(name: str) -> float:
    return _BITS.get(name, _GROUP_BITS.get(name.partition("_")[0], 8.0))


def machine_key(root: Path = Path("/")) -> dict[str, object]:
    """Return all that a measurement depends on, without touching a GPU. root: where /proc is."""
    return {
        "format": FORMAT,
        "cpu": cpu_name(),
        "cores": sorted(allowed_cpus()),
        "quota": cpu_quota(root),
        "memory": _memory_total(root),
        "gpus": _gpu_names(root),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "isa": os.environ.get("KTRANSFORMERS_ISA"),
        "kernel": platform.release(),
        "version": __version__,
    }


def _memory_total(root: Path) -> str:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("MemTotal:")), "")


def _gpu_names(root: Path) -> list[str]:
    """By the NVIDIA driver's own list; empty without it."""
    names = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


class SpeedFile:
    """The measurement of this machine in the user's cache folder, readable by the user alone.

    key: what it depends on; of another machine, kernel or version there is another file.
    """

    def __init__(self, key: Mapping[str, object] | None = None, folder: Path | None = None) -> None:
        self._key = json.dumps(dict(machine_key() if key is None else key), sort_keys=True)
        digest = hashlib.sha256(self._key.encode()).hexdigest()[:20]
        self.path = (folder or user_cache_dir()) / "machine" / f"{digest}.json"

    def read(self) -> MachineSpeed | None:
        """Return the measured speeds, None when nothing was measured. A file that cannot be understood is one logged
        line, and is none.
        """
        try:
            held = msgspec.json.decode(self.path.read_bytes(), type=_Held)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            logger.warning("%s cannot be used (%s): ktransformers doctor --measure writes it anew", self.path, error)
            return None
        return held.speed if held.key == self._key else None

    def write(self, speed: MachineSpeed) -> bool:
        """Write measured speeds to the file. A folder that cannot be written to is one logged line, and False."""
        data = msgspec.json.format(msgspec.json.encode(_Held(self._key, speed)), indent=1)
        try:
            replace_own(self.path, data)
        except OSError as error:
            logger.warning("%s cannot be written (%s): the measurement is forgotten", self.path, error)
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Held:
    key: str
    speed: MachineSpeed
