"""FP8 weights with block scales on a GPU, a byte each, as DeepSeek-V3 is published: multiplied as they are, or joined.

Knows matrices and devices; not modules or where bytes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.triton import fp8
from ktransformers.kernels.types import FP8_BLOCK, Fp8Matrix
from ktransformers.operators.device import Device

__all__ = ["Fp8GpuMatrix", "can_join_fp8", "fp8_gpu_nbytes", "join_fp8", "takes_fp8"]


def _num_scales(rows: int, cols: int) -> int:
    return -(-rows // FP8_BLOCK) * -(-cols // FP8_BLOCK)


def fp8_gpu_nbytes(rows: int, cols: int) -> int:
    """Bytes on the GPU."""
    return rows * cols + 4 * _num_scales(rows, cols)


def takes_fp8(rows: int, cols: int) -> bool:
    """Whether the kernels take a matrix of this shape; others are dense on a GPU."""
    return cols % 32 == 0 and rows * cols > 0 and fp8_gpu_nbytes(rows, cols) < 2**31


@dataclass(frozen=True, slots=True)
class Fp8GpuMatrix:
    """A GpuMatrix. bias: fp32 [rows] or None."""

    device: Device
    weight: fp8.Fp8Matrix
    bias: torch.Tensor | None

    @classmethod
    def of(cls, weight: Fp8Matrix, bias: torch.Tensor | None, device: Device) -> Fp8GpuMatrix:
        """Bring a matrix to a GPU. The pages of the file it was read from are given back."""
        values, scales = (part.to(device.torch_device) for part in (weight.values, weight.scales))
        packed = fp8.pack_fp8(values, scales)
        cpu.page_out(weight)
        return cls(device, packed, None if bias is None else bias.to(device.torch_device))

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return fp8.fp8_linear(
            x.to(self.device.matmul_dtype),
            self.weight,
            self.bias,
            torch.empty(x.shape[0], self.weight.rows, dtype=out_dtype, device=x.device),
            workspace=self.device.linear_workspace(),
        )


def can_join_fp8(parts: Sequence[Fp8GpuMatrix]) -> bool:
    """Whether the parts can become one matrix: no block of scales may lie across two of them."""
    first = parts[0]
    are_alike = all(
        part.weight.packed and part.weight.cols == first.weight.cols and part.device.name == first.device.name
        for part in parts
    )
    rows = [part.weight.rows for part in parts]
    return are_alike and all(n % FP8_BLOCK == 0 for n in rows[:-1]) and takes_fp8(sum(rows), first.weight.cols)


def join_fp8(parts: Sequence[Fp8GpuMatrix], bias: torch.Tensor | None) -> Fp8GpuMatrix:
    """The rows of all parts as one matrix, with the bias of all; see `can_join_fp8`."""
    first, cols = parts[0], parts[0].weight.cols
    # Rows are the fastest axis of weights (in fours of columns) and of scales.
    codes = [part.weight.data[: part.weight.rows * cols].view(cols // 4, -1) for part in parts]
    scales = [part.weight.data[part.weight.rows * cols :].view(-(-cols // FP8_BLOCK), -1) for part in parts]
    data = torch.cat([torch.cat(group, dim=1).view(-1) for group in (codes, scales)])
    rows = sum(part.weight.rows for part in parts)
    return Fp8GpuMatrix(first.device, fp8.Fp8Matrix(data, rows, cols, packed=True), bias)
