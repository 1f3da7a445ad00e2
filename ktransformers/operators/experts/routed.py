"""Routed experts: issued with `submit`, fetched with `collect`, so that other work can run between the two.

E experts, T tokens, K experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts
from ktransformers.kernels.triton.common.compiling import is_warmup
from ktransformers.kernels.triton.experts.router import Chosen
from ktransformers.kernels.types import ExpertWeight, ExpertWeights, Fp8Matrix
from ktransformers.operators.base import (
    Operator,
    OperatorConfig,
    OperatorRuntime,
    Placement,
    Requirements,
    empty_parameter,
)
from ktransformers.operators.device import STREAM_ROWS, to_input, use
from ktransformers.operators.experts.hot import HotLayer, HotParts
from ktransformers.operators.experts.resident import (
    GpuExperts,
    bias_nbytes,
    can_be_copied,
    gpu_experts_nbytes,
    why_not_on_gpu,
)
from ktransformers.operators.experts.streamed import PrefillLayer, PrefillTicket
from ktransformers.operators.linear.packed import CpuProducts, pack_experts, resident_nbytes
from ktransformers.operators.recognize.activation import expert_activation, recognize_expert_activation
from ktransformers.operators.usage import ExpertUsage
from ktransformers.operators.wrapper import DenseState
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout, TensorInfo, WeightSource

__all__ = ["KTransformersExperts", "Ticket", "read_layout"]

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A forward of routed experts that was issued, for `collect`.

    output: on the device of the experts, None while it is computed in the order of a stream, or by GPU and CPU
    together in a large step (prefill); like: the input, which says where and in which type the result is wanted;
    identity: how much of it is to be added, [T, 1], None for nothing. hot: what the GPU adds to the stream's result.
    """

    like: torch.Tensor
    identity: torch.Tensor | None = None
    output: torch.Tensor | None = None
    stream: AsyncCpuExperts | None = None
    prefill: PrefillTicket | None = None
    hot: HotParts | None = None


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
    another device; results go back to it. `submit` and `collect` are the only places where devices meet: experts on the
    CPU of a layer on a GPU run in the order of its stream, up to STREAM_ROWS rows, and the host waits for more. Where
    its runtime has a PrefillLayer, steps from its threshold on are run by GPU and CPU together; where it has a
    HotLayer, smaller ones are, as far as experts have a slot on the GPU.
    cpu_prefill, cpu_bf16: see KTransformersLinear. hot_experts: "auto", "off" or a number of slots on the GPU, in the
    place of what is said for the whole model; None: that.
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
        self.hot_experts = None if hot_experts is None else str(hot_experts)
        self.products = CpuProducts.of(key, config, **options)
        self.layout = read_layout(module, key)
        self.num_experts = self.layout.num_experts
        found = _LAYER.search(key)
        self._layer = -1 if found is None else int(found.group(1))
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
        self._act = expert_activation(module, self.layout)
        self.gate_up_proj = empty_parameter((self.num_experts, 0, 0))
        self._gpu: GpuExperts | None = None
        self._kernel: cpu.MoeKernel | None = None
        self._weights: ExpertWeights | None = None
        self._streams: dict[AsyncCpuExperts, int] = {}  # and the layer's number in each
        self._prefill: PrefillLayer | None = None
        self._hot: HotLayer | None = None

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        self._hot = runtime.find(HotLayer)
        self._prefill = runtime.find(PrefillLayer) if self._hot is None else self._hot.prefill
        if self._hot is not None:
            self.config.expert_stats.watch_gpu(self._usage())

    @override
    def op(self, phase: Phase) -> str:
        if self.activation is None:
            return "KExpertsTorch"
        return "KExpertsMarlin" if self.device.is_gpu else "KExpertsCPU"

    def _find(self, source: WeightSource) -> ExpertsInfo:
        info = source.find_experts(self.key, self.layout, self.config.cpu_quant)
        if info is None:
            raise TensorMismatchError(f"the experts of {self.key} are missing from the weight files")
        return info

    def _norm_state(self) -> DenseState | None:
        norm = self.post_expert_norm
        return None if norm is None else DenseState(norm, f"{self.key}.post_expert_norm")

    def _resident_nbytes(self, part: TensorInfo) -> int:
        return resident_nbytes(part, self.products)

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        info = self._find(source)
        parts = [part for part in (info.gate, info.up, info.down) if part is not None]
        if self.device.is_gpu:
            nbytes = gpu_experts_nbytes(self.key, info)
        else:
            nbytes = info.nbytes + sum(self._resident_nbytes(part) - part.nbytes for part in parts)
        needs = Requirements(nbytes={self.device.name: nbytes}, stored_names=set(info.stored_names))
        norm = self._norm_state()
        if norm is not None:
            needs.stored_names |= norm.requirements(source).stored_names
        for part in (info.gate, info.up, info.down):
            if part is not None:
                shown = part.resident_type.name
                shown = shown if shown == part.stored_type else f"{part.stored_type}>{shown}"
                if shown not in needs.quant_types:
                    needs.quant_types.append(shown)
        return needs

    def gpu_nbytes(self, source: WeightSource) -> int | None:
        """Return the bytes that these experts would take on a GPU, or None when they cannot run on one."""
        if why_not_on_gpu(self.layout, self.activation) is not None:
            return None
        try:
            return gpu_experts_nbytes(self.key, self._find(source))
        except UnsupportedError:
            return None  # a type that no kernel reads: they stay on the CPU

    def streamed_nbytes(self, source: WeightSource) -> tuple[int, int] | None:
        """Return the bytes of one expert on the CPU and of all experts' biases; None when they cannot be streamed from
        there.
        """
        if self.device.is_gpu or why_not_on_gpu(self.layout, self.activation) is not None:
            return None
        info = self._find(source)
        parts = [part for part in (info.gate, info.up, info.down) if part is not None]
        if not all(can_be_copied(part.resident_type) for part in parts):
            return None
        return sum(self._resident_nbytes(part) for part in parts) // self.num_experts, bias_nbytes(info)

    @property
    def kernel(self) -> cpu.MoeKernel | None:
        """The native kernel of experts that are loaded on the CPU; None for others."""
        return self._kernel

    @override
    def load(self, source: WeightSource) -> None:
        weights = source.experts(self.key, self.layout, self.config.cpu_quant)
        norm, pool = self._norm_state(), self.config.require_pool()
        if norm is not None:
            norm.load(source)
        if self.device.is_gpu:
            assert self.activation is not None, "the constructor refuses such experts"
            self._gpu = GpuExperts.of(weights, self.activation, self.device, pool)
            self.config.expert_stats.watch_gpu(self._usage())
            return
        is_streamed = self.layer_device.is_gpu and self.placement.prefill_device == self.layer_device.name
        is_pinned = is_streamed and self.streamed_nbytes(source) is not None
        self._weights = pack_experts(weights, pool, self.products, is_pinned=is_pinned)
        if self.activation is not None:
            self._kernel = cpu.MoeKernel(self._weights, self.activation, pool, self._layer)
            self.config.expert_stats.watch(self._kernel)

    def chosen(self, num_rows: int, top_k: int) -> Chosen | None:
        """Return what a router on these experts' GPU fills for a step of so many rows; None where they are
        elsewhere.
        """
        slots = None if self._gpu is None or self._layer < 0 else self.device.slots_of(num_rows)
        if slots is None:
            return None
        return self._usage().chosen(self._layer, slots, top_k)

    def _usage(self) -> ExpertUsage:
        device = self.device if self._hot is None else self.layer_device
        facts = self.config.facts
        return device.expert_usage(facts.first_layer + facts.num_layers, self.num_experts)

    def _count(self, ids: torch.Tensor) -> None:
        """ids [T, K] of experts on a GPU, from a router that has not counted them."""
        slots = None if self._layer < 0 else self.device.slots_of(len(ids))
        if slots is not None:
            self._usage().note(self._layer, slots, ids)

    def submit(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool = False
    ) -> Ticket:
        """Issue the forward of [T, H]. The inputs must not change before `collect`, which must come before the next.

        is_counted: the router has filled what `chosen` gave it.
        """
        if not self.layout.num_identities:
            return self._submit(hidden_states, topk_ids, topk_weights, is_counted)
        # The kernels skip the number behind their last expert's.
        is_identity = topk_ids >= self.num_experts
        share = (topk_weights * is_identity).sum(-1, keepdim=True)
        ids = topk_ids.clamp(max=self.num_experts)
        return replace(self._submit(hidden_states, ids, topk_weights, is_counted), identity=share)

    def _submit(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool
    ) -> Ticket:
        device = self.device
        if is_warmup():
            return self._rehearse(hidden_states, topk_ids, topk_weights)
        if self._prefill is not None:
            large = self._prefill.submit(hidden_states, topk_ids, topk_weights)
            if large is not None:
                if self._hot is not None:
                    self._usage().forget(self._layer, topk_ids.shape[0])
                return Ticket(hidden_states, prefill=large)
        if self._runs_in_order(hidden_states):
            return self._submit_in_order(hidden_states, topk_ids, topk_weights)
        rows = device.to_device(hidden_states.reshape(-1, self.layout.hidden_size)).contiguous()
        ids, weights = device.move(topk_ids), topk_weights.to(device.torch_device, torch.float32).contiguous()
        device.time_part("experts", self._layer)
        if self._gpu is not None:
            if not is_counted:
                self._count(ids)
            output = self._gpu.forward(rows, ids, weights)
        elif self._kernel is not None:
            output = self._kernel.forward(rows, ids.contiguous(), weights)
        else:
            self.config.expert_stats.note(ids, self.num_experts, self._layer)
            output = self._torch_forward(rows, ids, weights)
        return Ticket(hidden_states, output=output.view(hidden_states.shape))

    def _rehearse(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Ticket:
        """As `submit`, for its launches alone: nothing is counted, and the CPU is given nothing."""
        rows, device = hidden_states.reshape(-1, self.layout.hidden_size), self.device
        if self._gpu is not None:
            ids, weights = device.move(topk_ids), topk_weights.to(device.torch_device, torch.float32).contiguous()
            self._gpu.forward(device.to_device(rows).contiguous(), ids, weights)
        elif self._prefill is not None:
            self._prefill.warm_up(rows, topk_ids)
        if self._hot is not None and self._runs_in_order(hidden_states):
            self._hot.warm_up(rows, topk_ids, topk_weights, self._layer, self._usage())
        return Ticket(hidden_states, output=torch.zeros_like(hidden_states))

    def _runs_in_order(self, hidden_states: torch.Tensor) -> bool:
        layer_device, most = self.layer_device, STREAM_ROWS * self.layout.hidden_size
        is_there = layer_device.is_gpu and hidden_states.device == layer_device.torch_device
        return self._kernel is not None and is_there and hidden_states.numel() <= most

    def _submit_in_order(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """On the current stream of the layer's GPU: nothing waits, so that a graph can capture it."""
        assert self._kernel is not None
        self.layer_device.time_part("experts", self._layer)
        stream = self.layer_device.async_cpu_expert_stream(
            topk_ids.shape[-1], self.layout.hidden_size, self._kernel.pool
        )
        if stream not in self._streams:
            self._streams[stream] = stream.add_layer(self._kernel)
        rows = hidden_states.reshape(-1, self.layout.hidden_size)
        if self._hot is None:
            stream.submit(self._streams[stream], rows, topk_ids, topk_weights)
            return Ticket(hidden_states, stream=stream)
        use(self.layer_device.torch_device)
        here, there = self._hot.split(topk_ids, self._layer, self._usage(), self.layer_device.slots_of(len(rows)))
        stream.submit(self._streams[stream], rows, there, topk_weights)
        return Ticket(hidden_states, stream=stream, hot=self._hot.launch(rows, here, topk_weights))

    def collect(self, ticket: Ticket) -> torch.Tensor:
        """Wait for the result of `submit`: [T, H], where its input was and of its type."""
        result = self._collect(ticket)
        if ticket.identity is None:
            return result
        like = ticket.like.reshape(-1, self.layout.hidden_size)
        added = like * ticket.identity.to(like.device, like.dtype)
        return result + added.view(result.shape)

    def _collect(self, ticket: Ticket) -> torch.Tensor:
        if ticket.prefill is not None and self._prefill is not None:
            return self._prefill.collect(ticket.prefill, ticket.like)
        if ticket.stream is not None:
            self.layer_device.time_part("wait_cpu")
            rows = ticket.like.reshape(-1, self.layout.hidden_size)
            out = ticket.stream.collect(torch.empty(rows.shape, dtype=ticket.stream.shape.dtype, device=rows.device))
            if ticket.hot is not None:
                out = ticket.hot.sum_onto(out, rows)
            return to_input(out.view(ticket.like.shape), ticket.like)
        assert ticket.output is not None
        return to_input(ticket.output, ticket.like)

    @override
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed = self.collect(self.submit(hidden_states, top_k_index, top_k_weights))
        if self._group is None:
            return routed
        return self._group.sum(routed.float().contiguous()).to(routed.dtype)

    def _torch_forward(self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        assert weights is not None, f"{self.key} is not loaded"
        out = torch.zeros_like(rows)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            if expert == self.num_experts:  # the sentinel of expert parallelism
                continue
            token, slot = torch.where(topk_ids == expert)
            acted = self._expert(weights, expert, rows[token])
            if self.post_expert_norm is not None:
                acted = self.post_expert_norm(acted)
            out.index_add_(0, token, acted * topk_weights[token, slot, None])
        return out

    def _expert(self, weights: ExpertWeights, expert: int, rows: torch.Tensor) -> torch.Tensor:
        pool = self.config.require_pool()

        def project(parts: Sequence[ExpertWeight], bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
            weight = parts[expert]
            assert not isinstance(weight, Fp8Matrix), "load packs it"
            return cpu.linear(x.contiguous(), weight, pool, bias=None if bias is None else bias[expert])

        up = project(weights.up, weights.up_bias, rows)
        if weights.gate is not None:
            both = project(weights.gate, weights.gate_bias, rows), up
            up = torch.cat(both, dim=-1) if self.layout.is_concatenated else torch.stack(both, dim=-1).flatten(-2)
        return project(weights.down, weights.down_bias, self._act(up))
