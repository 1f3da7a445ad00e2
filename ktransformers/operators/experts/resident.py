"""The routed experts of one layer on a GPU: matrices in the layouts that the Triton kernels read.

Knows block formats and devices; not routers, modules or where bytes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeEpilogue, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe
from ktransformers.kernels.triton.quant.repack import FP8_COLUMNS, READ_TYPES, GpuLayout, layout_nbytes, repack
from ktransformers.kernels.types import (
    ActivationSpec,
    ExpertWeight,
    ExpertWeights,
    Fp8Matrix,
    OwnType,
    RawTensor,
    WeightType,
)
from ktransformers.operators.device import Device
from ktransformers.operators.linear.matrix import gpu_layout, to_gpu_layout
from ktransformers.operators.linear.upload import upload
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout

__all__ = ["GpuExperts", "bias_nbytes", "can_be_copied", "gpu_experts_nbytes", "why_not_on_gpu"]

_AT_ONCE = 64 << 20  # bytes of experts that are repacked together


def why_not_on_gpu(layout: ExpertsLayout, activation: ActivationSpec | None) -> str | None:
    """Return why the kernels cannot run such experts, or None when they can; types of weights aside."""
    if not layout.has_gate:
        return "they have no gate"
    return "no kernel computes their activation" if activation is None else None


def can_be_copied(qtype: WeightType) -> bool:
    """Whether the kernels read experts of this type as they lie in the CPU's memory."""
    return qtype in READ_TYPES


def bias_nbytes(info: ExpertsInfo) -> int:
    """Return the bytes of all experts' biases, fp32."""
    return info.nbytes - sum(part.nbytes for part in (info.gate, info.up, info.down) if part is not None)


def gpu_experts_nbytes(key: str, info: ExpertsInfo) -> int:
    """Return the bytes of a layer's experts on a GPU, biases included. Raises UnsupportedError for what the kernels do
    not read.
    """
    total, layouts = bias_nbytes(info), list[GpuLayout]()
    for part in (info.gate, info.up, info.down):
        if part is None:
            continue
        count, rows, cols = part.shape
        is_odd_fp8 = part.resident_type is OwnType.F8_E4M3 and cols % FP8_COLUMNS
        if part.resident_type not in READ_TYPES or is_odd_fp8:
            known = ", ".join(sorted(qtype.name for qtype in READ_TYPES))
            raise UnsupportedError(
                f"{key}: experts of type {part.resident_type.name} and {cols} columns cannot run on a GPU (known are "
                f"{known}; FP8 in {FP8_COLUMNS}s of columns); place them on cpu, or quantize unquantized ones while "
                "loading (--cpu_quant)"
            )
        layouts.append(gpu_layout(part.resident_type, rows, cols))
        total += count * layout_nbytes(part.resident_type, rows, cols, layouts[-1])
    if layouts[0] != layouts[-2]:  # of gate and up, if there is a gate
        raise UnsupportedError(
            f"{key}: gate and up projections are of types of which only one is repacked on a GPU, and the kernels want "
            "both or neither; place them on cpu"
        )
    return total


def _matrices(weights: Sequence[ExpertWeight], device: Device, pool: WorkerPool) -> ExpertMatrices:
    """One projection of all experts on the device."""
    fp8 = [weight for weight in weights if isinstance(weight, Fp8Matrix)]
    raw = [weight for weight in weights if isinstance(weight, RawTensor)]
    assert len(weights) in (len(fp8), len(raw)), "experts of one type, in rows as their file has them"
    qtype, (rows, cols) = weights[0].qtype, weights[0].shape
    layout = gpu_layout(qtype, rows, cols)
    nbytes = layout_nbytes(qtype, rows, cols, layout)
    data = torch.empty(len(weights), nbytes, dtype=torch.uint8, device=device.torch_device)
    for slot, weight in enumerate(fp8):
        data[slot] = to_gpu_layout(weight, device, pool)
    step = max(_AT_ONCE // weights[0].nbytes, 1)
    for first in range(0, len(raw), step):
        packed = cpu.pack_all(raw[first : first + step], pool) if layout == GpuLayout.CPU_PACKED else None
        parts = [one.data for one in packed or raw[first : first + step]]
        some = upload(parts, device.torch_device, pool).view(len(parts), -1)
        if layout == GpuLayout.PLANES:
            some = repack(some, raw[0].qtype, rows, cols)
        data[first : first + step] = some.view(-1, nbytes)
    cpu.let_go([*fp8, *raw])
    return ExpertMatrices(data, qtype, rows, cols, layout)


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """The routed experts of one layer on a GPU."""

    device: Device
    matrices: MoeMatrices

    @classmethod
    def of(cls, weights: ExpertWeights, activation: ActivationSpec, device: Device, pool: WorkerPool) -> GpuExperts:
        """Bring one layer's experts to a GPU."""
        assert weights.gate is not None
        gate, up, down = (_matrices(part, device, pool) for part in (weights.gate, weights.up, weights.down))
        return cls(device, MoeMatrices(gate, up, down, MoeEpilogue.of(weights, activation, device.torch_device)))

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Compute x [T, H] of any float type, ids [T, K], weights fp32 [T, K], all on the device -> [T, H] of
        `dtype`.
        """
        rows = x.to(self.device.matmul_dtype).contiguous()
        up, down = self.matrices.up, self.matrices.down
        space = self.device.moe_workspace(rows, topk_ids.shape[1], up.slots, up, down)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        routed = RoutedRows(rows, topk_ids.to(torch.int32).contiguous(), topk_weights.contiguous())
        return moe(routed, self.matrices, out, workspace=space)
