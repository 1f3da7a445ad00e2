"""The routed experts of one layer on a GPU: quantized matrices in the layout of the Triton kernels.

Knows block formats and devices; not routers, modules or where bytes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels import native
from ktransformers.kernels.native import ActivationSpec, ExpertWeights
from ktransformers.kernels.quant import Fp8Matrix, PackedTensor, RawTensor, WeightType
from ktransformers.kernels.triton.moe import Between, ExpertMatrices, moe
from ktransformers.kernels.triton.packing import GPU_TYPES, Layout, can_repack, packed_nbytes, repack
from ktransformers.operators.device import Device
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout

__all__ = ["GpuExperts", "bias_nbytes", "can_be_copied", "gpu_experts_nbytes", "why_not_on_gpu"]

_AT_ONCE = 64 << 20  # bytes of experts that are re-laid together


def why_not_on_gpu(layout: ExpertsLayout, activation: ActivationSpec | None) -> str | None:
    """Why the kernels cannot run such experts, or None when they can; types of weights aside."""
    if not layout.has_gate:
        return "they have no gate"
    return "no kernel computes their activation" if activation is None else None


def can_be_copied(qtype: WeightType) -> bool:
    """Whether the kernels read experts of this type as they lie in the CPU's memory."""
    return qtype in GPU_TYPES


def bias_nbytes(info: ExpertsInfo) -> int:
    """Bytes of all experts' biases, fp32."""
    return info.nbytes - sum(part.nbytes for part in (info.gate, info.up, info.down) if part is not None)


def gpu_experts_nbytes(key: str, info: ExpertsInfo) -> int:
    """Bytes on a GPU, biases included. Raises UnsupportedError for types that the kernels do not read."""
    total = bias_nbytes(info)
    for part in (info.gate, info.up, info.down):
        if part is None:
            continue
        if part.resident_type not in GPU_TYPES:
            known = ", ".join(sorted(qtype.name for qtype in GPU_TYPES))
            raise UnsupportedError(
                f"{key}: experts of type {part.resident_type.name} cannot run on a GPU (known are {known}); "
                "place them on cpu, or quantize unquantized ones while loading (--cpu_quant)"
            )
        count, rows, cols = part.shape
        packed = can_repack(part.resident_type, rows, cols)
        total += count * packed_nbytes(part.resident_type, rows, cols) if packed else part.nbytes
    return total


def _matrices(weights: Sequence[RawTensor | PackedTensor], device: Device) -> ExpertMatrices:
    """One projection of all experts on the device. The pages of the file are given back."""
    raw = [weight for weight in weights if isinstance(weight, RawTensor)]
    assert len(raw) == len(weights), "experts come from their file in ggml's layout"
    qtype, (rows, cols) = raw[0].qtype, raw[0].shape
    if not can_repack(qtype, rows, cols):
        data = torch.stack([weight.data for weight in raw]).to(device.torch_device)
        return ExpertMatrices(data, qtype, rows, cols, Layout.GGML)
    nbytes = packed_nbytes(qtype, rows, cols)
    data = torch.empty(len(raw), nbytes, dtype=torch.uint8, device=device.torch_device)
    step = max(_AT_ONCE // raw[0].nbytes, 1)
    for first in range(0, len(raw), step):
        some = torch.stack([weight.data for weight in raw[first : first + step]]).to(device.torch_device)
        data[first : first + step] = repack(some, qtype, rows, cols).view(-1, nbytes)
    for weight in raw:
        native.page_out(weight)
    return ExpertMatrices(data, qtype, rows, cols, Layout.GPU)


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """gate, up: E matrices [I, H]; down: E matrices [H, I]. between: activation and biases."""

    device: Device
    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    between: Between

    @classmethod
    def of(cls, weights: ExpertWeights, activation: ActivationSpec, device: Device) -> GpuExperts:
        """Bring one layer's experts to a GPU."""
        assert weights.gate is not None
        parts = [
            [one for one in part if not isinstance(one, Fp8Matrix)] for part in (weights.gate, weights.up, weights.down)
        ]
        if any(len(part) < len(weights.up) for part in parts):
            raise UnsupportedError(
                "FP8 experts run on the CPU only: place them there, or quantize them with --cpu_quant"
            )
        gate, up, down = (_matrices(part, device) for part in parts)
        if gate.layout != up.layout:
            raise UnsupportedError("gate and up projections of one layer must be both re-laid or neither")
        return cls(device, gate, up, down, Between.of(weights, activation, device.torch_device))

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """x [T, H] of any float type, ids [T, K], weights fp32 [T, K], all on the device -> [T, H] of x's type."""
        rows = x.to(self.device.matmul_dtype).contiguous()
        space = self.device.moe_workspace(rows, topk_ids.shape[1], self.up.slots, self.up, self.down)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.contiguous()
        return moe(rows, ids, weights, self.gate, self.up, self.down, out, workspace=space, between=self.between)
