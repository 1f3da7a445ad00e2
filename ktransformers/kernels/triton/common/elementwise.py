"""Row-wise kernels on the GPU: RMSNorm, activations, gates of heads. Knows tensors; not modules or caches.

Inputs and outputs are fp16, bf16 or fp32 on one device, the last dimension contiguous; arithmetic is fp32 with one
rounding at the end. Grids depend on shapes only. A wrong argument raises TypeError or ValueError that names it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.runtime import jit, tl
from ktransformers.kernels.types import ActivationSpec

__all__ = ["activate", "activated", "activation_value", "add_rms_norm", "check_float", "gate_heads", "rms_norm"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_float(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise TypeError or ValueError unless `tensor` is a float of `shape` (None: any size) with contiguous rows."""
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} must be fp16, bf16 or fp32, got {tensor.dtype}")
    is_fit = tensor.dim() == len(shape) and all(w is None or w == n for n, w in zip(tensor.shape, shape, strict=True))
    if not is_fit:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous, got strides {tensor.stride()}")


@jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, more_ptr, gate_ptr, weight_ptr, out_ptr, sum_ptr,
    x_row, residual_row, more_row, gate_row, out_row, sum_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, HAS_MORE: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): one row. ADDS: what is to be added first; the sum, as it is stored, is what is normalized."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(x_ptr + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        if HAS_MORE:
            more = tl.load(more_ptr + row * more_row + columns, mask=mask, other=0.0).to(tl.float32)
            if HAS_GATE:
                more *= tl.sigmoid(tl.load(gate_ptr + row * gate_row).to(tl.float32))
            x += more
        x += tl.load(residual_ptr + row * residual_row + columns, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * sum_row + columns, stored, mask=mask)
        x = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_row + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _launch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    added: tuple[Tensor, Tensor | None, Tensor | None, Tensor] | None = None,
) -> None:
    """added: residual, more, gate and where the sum goes."""
    rows, width = x.shape
    if rows == 0:
        return
    residual, more, gate, total = added or (None, None, None, None)
    block = _block(width)
    strides = [0 if each is None else each.stride(0) for each in (x, residual, more, gate, out, total)]
    _rms_norm_kernel[(rows,)](
        x, residual, more, gate, weight, out, total, *strides, float(eps),
        WIDTH=width, BLOCK=block, ADDS=residual is not None, HAS_MORE=more is not None, HAS_GATE=gate is not None,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute weight * x / sqrt(mean(x^2) + eps), row by row (Zhang and Sennrich 2019).

    x: [T, H], any row stride. weight: [H]. out: [T, H], made like x when None; may be x.
    """
    check_float("x", x, (None, None))
    check_float("weight", weight, (x.shape[1],))
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    check_float("out", result, tuple(x.shape))
    _launch_norm(x, weight, eps, result)
    return result


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    *,
    more: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(sum), sum) with sum = x + more sigmoid(gate) + residual, rounded to the type of `residual_out`
    first.

    x, residual: [T, H]. more: [T, H], a third addend; gate: [T, 1], logits that weigh its rows (the shared expert of
    qwen2_moe). weight: [H]. out: made like x when None; may be x. residual_out: made like residual when None; may be
    residual, which makes the addition in place.
    """
    check_float("x", x, (None, None))
    check_float("residual", residual, tuple(x.shape))
    check_float("weight", weight, (x.shape[1],))
    if more is not None:
        check_float("more", more, tuple(x.shape))
    if gate is not None:
        if more is None:
            raise ValueError("gate weighs the rows of more, which is None")
        check_float("gate", gate, (x.shape[0], 1))
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    total = torch.empty_like(residual, memory_format=torch.contiguous_format) if residual_out is None else residual_out
    check_float("out", result, tuple(x.shape))
    check_float("residual_out", total, tuple(x.shape))
    _launch_norm(x, weight, eps, result, (residual, more, gate, total))
    return result, total


@jit
def _tanh(x):
    small = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|)
    return tl.where(x < 0.0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)


@jit
def activation_value(x, up, alpha, limit, KIND: tl.constexpr, HAS_GATE: tl.constexpr):
    """Return act(x) * up, or act(x) without a gate; fp32."""
    if KIND == "SILU":
        y = x * tl.sigmoid(x)
    elif KIND == "GELU":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "GELU_TANH":
        y = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "RELU":
        y = tl.maximum(x, 0.0)
    elif KIND == "RELU2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "SIGMOID":
        y = tl.sigmoid(x)
    elif KIND == "SWIGLU_CLAMPED":
        x = tl.minimum(x, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = x * tl.sigmoid(x)
    elif KIND == "SWIGLU_OAI":
        x = tl.minimum(x, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        y = x * tl.sigmoid(alpha * x)
    else:
        tl.static_assert(False, "no formula for this activation")
    if HAS_GATE:
        y *= up
    return y


@jit
def _activation_kernel(
    gate_ptr, up_ptr, out_ptr, gate_row, up_row, out_row, alpha, limit,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, cdiv(WIDTH, BLOCK)): BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    up = tl.load(up_ptr + row * up_row + columns, mask=mask, other=0.0).to(tl.float32)
    x = up
    if HAS_GATE:
        x = tl.load(gate_ptr + row * gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    y = activation_value(x, up, alpha, limit, KIND, HAS_GATE)
    tl.store(out_ptr + row * out_row + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def activate(spec: ActivationSpec, gate: Tensor | None, up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute act(gate) * up, or act(up) when gate is None, as `cpu.activate`.

    gate, up: [T, I], any row stride, so both may be halves of one [T, 2 I]. out: [T, I], made like up when None; may
    be gate or up.
    """
    check_float("up", up, (None, None))
    if gate is not None:
        check_float("gate", gate, tuple(up.shape))
    elif spec.kind.is_clamped:
        raise ValueError(f"{spec.kind.name} needs a gate")
    result = torch.empty_like(up, memory_format=torch.contiguous_format) if out is None else out
    check_float("out", result, tuple(up.shape))
    rows, width = up.shape
    if result.numel() == 0:
        return result
    block = min(1024, _block(width))
    _activation_kernel[(rows, -(-width // block))](
        gate, up, result, 0 if gate is None else gate.stride(0), up.stride(0), result.stride(0),
        float(spec.alpha), float(spec.limit),
        WIDTH=width, BLOCK=block, KIND=spec.kind.name, HAS_GATE=gate is not None, num_warps=max(1, block // 256),
    )  # fmt: skip
    return result


@jit
def _gate_heads_kernel(
    x_ptr, gate_ptr, out_ptr, x_row, x_head, gate_row, gate_head, out_row, out_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, cdiv(WIDTH, BLOCK)): BLOCK of the WIDTH columns that the heads of a row have."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    head, column = columns // DIM, columns % DIM
    x = tl.load(x_ptr + row * x_row + head * x_head + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + head * gate_head + column, mask=mask, other=0.0).to(tl.float32)
    out = (x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_row + head * out_head + column, out, mask=mask)


def gate_heads(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x sigmoid(gate), head by head (the gated attention of qwen3_next).

    x, gate: [T, heads, D], any row and head strides. out: the same shape, made like x when None; may be x.
    """
    check_float("x", x, (None, None, None))
    check_float("gate", gate, tuple(x.shape))
    result = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    check_float("out", result, tuple(x.shape))
    rows, heads, dim = x.shape
    if result.numel() == 0:
        return result
    width = heads * dim
    block = min(1024, _block(width))
    _gate_heads_kernel[(rows, -(-width // block))](
        x, gate, result, *x.stride()[:2], *gate.stride()[:2], *result.stride()[:2],
        DIM=dim, WIDTH=width, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return result


@jit
def activated(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the input of experts' down projection. ALPHA, LIMIT: of activations that have them."""
    if ACT == "SILU":
        return gate / (1.0 + tl.exp(-gate)) * up
    return activation_value(gate, up, ALPHA, LIMIT, ACT, True)
