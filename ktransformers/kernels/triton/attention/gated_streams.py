"""Residual streams with gates (Qwen4's hyper-connections) on a GPU: what stands around their two narrow products.

    T rows, N streams of H columns each (a row's are one vector of N H), R columns between the products

    normed    = RMSNorm of each stream of x, weight [N H]
    mixed     = up(silu(down(normed) / N))              [N H]; down and up are products of their own
    collapsed = mean over n of sigmoid(mixed[n]) normed[n]
    weights   = 2 sigmoid(inject(normed) / N)           [N], by which a block's result is added to each stream

Three launches, of which `scaled_silu` stands between the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = ["collapse_streams", "norm_streams", "scaled_silu"]

_BLOCK = 512  # columns of a program


@jit
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_row, eps,
    N: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, N): one stream of a row."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask, at = columns < H, stream * H + columns
    x = tl.load(x_ptr + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    normed = x * tl.load(weight_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + row * N * H + at, normed.to(out_ptr.dtype.element_ty), mask=mask)


def norm_streams(x: Tensor, weight: Tensor, eps: float, streams: int) -> Tensor:
    """Normalize each of the streams of rows [T, N H] (RMSNorm): the same shape and type.

    weight: fp32 [N H]. Raises TypeError or ValueError for a wrong type or shape.
    """
    check_float("x", x, (None, len(weight)))
    check_float("weight", weight, (None,))
    if weight.dtype != torch.float32 or len(weight) % streams:
        raise ValueError(f"weight must be fp32, of {streams} streams, got {weight.dtype} [{len(weight)}]")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = len(weight) // streams
    if len(x):
        block = power_of_two(width)
        _norm_kernel[(len(x), streams)](
            x, weight, out, x.stride(0), float(eps), N=streams, H=width, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


@jit
def _silu_kernel(x_ptr, x_row, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, cdiv(WIDTH, BLOCK)): some columns of a row, in place."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = x_ptr + row * x_row + columns, columns < WIDTH
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(at, (x * tl.sigmoid(x)).to(x_ptr.dtype.element_ty), mask=mask)


def scaled_silu(x: Tensor, factor: float) -> Tensor:
    """Replace rows [T, R] by silu(factor x), in place, and return them."""
    check_float("x", x, (None, None))
    rows, width = x.shape
    if rows:
        block = min(_BLOCK, power_of_two(width))
        _silu_kernel[(rows, -(-width // block))](
            x, x.stride(0), float(factor), WIDTH=width, BLOCK=block, num_warps=max(1, block // 256)
        )
    return x


@jit
def _collapse_kernel(
    normed_ptr, mixed_ptr, inject_ptr, out_ptr, weight_ptr, normed_row, mixed_row, inject_row,
    N: tl.constexpr, N_P2: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Grid (T, cdiv(H, BLOCK)): some columns of a row; the first program writes the row's weights."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(N):
        at = stream * H + columns
        gate = tl.sigmoid(tl.load(mixed_ptr + row * mixed_row + at, mask=mask, other=0.0).to(tl.float32))
        total += gate * tl.load(normed_ptr + row * normed_row + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + columns, (total / N).to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHTS and tile == 0:
        n = tl.arange(0, N_P2)
        inject = tl.load(inject_ptr + row * inject_row + n, mask=n < N, other=0.0).to(tl.float32)
        weights = 2.0 * tl.sigmoid(inject / N)
        tl.store(weight_ptr + row * N + n, weights.to(weight_ptr.dtype.element_ty), mask=n < N)


def collapse_streams(
    normed: Tensor, mixed: Tensor, inject: Tensor | None, streams: int
) -> tuple[Tensor, Tensor | None]:
    """Collapse streams [T, N H] by gates made of `mixed`, the same shape: [T, H], in the type of normed; and the
    weights [T, N] made of inject [T, N], None without.

    Raises TypeError or ValueError for a wrong type or shape.
    """
    check_float("normed", normed, (None, None))
    check_float("mixed", mixed, tuple(normed.shape))
    rows, width = len(normed), normed.shape[1] // streams
    if width * streams != normed.shape[1]:
        raise ValueError(f"{normed.shape[1]} columns are no {streams} streams")
    if inject is not None:
        check_float("inject", inject, (rows, streams))
    out = normed.new_empty(rows, width)
    weights = None if inject is None else normed.new_empty(rows, streams)
    if rows:
        block = min(_BLOCK, power_of_two(width))
        _collapse_kernel[(rows, -(-width // block))](
            normed, mixed, normed if inject is None else inject, out, out if weights is None else weights,
            normed.stride(0), mixed.stride(0), 0 if inject is None else inject.stride(0),
            N=streams, N_P2=power_of_two(streams), H=width, BLOCK=block, HAS_WEIGHTS=weights is not None,
            num_warps=max(1, block // 256),
        )  # fmt: skip
    return out, weights
