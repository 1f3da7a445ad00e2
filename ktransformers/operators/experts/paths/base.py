"""A path of routed experts: one way to compute those of a layer, and the steps for which it is one.

E experts, T tokens, K experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.kernels.triton.experts.router import Chosen
from ktransformers.kernels.types import ActivationSpec, ExpertWeights
from ktransformers.operators.base import OperatorConfig, OperatorRuntime, Placement, Requirements
from ktransformers.operators.device import Device, to_input
from ktransformers.operators.expert_files import ExpertRecords
from ktransformers.operators.experts.resident import bias_nbytes, can_be_copied, why_not_on_gpu
from ktransformers.operators.linear.packed import CpuProducts, experts_record, resident_nbytes
from ktransformers.operators.usage import ExpertUsage
from ktransformers.weights.expert_parts import ExpertColumns
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout, TensorInfo, WeightSource

__all__ = ["ExpertFunction", "ExpertPath", "ExpertStep", "InlinePath", "LayerExperts"]

IssuedT = TypeVar("IssuedT")


@dataclass(frozen=True, slots=True)
class ExpertFunction:
    """Arithmetic of an expert between and behind its products.

    activation: None when no kernel computes the expert. act: the activation on torch, [T, 2 I] -> [T, I] with a gate,
    else of [T, I]. norm: of each expert's result before it is weighed, None for most families.
    """

    activation: ActivationSpec | None
    act: Callable[[torch.Tensor], torch.Tensor]
    norm: nn.Module | None = None


@dataclass(slots=True, eq=False)
class LayerExperts:
    """The routed experts of one layer, as its paths share them.

    number: of the layer in the model, -1 for none. weights, kernel: on the CPU, None until the path that rests there
    (native or torch) has loaded them; the kernel stays None where none computes the experts.
    """

    key: str
    number: int
    layout: ExpertsLayout
    function: ExpertFunction
    products: CpuProducts
    config: OperatorConfig
    placement: Placement
    device: Device = field(init=False)
    layer_device: Device = field(init=False)
    weights: ExpertWeights | None = field(default=None, init=False)
    kernel: MoeKernel | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        place = self.placement
        self.device = self.config.devices[place.generate_device]
        self.layer_device = self.config.devices[place.layer_device or place.generate_device]

    @property
    def is_beside_gpu(self) -> bool:
        """Whether the experts rest in the CPU's memory while their layer is on a GPU."""
        return not self.device.is_gpu and self.layer_device.is_gpu

    def find(self, source: WeightSource) -> ExpertsInfo:
        """Return the facts of the experts in the files. Raises TensorMismatchError when they are not there."""
        info = source.find_experts(self.key, self.layout, self.config.cpu_quant)
        if info is None:
            raise TensorMismatchError(f"the experts of {self.key} are missing from the weight files")
        return info

    def columns(self, info: ExpertsInfo) -> ExpertColumns | None:
        """Return this process's part of the experts where they rest on a GPU; None for all of them."""
        sums = self.config.partial_sums
        group = None if sums is None else sums.of_experts(self.key)
        return None if group is None else ExpertColumns.of(info, group.rank, group.size)

    def find_resident(self, source: WeightSource) -> ExpertsInfo:
        """Return the facts of what this process has of the experts where they rest on a GPU. Raises as `find`."""
        info = self.find(source)
        columns = self.columns(info)
        return info if columns is None else columns.info(info)

    def requirements(self, info: ExpertsInfo, nbytes: int) -> Requirements:
        """Return the needs of loading all experts onto their device, where they take nbytes."""
        needs = Requirements(nbytes={self.device.name: nbytes}, stored_names=set(info.stored_names))
        for part in _projections(info):
            shown = part.resident_type.name
            shown = shown if shown == part.stored_type else f"{part.stored_type}>{shown}"
            if shown not in needs.quant_types:
                needs.quant_types.append(shown)
        return needs

    def host_nbytes(self, info: ExpertsInfo) -> int:
        """Return the bytes of all experts in the CPU's memory, as its kernels take them, biases included."""
        return info.nbytes + sum(resident_nbytes(part, self.products) - part.nbytes for part in _projections(info))

    def records(self, source: WeightSource) -> ExpertRecords:
        """Return the experts as files have them, of which a store reads them. Errors as `ExpertFiles.find`."""
        files, plain = self.config.expert_files, replace(self.layout, has_bias=False)
        assert files is not None, "experts are in RAM"
        record = experts_record(self.find(source), self.products)
        return files.find(
            self.key,
            record,
            self.layout.num_experts,
            lambda: source.mapped_experts(self.key, plain, self.config.cpu_quant),
        )

    def copied_nbytes(self, source: WeightSource) -> tuple[int, int] | None:
        """Return the bytes of one expert in the CPU's memory and of all experts' biases; None when GPU kernels cannot
        compute the experts from those bytes, or when not all of them are there.
        """
        if self.device.is_gpu:
            return None
        if why_not_on_gpu(self.layout, self.function.activation) is not None:
            return None
        info = self.find(source)
        if not all(can_be_copied(part.resident_type) for part in _projections(info)):
            return None
        nbytes = sum(resident_nbytes(part, self.products) for part in _projections(info))
        return nbytes // self.layout.num_experts, bias_nbytes(info)

    def usage_on(self, device: Device) -> ExpertUsage:
        """Return what counts the experts of this layer that run on a GPU."""
        facts = self.config.facts
        return device.expert_usage(facts.first_layer + facts.num_layers, self.layout.num_experts)


def _projections(info: ExpertsInfo) -> list[TensorInfo]:
    return [part for part in (info.gate, info.up, info.down) if part is not None]


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """Work of a layer's experts in one step.

    hidden_states: [..., H], on any device. topk_ids, topk_weights: [T, K]; an id equal to the number of experts is
    skipped. is_counted: whether the router has filled what `ExpertPath.chosen` returned.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    is_counted: bool = False

    def rows(self) -> torch.Tensor:
        """Return the hidden states as [T, H]."""
        return self.hidden_states.reshape(-1, self.hidden_states.shape[-1])


@dataclass(eq=False, repr=False)
class ExpertPath(ABC, Generic[IssuedT]):
    """Base of the ways to compute the routed experts of a layer. IssuedT: what `submit` leaves for `collect`.

    Its life is an operator's (operators/base.py): made for a layer by the plan, loaded, bound, then asked step after
    step. It may hold services and weights of its own; what several paths read is in `layer`.
    """

    NAME: ClassVar[str]
    layer: LayerExperts

    @classmethod
    @abstractmethod
    def is_for(cls, layer: LayerExperts) -> bool:
        """Whether the layer has this path, by what is planned for it."""

    def requirements(self, source: WeightSource) -> Requirements:
        """Return the needs of `load`. Memory that the paths of several layers share is not in it: it is planned for
        all of them at once (optimize/streaming.py, optimize/hot_slots.py).
        """
        return Requirements()

    def divides(self, source: WeightSource) -> bool:
        """Whether the path has a part of each expert where several processes share the model, see
        LayerExperts.columns."""
        return False

    def load(self, source: WeightSource) -> None:
        """Load what this path alone brings into the layer. Paths load in the order of the list: what another one brings
        may not be there yet, and is from `bind` on.
        """

    def bind(self, runtime: OperatorRuntime) -> bool:
        """Take the path's service from the runtime; return whether the path can take any step at all."""
        return True

    def chosen(self, rows: torch.Tensor, top_k: int) -> Chosen | None:
        """Return the memory that a router fills for a step that the path takes, of rows [T, H]; None when the path
        counts for itself.
        """
        return None

    @abstractmethod
    def takes(self, step: ExpertStep) -> bool:
        """Whether the path computes this step, by its hidden states alone. Launches nothing and waits for nothing."""

    @abstractmethod
    def submit(self, step: ExpertStep) -> IssuedT:
        """Issue a step that the path takes. Its inputs must not change before `collect`."""

    @abstractmethod
    def collect(self, issued: IssuedT, like: torch.Tensor) -> torch.Tensor:
        """Wait for the last `submit`: its result in the shape, the type and on the device of its hidden states,
        `like`.
        """

    def warm_up(self, step: ExpertStep) -> None:
        """Make the GPU launches of a step that the path takes, and nothing else: nothing is counted, the CPU computes
        nothing (kernels/triton/common/compiling.py).
        """


class InlinePath(ExpertPath[torch.Tensor]):
    """A path that computes all experts of a step at once, where they are: it takes every step."""

    @override
    def takes(self, step: ExpertStep) -> bool:
        return True

    @override
    def submit(self, step: ExpertStep) -> torch.Tensor:
        device = self.layer.device
        rows, ids, weights = self.inputs(step)
        device.time_part("experts", self.layer.number)
        return self.compute(rows, ids, weights, step.is_counted).view(step.hidden_states.shape)

    def inputs(self, step: ExpertStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows [T, H], ids and fp32 weights [T, K] of a step on the experts' device."""
        device = self.layer.device
        rows = device.to_device(step.rows()).contiguous()
        weights = step.topk_weights.to(device.torch_device, torch.float32).contiguous()
        return rows, device.move(step.topk_ids), weights

    @abstractmethod
    def compute(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool
    ) -> torch.Tensor:
        """Compute rows [T, H] by ids and fp32 weights [T, K], all on the experts' device -> [T, H]."""

    @override
    def collect(self, issued: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return to_input(issued, like)
