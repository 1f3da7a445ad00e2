"""Base of operators: modules that a rule puts in the places of Hugging Face modules.

The life of an operator, which `optimize/apply.py` leads all operators of a model through, stage by stage:

    the engine calls   constructor ──────> fill(source) ────────> post_load(runtime) ───> forward, step after step
    stage              PLANNED             LOADED                 BOUND
    a subclass says    requirements()      load(source)           bind(runtime)
                       on `meta`, with     reads its tensors,     learns how long sequences get and what works
                       its devices;         lays them out in       for it; all operators are loaded, so that what
                       no byte is read     final form, one pass   they hold may be laid out anew, together

Each stage is entered once and in this order, and an operator's attributes are its own: nobody else sets them.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import nn
from typing_extensions import override

from ktransformers.config import CPU_BF16S, CPU_PREFILLS, SPARSE_ATTENTIONS
from ktransformers.core import Phase
from ktransformers.errors import TensorMismatchError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.cpu.expert_counts import ExpertCounts
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.device import Devices
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.operators.partial_sums import PartialSums
from ktransformers.operators.usage import ExpertUsage
from ktransformers.weights.source import TensorInfo, WeightSource

__all__ = [
    "COMMON_KWARGS",
    "ExpertStats",
    "Operator",
    "OperatorConfig",
    "OperatorRuntime",
    "Placement",
    "Requirements",
    "Stage",
    "layer_number",
]

_Service = TypeVar("_Service")

COMMON_KWARGS = frozenset({"generate_device", "prefill_device", "out_device", "generate_op", "prefill_op"})
"""Keyword arguments that every operator takes in a rule file; the planner resolves them into a Placement."""


def layer_number(module: nn.Module) -> int:
    """Return the number in the model of the layer that a mixing module is of, under which counts and times of the layer
    are kept.

    Its `layer_idx` is the place of its cache in this process: a stage of a pipeline counts those from 0.
    """
    return int(getattr(module, "layer_number", module.layer_idx))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices and implementation names of one module, resolved by the planner; `op` None is the operator's default.

    layer_device: of the decoder layer that the module is in, where hidden states are; None outside of all layers.
    """

    generate_device: str = "cpu"
    prefill_device: str = "cpu"
    out_device: str = "cpu"
    generate_op: str | None = None
    prefill_op: str | None = None
    layer_device: str | None = None

    @classmethod
    def on(cls, device: str, layer_device: str | None = None) -> Placement:
        """Return a placement of all on one device, with the operator's default implementations."""
        return cls(device, device, device, layer_device=layer_device)

    def device(self, phase: Phase) -> str:
        """Return the device on which the module runs in `phase`."""
        return self.prefill_device if phase is Phase.PREFILL else self.generate_device


class ExpertStats:
    """Exact counts of the routed experts that a model uses, made where they run: kernels count their own calls."""

    def __init__(self) -> None:
        self._counts = ExpertCounts()
        self._usages: list[tuple[ExpertUsage, torch.Tensor]] = []  # and their counts, as they were added last

    def watch(self, kernel: MoeKernel) -> None:
        """Count the experts that a kernel computes."""
        self._counts.watch(kernel)

    def add(self, layer: int, rows: Sequence[int], calls: int = 1) -> None:
        """Add what no kernel on the CPU counted: rows of each expert of a layer (-1: of no number) in so many calls.

        calls 0: a part of a call that a kernel counts.
        """
        self._counts.add(layer, rows, calls)

    def watch_gpu(self, usage: ExpertUsage) -> None:
        """Count the experts that a counter counts on its GPU. Watching it again does nothing."""
        if all(usage is not known for known, _ in self._usages):
            self._usages.append((usage, usage.counts.clone()))

    def totals(self) -> tuple[int, int, int]:
        """Return the sums of (token, expert) pairs computed, of layer calls, and of distinct experts of each call.

        Experts on GPUs add pairs alone, as of the last step that is over.
        """
        for usage, before in self._usages:
            self._counts.follow(usage.counts, before)
        return self._counts.totals()

    def take_counts(self) -> bytes:
        """Return the rows of each layer's experts that are new since the last call: see ExpertCounts.take."""
        return self._counts.take()

    def note(self, topk_ids: torch.Tensor, num_experts: int, layer: int = -1) -> None:
        """Count one call that no kernel counts by its topk_ids [T, K] on the CPU; one of num_experts was skipped."""
        self.add(layer, topk_ids.flatten().bincount(minlength=num_experts)[:num_experts].tolist())


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """Configuration that all operators of one model share. pool is None while only planning.

    shares: of a model that is cut over several processes. expert_files: what experts on the CPU are read from while the
    model runs; None: all of them are in RAM.
    """

    facts: ModelFacts
    pool: WorkerPool | None = None
    cpu_quant: QuantType | None = None
    cpu_prefill: str = CPU_PREFILLS[0]
    cpu_bf16: str = CPU_BF16S[0]
    expert_stats: ExpertStats = field(default_factory=ExpertStats)
    devices: Devices = field(default_factory=Devices)
    sparse_attention: str = SPARSE_ATTENTIONS[0]
    partial_sums: PartialSums | None = None
    expert_files: ExpertFiles | None = None

    def require_pool(self) -> WorkerPool:
        """Return the worker pool. Raises RuntimeError while only planning."""
        if self.pool is None:
            raise RuntimeError("this operator was built for planning only; it has no worker pool")
        return self.pool


@dataclass(slots=True)
class Requirements:
    """Needs of loading an operator: resident bytes per device, quant types, and the stored tensors it reads.

    looked_up: of those bytes the ones of tables of which a token reads a few rows. in_files: numbers of such tables
    that take no memory, because they stay in mapped files. stored_experts: bytes of experts on the CPU that stay in
    files, of which slots in RAM hold some.
    """

    nbytes: dict[str, int] = field(default_factory=dict)
    looked_up: dict[str, int] = field(default_factory=dict)
    in_files: int = 0
    stored_experts: int = 0
    quant_types: list[str] = field(default_factory=list)
    stored_names: set[str] = field(default_factory=set)

    def add(self, device: str, info: TensorInfo, nbytes: int | None = None) -> None:
        """Count a tensor that takes `nbytes` on `device`, or as many as it has at rest."""
        self.nbytes[device] = self.nbytes.get(device, 0) + (info.nbytes if nbytes is None else nbytes)
        name = info.resident_type.name
        shown = name if name == info.stored_type else f"{info.stored_type}>{name}"
        if shown not in self.quant_types:
            self.quant_types.append(shown)
        self.stored_names.update(info.stored_names)

    def add_table(
        self, source: WeightSource, info: TensorInfo, *, as_stored: bool = False, kept_nbytes: int = 0
    ) -> None:
        """Count a table that stays on the CPU, and of which steps read few rows: in a mapped file it takes no memory
        that others cannot have, but for kept_nbytes of its rows. as_stored: it stays as it is even where no kernel
        computes with it.
        """
        as_stored |= info.stored_type == info.resident_type.name
        is_mapped = as_stored and all(source.stored_bytes(name) is not None for name in info.stored_names)
        nbytes = min(kept_nbytes, info.nbytes) if is_mapped else info.nbytes
        self.add("cpu", info, nbytes)
        self.looked_up["cpu"] = self.looked_up.get("cpu", 0) + nbytes
        self.in_files += math.prod(info.shape) if is_mapped else 0

    def include(self, other: Requirements) -> None:
        """Add the needs of a part of the operator."""
        for own, others in ((self.nbytes, other.nbytes), (self.looked_up, other.looked_up)):
            for device, nbytes in others.items():
                own[device] = own.get(device, 0) + nbytes
        self.in_files += other.in_files
        self.stored_experts += other.stored_experts
        self.quant_types += [name for name in other.quant_types if name not in self.quant_types]
        self.stored_names |= other.stored_names


@dataclass(frozen=True, slots=True)
class OperatorRuntime:
    """Environment that an operator is bound to once the model is loaded.

    max_len: no step will hold a position beyond max_len - 1. service: what works for this operator alone, if anything
    does: a FlashLayer for its attention, a PrefillLayer that streams its experts.
    """

    max_len: int
    service: object | None = None

    def find(self, kind: type[_Service]) -> _Service | None:
        """Return the service, if it is of this kind."""
        return self.service if isinstance(self.service, kind) else None


class Stage(enum.IntEnum):
    """Stages of an operator's life, see the module's docstring."""

    PLANNED = 0
    LOADED = 1
    BOUND = 2


class Operator(nn.Module, ABC):
    """Base of everything that a rule file can inject. Its life is drawn in the module's docstring.

    Subclasses name what they can run: OPS maps an implementation's name (as rule files spell it) to one line on what
    it is here; an empty map means that there is only one. KWARGS are keyword arguments beyond the common ones, passed
    to the constructor. OWNED_CHILDREN are direct children that `load` reads itself: the planner does not visit them;
    all others stay in the tree and are planned for themselves. KEEPS_BUFFERS: the wrapped module's own buffers stay
    on the CPU, because its forward runs there whatever the operator's device. PREFILLS_ON_LAYER_DEVICE: a rule that
    names no prefill_device means the layer's device, not the generate_device.
    """

    OPS: ClassVar[dict[str, str]] = {}
    KWARGS: ClassVar[frozenset[str]] = frozenset()
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset()
    KEEPS_BUFFERS: ClassVar[bool] = False
    PREFILLS_ON_LAYER_DEVICE: ClassVar[bool] = False

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        """Take over `module`, whose dotted name in the Hugging Face tree is `key`. Reads no weights.

        Raises UnsupportedError when this operator cannot take the place of `module`.
        """
        super().__init__()
        self.key = key
        self.config = config
        self.placement = placement or Placement()
        self.device = config.devices[self.placement.generate_device]
        self.layer_device = config.devices[self.placement.layer_device or self.placement.generate_device]
        self._stage = Stage.PLANNED

    @classmethod
    def is_for(cls, module: nn.Module) -> bool:
        """Whether a rule that names this operator means `module`, which its `match` fits; if not, other rules may.

        For operators that share a name with others in families' module trees. All others take, or refuse, any.
        """
        return True

    def op(self, phase: Phase) -> str:
        """Return the implementation that runs in `phase`, for the plan's table."""
        named = self.placement.prefill_op if phase is Phase.PREFILL else self.placement.generate_op
        return named or type(self).__name__

    def owned_children(self) -> frozenset[str]:
        """Return OWNED_CHILDREN, unless it depends on how the operator is used."""
        return self.OWNED_CHILDREN

    @abstractmethod
    def requirements(self, source: WeightSource) -> Requirements:
        """Return bytes per device and tensors read by `load`, children that are operators of their own excluded.

        Raises TensorMismatchError when the files lack a tensor or hold it in another shape.
        """

    @abstractmethod
    def load(self, source: WeightSource) -> None:
        """Read the tensors and lay them out. Subclasses say how; `fill` calls it."""

    def bind(self, runtime: OperatorRuntime) -> None:
        """Take what the runtime has for the operator, and share what may be shared. Subclasses say how; `post_load`
        calls it.
        """

    def kept(self, weight: RawTensor) -> RawTensor:
        """Return a matrix as `load` is to keep it on the CPU: where the file has mapped it, or in memory of its own in
        a model whose experts stay in files. For slots leave the system's cache no room, and whoever cuts a file that
        is mapped ends the process.
        """
        return weight if self.config.expert_files is None else cpu.unmapped(weight, self.config.require_pool())

    @final
    def fill(self, source: WeightSource) -> None:
        """Load the operator, once. Raises RuntimeError when it is loaded already."""
        self._enter(Stage.LOADED)
        self.load(source)

    @final
    def post_load(self, runtime: OperatorRuntime) -> None:
        """Give the operator its runtime, once, when all operators of the model are loaded. Raises RuntimeError
        before.
        """
        self._enter(Stage.BOUND)
        self.bind(runtime)

    def _enter(self, stage: Stage) -> None:
        if self._stage != stage - 1:
            raise RuntimeError(f"{self.key} cannot become {stage.name}: it is {self._stage.name}")
        self._stage = stage

    def forget(self) -> None:
        """Free memory that grew with positions that were made up: called after a step with such."""

    def bypassed(self) -> Iterable[nn.Module]:
        """Return the modules in the operator whose own forward is never called, or runs under the operator's
        own care.
        """
        return ()

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(type(self).__name__)


def expect_shape(info: TensorInfo | None, key: str, shape: tuple[int, ...]) -> TensorInfo:
    """Return `info` if it has `shape`; otherwise raise a TensorMismatchError that names the tensor."""
    if info is None:
        raise TensorMismatchError(f"tensor {key} is missing from the weight files")
    if tuple(info.shape) != tuple(shape):
        raise TensorMismatchError(
            f"tensor {key} has shape {tuple(info.shape)}, the model's config needs {tuple(shape)}"
        )
    return info


def empty_parameter(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a placeholder on `meta` that keeps `module.weight.shape` readable for Hugging Face code."""
    return torch.empty(shape, device="meta")
