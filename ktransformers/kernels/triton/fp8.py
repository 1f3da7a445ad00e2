"""Products with FP8 (e4m3) weights that have one fp32 scale for 128 x 128 of them, as DeepSeek-V3 is published.

Weights are widened in registers; activations stay fp16 or bf16. The kernels are those of linear.py: FP8 is one more
type of dequant.py, re-laid like the others (int32 [K / 4, N], then the scales, fp32 [K / 128, N / 128]). Knows the
layout; does not know names of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.triton.bits import F8_E4M3_TYPE
from ktransformers.kernels.triton.linear import Rows, Workspace, launch
from ktransformers.kernels.triton.packing import ROW_MULTIPLE, Layout

__all__ = ["FP8_COLUMNS", "Fp8Matrix", "fp8_linear", "pack_fp8"]

FP8_COLUMNS = 32
"""What the columns of a matrix must be a multiple of."""
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [rows, cols] and its scales in one tensor; made by `pack_fp8`.

    data: uint8, 1-D. packed: rows fastest (rows a multiple of 8), else the bytes as they were, with the scales behind.
    """

    data: Tensor
    rows: int
    cols: int
    packed: bool


def pack_fp8(weight: Tensor, scales: Tensor) -> Fp8Matrix:
    """Lay a matrix out for `fp8_linear`, on its device.

    weight: float8_e4m3fn (or its bytes, uint8) [N, K], K a multiple of 32. scales: fp32 [ceil(N / 128), ceil(K / 128)],
    what each weight is to be multiplied by (`weight_scale_inv` of the checkpoints). Weights must be finite: e4m3's NaN
    is read as 480. Raises TypeError or ValueError for arguments that do not fit.
    """
    if weight.dtype not in (torch.float8_e4m3fn, torch.uint8) or scales.dtype != torch.float32:
        raise TypeError(f"weight must be float8_e4m3fn and scales float32, got {weight.dtype} and {scales.dtype}")
    rows, cols = weight.shape
    blocks = (-(-rows // _BLOCK), -(-cols // _BLOCK))
    if cols % FP8_COLUMNS or tuple(scales.shape) != blocks:
        raise ValueError(f"weight [{rows}, {cols}] needs columns in 32s and scales {blocks}, got {tuple(scales.shape)}")
    if rows * cols + 4 * scales.numel() >= 2**31:
        raise ValueError(f"a matrix [{rows}, {cols}] is too large for 32-bit offsets")
    values = weight.view(torch.uint8)
    packed = rows % ROW_MULTIPLE == 0
    if packed:
        values = values.reshape(rows, cols // 4, 4).transpose(0, 1)
        scales = scales.T
    data = torch.cat([values.reshape(-1), scales.reshape(-1).view(torch.uint8)])
    return Fp8Matrix(data, rows, cols, packed)


def fp8_linear(
    x: Tensor,
    weight: Fp8Matrix,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
) -> Tensor:
    """out[t, n] = sum_k x[t, k] W[n, k] + bias[n]; arguments, dtypes and errors as in `linear.linear`.

    Up to VECTOR_ROWS rows of x weights times scale are fp32, above they are rounded to x's dtype.
    """
    layout = Layout.GPU if weight.packed else Layout.GGML
    rows = (Rows(weight.data, F8_E4M3_TYPE, weight.rows),)
    return launch(x, rows, weight.cols, bias, out, layout, workspace)
