"""Routed experts: issued with `submit`, fetched with `collect`, so that other work can run between the two.

E experts, T tokens, K experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import MoeKernel
from ktransformers.kernels.triton.common.compiling import is_warmup
from ktransformers.kernels.triton.experts.router import Chosen
from ktransformers.kernels.types import ExpertWeights
from ktransformers.models.composite import VISION_EXPERTS
from ktransformers.operators.base import (
    Operator,
    OperatorConfig,
    OperatorRuntime,
    Placement,
    Requirements,
    empty_parameter,
)
from ktransformers.operators.experts.paths.base import ExpertFunction, ExpertPath, ExpertStep, LayerExperts
from ktransformers.operators.experts.paths.dequantized import TorchPath
from ktransformers.operators.experts.paths.hot import HotPath
from ktransformers.operators.experts.paths.native import NativePath
from ktransformers.operators.experts.paths.resident import ResidentPath
from ktransformers.operators.experts.paths.stream_order import StreamOrderPath
from ktransformers.operators.experts.paths.streamed import StreamedPath
from ktransformers.operators.experts.paths.warm_up import WarmUpPath
from ktransformers.operators.experts.resident import gpu_experts_nbytes, why_not_on_gpu
from ktransformers.operators.linear.packed import CpuProducts
from ktransformers.operators.recognize.activation import expert_activation, recognize_expert_activation
from ktransformers.weights.source import ExpertsLayout, WeightSource

__all__ = ["PATHS", "KTransformersExperts", "Ticket", "read_layout"]

_AnyPath = ExpertPath[Any]

PATHS: Sequence[type[_AnyPath]] = (
    ResidentPath,
    StreamedPath,
    HotPath,
    StreamOrderPath,
    NativePath,
    TorchPath,
)
"""All paths, in the order in which a layer's are asked whether they take a step."""

PathT = TypeVar("PathT", bound=_AnyPath)

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step of routed experts that was issued, for `collect`.

    path: that runs it; issued: what its `submit` left. like: the hidden states, which say where and in which type the
    result is wanted; identity: how much of them is to be added, [T, 1], None for nothing.
    """

    path: _AnyPath
    issued: object
    like: torch.Tensor
    identity: torch.Tensor | None = None


def read_layout(module: nn.Module, key: str) -> ExpertsLayout:
    """Return shape and flags of a `transformers` experts module. Raises UnsupportedError for anything else."""
    down = getattr(module, "down_proj", None)
    has_gate = bool(getattr(module, "has_gate", hasattr(module, "gate_up_proj")))
    first = getattr(module, "gate_up_proj" if has_gate else "up_proj", None)
    if not isinstance(down, nn.Parameter) or not isinstance(first, nn.Parameter) or down.dim() != 3 or first.dim() != 3:
        raise UnsupportedError(
            f"{key} ({type(module).__name__}) is not an experts module of transformers >= 5: it must hold 3-D "
            "gate_up_proj (or up_proj) and down_proj parameters"
        )
    is_transposed = bool(getattr(module, "is_transposed", first.shape[1] == down.shape[2]))
    num_experts, rows, cols = down.shape
    hidden, intermediate = (cols, rows) if is_transposed else (rows, cols)
    fused = 2 * intermediate if has_gate else intermediate
    expected = (hidden, fused) if is_transposed else (fused, hidden)
    if tuple(first.shape[1:]) != expected or len(first) != num_experts + _num_identities(module):
        raise UnsupportedError(f"{key}: expert parameters {tuple(first.shape)} and {tuple(down.shape)} do not fit")
    return ExpertsLayout(
        num_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        has_gate=has_gate,
        has_bias=bool(getattr(module, "has_bias", False)),
        is_transposed=is_transposed,
        is_concatenated=bool(getattr(module, "is_concatenated", True)),
        num_identities=_num_identities(module),
    )


def _num_identities(module: nn.Module) -> int:
    """Experts numbered behind the others that return what they are given, and have no weights (LongCat)."""
    return int(getattr(module, "zero_expert_num", None) or 0)


class KTransformersExperts(Operator):
    """The routed experts of one layer: forward(hidden_states [T, H], topk_ids [T, K], topk_weights [T, K]) -> [T, H].

    Runs on the CPU's SIMD units on the file's own blocks (KExpertsCPU), or, placed on a GPU by generate_device, on
    weights in the file's types there (KExpertsMarlin). An expert activation that no native kernel computes runs on the
    CPU as KExpertsTorch: experts that are hit are dequantized for the step, and the plan says so. Inputs may be on
    another device; results go back to it. `submit` and `collect` are the only places where devices meet.

    paths: the ways in which this layer's experts can be computed; the first that takes a step runs it, see
    experts/paths. cpu_prefill, cpu_bf16: see KTransformersLinear. hot_experts: "auto", "off" or a number of slots on
    the GPU, in the place of what is said for the whole model; None: that.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KExpertsCPU": "native kernels on the file's own blocks",
        "KExpertsTorch": "dequantized experts and torch",
        "KExpertsMarlin": "experts on the GPU, in the types of the file",
    }
    KWARGS: ClassVar[frozenset[str]] = CpuProducts.KWARGS | {"hot_experts"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"act_fn", "identity_expert", "post_expert_norm"})
    PREFILLS_ON_LAYER_DEVICE: ClassVar[bool] = True

    def __init__(
        self,
        module: nn.Module,
        key: str,
        config: OperatorConfig,
        placement: Placement | None = None,
        hot_experts: str | int | None = None,
        **options: str | None,
    ):
        super().__init__(module, key, config, placement)
        self._group = None if config.partial_sums is None else config.partial_sums.of_block(key)
        divided = None if config.partial_sums is None else config.partial_sums.of_experts(key)
        self._is_beside_driver = divided is not None and divided.rank > 0
        self.hot_experts = "off" if VISION_EXPERTS in key else None if hot_experts is None else str(hot_experts)
        self.products = CpuProducts.of(key, config, **options)
        self.layout = read_layout(module, key)
        self.num_experts = self.layout.num_experts
        self.post_expert_norm: nn.Module | None = None  # of each expert's result, before it is weighed
        if getattr(module, "has_post_expert_norm", False):
            self.post_expert_norm = module.get_submodule("post_expert_norm")
        is_plain = self.post_expert_norm is None  # kernels add up what experts give
        self.activation = recognize_expert_activation(module, self.layout) if is_plain else None
        reason = why_not_on_gpu(self.layout, self.activation) if self.device.is_gpu else None
        if reason is not None:
            raise UnsupportedError(f"the experts {key} cannot run on {self.device.name}: {reason}; place them on cpu")
        if self.activation is None:
            logger.warning(
                "%s: no native kernel for its %s, runs as KExpertsTorch (slow)",
                type(module).__name__,
                "activation" if is_plain else "norm behind each expert",
            )
        self.gate_up_proj = empty_parameter((self.num_experts, 0, 0))
        function = ExpertFunction(self.activation, expert_activation(module, self.layout), self.post_expert_norm)
        found = _LAYER.search(key)
        number = -1 if found is None or VISION_EXPERTS in key else int(found.group(1))  # the layer's others have it
        self._experts = LayerExperts(key, number, self.layout, function, self.products, config, self.placement)
        self.paths: list[_AnyPath] = [path(self._experts) for path in PATHS if path.is_for(self._experts)]
        self.path_names = self._named()

    def _named(self) -> str:
        """Layers whose experts take other paths are checked apart (engine/verify), by words: by this one."""
        return ", ".join(path.NAME for path in self.paths)

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs = Requirements()
        for path in self.paths:
            needs.include(path.requirements(source))
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        for path in self.paths:
            path.load(source)

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        self.paths = [path for path in self.paths if path.bind(runtime)]
        self.path_names = self._named()

    @override
    def op(self, phase: Phase) -> str:
        if self.activation is None:
            return "KExpertsTorch"
        return "KExpertsMarlin" if self.device.is_gpu else "KExpertsCPU"

    def gpu_nbytes(self, source: WeightSource) -> int | None:
        """Return the bytes that these experts would take on a GPU, or None when they cannot run on one."""
        if why_not_on_gpu(self.layout, self.activation) is not None:
            return None
        try:
            return gpu_experts_nbytes(self.key, self._experts.find_resident(source))
        except UnsupportedError:
            return None  # a type that no kernel reads: they stay on the CPU

    def is_quantized(self, source: WeightSource) -> bool:
        """Whether these experts are quantized while loading (`cpu_quant`), further than their files are."""
        as_stored = source.find_experts(self.key, self.layout)
        return source.find_experts(self.key, self.layout, self.config.cpu_quant) != as_stored

    def is_divided(self, source: WeightSource) -> bool:
        """Whether each of several processes has a part of these experts: whichever path takes a step."""
        return all(path.divides(source) for path in self.paths)

    def streamed_nbytes(self, source: WeightSource) -> tuple[int, int] | None:
        """Return the bytes of one expert on the CPU and of all experts' biases; None when they cannot be streamed from
        there.
        """
        return self._experts.copied_nbytes(source)

    @property
    def kernel(self) -> MoeKernel | None:
        """The native kernel of experts that are loaded on the CPU; None for others."""
        return self._experts.kernel

    @property
    def weights(self) -> ExpertWeights | None:
        """The weights of experts that are loaded on the CPU, as its kernels take them; None for others."""
        return self._experts.weights

    def path(self, kind: type[PathT]) -> PathT | None:
        """Return this layer's path of a kind, None where it has none."""
        return next((path for path in self.paths if isinstance(path, kind)), None)

    def chosen(self, rows: torch.Tensor, top_k: int) -> Chosen | None:
        """Return what a router on the GPU fills for a step of rows [T, H] that is submitted next; None where nothing of
        it runs there, or is counted elsewhere.
        """
        path = self._taking(rows)
        return None if path is None else path.chosen(rows, top_k)

    def streams(self, rows: torch.Tensor) -> bool:
        """Whether a step of rows [T, H] has its experts copied to the rows' device."""
        return isinstance(self._taking(rows), StreamedPath)

    def _taking(self, rows: torch.Tensor) -> _AnyPath | None:
        step = ExpertStep(rows, rows, rows)  # paths look at the rows alone
        return next((path for path in self.paths if path.takes(step)), None)

    def submit(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool = False
    ) -> Ticket:
        """Issue the forward of [T, H]. The inputs must not change before `collect`, which must come before the next.

        is_counted: the router has filled what `chosen` gave it.
        """
        identity = None
        if self.layout.num_identities:
            topk_ids, identity = self._without_identities(topk_ids, topk_weights)
        step = ExpertStep(hidden_states, topk_ids, topk_weights, is_counted)
        path = WarmUpPath(self._experts, self.paths) if is_warmup() else self.path_of(step)
        return Ticket(path, path.submit(step), hidden_states, identity)

    def _without_identities(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids of experts that have weights, and the sum of the other experts' weights, [T, 1]."""
        is_identity = topk_ids >= self.num_experts
        share = (topk_weights * is_identity).sum(-1, keepdim=True)
        # The kernels skip the number behind their last expert's.
        return topk_ids.clamp(max=self.num_experts), share

    def path_of(self, step: ExpertStep) -> _AnyPath:
        """Return the path that runs a step: the first that takes it."""
        for path in self.paths:
            if path.takes(step):
                return path
        raise RuntimeError(f"{self.key}: none of its paths ({self.path_names}) takes {list(step.hidden_states.shape)}")

    def collect(self, ticket: Ticket) -> torch.Tensor:
        """Wait for the result of `submit`: [T, H], where its input was and of its type; a part of a sum in fp32."""
        result: torch.Tensor = ticket.path.collect(ticket.issued, ticket.like)
        if ticket.identity is None or self._is_beside_driver:
            return result
        like = ticket.like.reshape(-1, self.layout.hidden_size)
        added = like * ticket.identity.to(like.device, like.dtype)
        return result + added.view(result.shape)

    @override
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed = self.collect(self.submit(hidden_states, top_k_index, top_k_weights))
        if self._group is None:
            return routed
        return self._group.sum(routed.float().contiguous()).to(hidden_states.dtype)
