"""A weight matrix on a GPU: quantized in the layout of the Triton kernels, or dense in the device's type.

Knows block formats and devices; not modules or where bytes come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.linear import linear
from ktransformers.kernels.triton.packing import GPU_TYPES, Layout, can_repack, packed_nbytes, repack
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.operators.device import Device

__all__ = ["DenseMatrix", "GpuMatrix", "QuantizedMatrix", "dense_tensor", "gpu_matrix", "gpu_nbytes", "stays_quantized"]

_FLOATS = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
_PIECE = 1 << 26  # weights widened at once


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """weight: [N, K] in the device's type; bias: [N] in it, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, K] of the device's type -> [T, N]."""
        return functional.linear(x, self.weight, self.bias).to(out_dtype)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """data: the matrix [rows, cols] in `layout`; bias: fp32 [rows] or None."""

    device: Device
    data: torch.Tensor
    qtype: QuantType
    rows: int
    cols: int
    layout: Layout
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return linear(
            x.to(self.device.matmul_dtype),
            self.data,
            self.qtype,
            self.rows,
            self.cols,
            self.bias,
            torch.empty(x.shape[0], self.rows, dtype=out_dtype, device=x.device),
            layout=self.layout,
            workspace=self.device.linear_workspace(),
        )


class GpuMatrix(Protocol):
    """A matrix [N, K] on a GPU that multiplies."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, K] -> [T, N]."""


def stays_quantized(qtype: QuantType, is_dense_wanted: bool) -> bool:
    """Whether a matrix of this type is multiplied as it is; others are dense on a GPU."""
    return qtype in GPU_TYPES and not is_dense_wanted


def gpu_nbytes(qtype: QuantType, shape: tuple[int, int], device: Device, is_dense_wanted: bool, nbytes: int) -> int:
    """Bytes on the GPU of a matrix of this shape that has `nbytes` in ggml's layout."""
    rows, cols = shape
    if not stays_quantized(qtype, is_dense_wanted):
        return rows * cols * device.dtype.itemsize
    return packed_nbytes(qtype, rows, cols) if can_repack(qtype, rows, cols) else nbytes


def dense_tensor(weight: RawTensor, device: Device, pool: WorkerPool) -> torch.Tensor:
    """`weight` on `device` in its type, with the weight's shape; widened on the CPU piece by piece."""
    if weight.qtype in _FLOATS:
        return weight.data.view(_FLOATS[weight.qtype]).view(weight.shape).to(device.torch_device, device.dtype)
    out = torch.empty(weight.rows, weight.cols, dtype=device.dtype, device=device.torch_device)
    step, flat = max(_PIECE // weight.cols, 1), weight.reshape((weight.rows, weight.cols))
    for start in range(0, weight.rows, step):
        ids = torch.arange(start, min(start + step, weight.rows))
        out[start : start + step] = cpu.dequantize_rows(flat, ids, pool).to(device.torch_device)
    return out.view(weight.shape)


def gpu_matrix(
    weight: RawTensor, bias: torch.Tensor | None, device: Device, pool: WorkerPool, is_dense_wanted: bool
) -> GpuMatrix:
    """Bring a matrix [N, K] to a GPU. The pages of the file it was read from are given back."""
    rows, cols = weight.shape
    if not stays_quantized(weight.qtype, is_dense_wanted):
        made = DenseMatrix(dense_tensor(weight, device, pool), None if bias is None else device.take(bias))
        cpu.page_out(weight)
        return made
    data, layout = weight.data.to(device.torch_device), Layout.GGML
    if can_repack(weight.qtype, rows, cols):
        data, layout = repack(data, weight.qtype, rows, cols), Layout.GPU
    cpu.page_out(weight)
    bias = None if bias is None else bias.to(device.torch_device)
    return QuantizedMatrix(device, data, weight.qtype, rows, cols, layout, bias)
