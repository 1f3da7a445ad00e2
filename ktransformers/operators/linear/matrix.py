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
from ktransformers.kernels.triton.linear.linear import linear
from ktransformers.kernels.triton.quant.dequant import WeightMatrix
from ktransformers.kernels.triton.quant.repack import (
    CPU_PACKED_TYPES,
    FP8_COLUMNS,
    GPU_TYPES,
    GpuLayout,
    can_repack,
    layout_nbytes,
    repack,
    repack_fp8,
)
from ktransformers.kernels.types import Fp8Matrix, OwnType, QuantType, RawTensor, WeightType, fp8_nbytes
from ktransformers.operators.device import Device
from ktransformers.operators.linear.upload import upload

__all__ = [
    "DenseMatrix",
    "GpuMatrix",
    "QuantizedMatrix",
    "dense_tensor",
    "fp32_product",
    "gpu_layout",
    "gpu_matrix",
    "gpu_nbytes",
    "stays_quantized",
    "takes_fp8",
    "to_gpu_layout",
]

_FLOATS = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
_PIECE = 1 << 26  # weights widened at once


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A dense matrix on a GPU. weight: [N, K] in the device's type; bias: [N] in it, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, K] of the device's type -> [T, N]."""
        return functional.linear(x, self.weight, self.bias).to(out_dtype)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized matrix on a GPU. weight: [N, K]; bias: fp32 [N] or None."""

    device: Device
    weight: WeightMatrix
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] -> [T, N], written to `out` of `out_dtype` if that is given."""
        if out is None:
            out = torch.empty(x.shape[0], self.weight.rows, dtype=out_dtype, device=x.device)
        space = self.device.linear_workspace()
        return linear(x.to(self.device.matmul_dtype), self.weight, self.bias, out, workspace=space)


class GpuMatrix(Protocol):
    """A matrix [N, K] on a GPU: called with x [T, K], it returns [T, N]."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, K] -> [T, N]."""


def fp32_product(matrix: GpuMatrix, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [T, K] without rounding the result: fp32 [T, N]. memory: where it goes if the kernel can write there,
    fp32 [T, N].
    """
    if isinstance(matrix, QuantizedMatrix):
        return matrix(x, torch.float32, memory)
    if not isinstance(matrix, DenseMatrix) or not x.is_cuda or x.dtype is torch.float32:
        return matrix(x, torch.float32)  # in the interpreter of tests torch has no product of bf16 in fp32
    product = torch.mm(x, matrix.weight.t(), out_dtype=torch.float32)
    return product if matrix.bias is None else product.add_(matrix.bias)


def stays_quantized(qtype: WeightType, is_dense_wanted: bool) -> bool:
    """Whether a matrix of this type is multiplied as it is; others are dense on a GPU."""
    return (isinstance(qtype, OwnType) or qtype in GPU_TYPES | CPU_PACKED_TYPES) and not is_dense_wanted


def takes_fp8(rows: int, cols: int) -> bool:
    """Whether the kernels take an FP8 matrix of this shape; others are dense on a GPU."""
    return cols % FP8_COLUMNS == 0 and rows * cols > 0 and fp8_nbytes(rows, cols) < 2**31


def gpu_nbytes(qtype: WeightType, shape: tuple[int, int], device: Device, is_dense_wanted: bool) -> int:
    """Return the bytes on the GPU of a matrix of this shape."""
    rows, cols = shape
    if not stays_quantized(qtype, is_dense_wanted):
        return rows * cols * device.dtype.itemsize
    return layout_nbytes(qtype, rows, cols, gpu_layout(qtype, rows, cols))


def gpu_layout(qtype: WeightType, rows: int, cols: int) -> GpuLayout:
    """Return the layout of a matrix that rests on a GPU."""
    if qtype in CPU_PACKED_TYPES:
        return GpuLayout.CPU_PACKED
    return GpuLayout.PLANES if can_repack(qtype, rows, cols) else GpuLayout.ROWS


def dense_tensor(weight: RawTensor, device: Device, pool: WorkerPool) -> torch.Tensor:
    """Return `weight` on `device` in its type, with the weight's shape; widened on the CPU piece by piece."""
    if weight.qtype in _FLOATS:
        dtype = _FLOATS[weight.qtype]
        if dtype == device.dtype:
            return upload([weight.data], device.torch_device, pool).view(dtype).view(weight.shape)
        return weight.data.view(dtype).view(weight.shape).to(device.torch_device, device.dtype)
    out = torch.empty(weight.rows, weight.cols, dtype=device.dtype, device=device.torch_device)
    step, flat = max(_PIECE // weight.cols, 1), weight.reshape((weight.rows, weight.cols))
    for start in range(0, weight.rows, step):
        ids = torch.arange(start, min(start + step, weight.rows))
        out[start : start + step] = cpu.dequantize_rows(flat, ids, pool).to(device.torch_device)
    return out.view(weight.shape)


def to_gpu_layout(weight: RawTensor | Fp8Matrix, device: Device, pool: WorkerPool) -> torch.Tensor:
    """Return the bytes of a matrix [N, K] on the device, in the layout that `gpu_layout` says."""
    if isinstance(weight, Fp8Matrix):
        values = upload([weight.values], device.torch_device, pool).view(weight.shape)
        return repack_fp8(Fp8Matrix(values, weight.scales.to(device.torch_device)))
    if weight.qtype in CPU_PACKED_TYPES:
        return upload([cpu.pack(weight, pool).data], device.torch_device, pool)
    data = upload([weight.data], device.torch_device, pool)
    return repack(data, weight.qtype, *weight.shape) if can_repack(weight.qtype, *weight.shape) else data


def gpu_matrix(
    weight: RawTensor | Fp8Matrix, bias: torch.Tensor | None, device: Device, pool: WorkerPool, is_dense_wanted: bool
) -> GpuMatrix:
    """Bring a matrix [N, K] to a GPU. Pages of a file that were read through its map are given back."""
    rows, cols = weight.shape
    if isinstance(weight, RawTensor) and not stays_quantized(weight.qtype, is_dense_wanted):
        made = DenseMatrix(dense_tensor(weight, device, pool), None if bias is None else device.to_device(bias))
        cpu.page_out(weight)
        return made
    data, layout = to_gpu_layout(weight, device, pool), gpu_layout(weight.qtype, rows, cols)
    cpu.let_go([weight])
    bias = None if bias is None else bias.to(device.torch_device)
    return QuantizedMatrix(device, WeightMatrix(data, weight.qtype, rows, cols, layout), bias)
