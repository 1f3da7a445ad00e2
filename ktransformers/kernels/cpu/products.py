"""Products of fp32 rows with one matrix, and with a batch of independent ones."""

from __future__ import annotations

from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor, check_weight, layout_of, output
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import PackedTensor, RawTensor
from ktransformers.kernels.untraced import untraced

__all__ = ["batched_linear", "linear"]


@untraced
def linear(
    x: Tensor,
    weight: RawTensor | PackedTensor,
    pool: WorkerPool,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute out[t, n] = sum_k x[t, k] * weight[n, k] + bias[n].

    x: [T, K]. weight: [N, K], of a type in NATIVE_TYPES, or packed by `pack`. bias: [N]. out: [T, N], made when None.
    Quantized weights other than FP8 quantize each row of x to int8 by blocks (32 values for Q8_0, Q4_0 and MXFP4, 256
    for K-quants and IQ types); a block of x that holds a NaN or an infinity makes that whole output row NaN.
    Packed BF16 weights, and other packed ones that want it (PackedTensor.wants_bf16) for MANY_TOKENS tokens or more,
    are multiplied in bf16, x rounded to it: |out - exact| <= 0.0040 (BF16) or 0.0092 (others) * sum_k |x weight| and
    a little more (csrc/kernels/bf16/bf16.inl), the same for a row whatever else the call holds, but not in every tier.
    """
    check_weight("weight", weight, 2)
    rows, cols = weight.shape
    check_tensor("x", x, (None, cols))
    if bias is not None:
        check_tensor("bias", bias, (rows,))
    result = output(out, (x.shape[0], rows), x)
    extension.linear(
        pool.handle,
        x.data_ptr(),
        x.shape[0],
        weight.data.data_ptr(),
        int(weight.qtype),
        layout_of(weight),
        rows,
        cols,
        0 if bias is None else bias.data_ptr(),
        result.data_ptr(),
    )
    return result


@untraced
def batched_linear(x: Tensor, weight: RawTensor, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Compute out[t, b, n] = sum_k x[t, b, k] * weight[b, n, k]: B independent matrices, as in MLA's absorbed
    projections.

    x: [T, B, K]. weight: [B, N, K]. out: [T, B, N], made when None. Quantization as in `linear`.
    """
    check_weight("weight", weight, 3)
    batch, rows, cols = weight.shape
    check_tensor("x", x, (None, batch, cols))
    result = output(out, (x.shape[0], batch, rows), x)
    extension.batched_linear(
        pool.handle,
        x.data_ptr(),
        x.shape[0],
        batch,
        weight.data.data_ptr(),
        int(weight.qtype),
        rows,
        cols,
        result.data_ptr(),
    )
    return result
