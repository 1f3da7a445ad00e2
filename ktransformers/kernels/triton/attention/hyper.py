"""Hyper-connections (DeepSeek-V4, arXiv 2512.24880) on a GPU: the input of a block, and how its result is mixed.

    T rows, N streams of H columns each (a row's are one vector of N H), S shares of them

    w    = fn x / rms(x)                                   [2 N + N N]: before, behind, between
    pre  = sigmoid(w_0 scale_0 + base_0) + eps             post = 2 sigmoid(w_1 scale_1 + base_1)
    comb = softmax(w_2 scale_2 + base_2) + eps            [N, N], then columns and rows are divided by their sums
    collapsed = sum_n pre[n] x[n]

Two launches: products of shares of the columns, and all that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl
from ktransformers.kernels.types import HyperSpec

__all__ = ["collapse"]

_ROWS = 16  # of a tile
_FEW_ROWS = 64
_COLUMNS = 128  # of a product at a time
_COLLAPSED = 1024  # columns of a program


@jit(do_not_specialize=["T"])
def _product_kernel(
    x_ptr, fn_ptr, mixed_ptr, square_ptr, x_row, T, share,
    WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(T, BM), S): products of some rows with a share of the columns, and their sum of squares."""
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    number = tl.program_id(1)
    outputs = tl.arange(0, WIDTH_P2)
    acc, squares = tl.zeros([BM, WIDTH_P2], tl.float32), tl.zeros([BM], tl.float32)
    for start in range(0, share, BK):
        k = number * share + start + tl.arange(0, BK)
        mask = (start + tl.arange(0, BK) < share) & (k < COLUMNS)
        x = tl.load(x_ptr + rows[:, None] * x_row + k[None, :], mask=(rows < T)[:, None] & mask[None, :], other=0.0)
        x = x.to(tl.float32)
        at = fn_ptr + outputs[:, None] * COLUMNS + k[None, :]
        fn = tl.load(at, mask=(outputs < WIDTH)[:, None] & mask[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(fn), acc, input_precision="tf32x3")
        squares += tl.sum(x * x, 1)
    to = number.to(tl.int64) * T + rows
    tl.store(
        mixed_ptr + to[:, None] * WIDTH + outputs[None, :], acc, mask=(rows < T)[:, None] & (outputs < WIDTH)[None, :]
    )
    tl.store(square_ptr + to, squares, mask=rows < T)


@jit
def _added(mixed, shares, share_stride, first, count: tl.constexpr, S: tl.constexpr, S_P2: tl.constexpr):
    """`count` weights from `first` on, of all shares."""
    columns = tl.arange(0, count)
    parts = tl.load(
        mixed + shares[:, None] * share_stride + first + columns[None, :], mask=(shares < S)[:, None], other=0.0
    )
    return tl.sum(parts, 0)


@jit(do_not_specialize=["T"])
def _collapse_kernel(
    x_ptr, mixed_ptr, square_ptr, base_ptr, scale_ptr, post_ptr, comb_ptr, out_ptr, x_row, T, eps, norm_eps,
    N: tl.constexpr, H: tl.constexpr, S: tl.constexpr, S_P2: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, cdiv(H, BLOCK)): some columns of a row; the first program writes the row's weights."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WIDTH: tl.constexpr = (2 + N) * N
    shares, n = tl.arange(0, S_P2), tl.arange(0, N)
    squares = tl.sum(tl.load(square_ptr + shares * T + row, mask=shares < S, other=0.0), 0)
    norm = 1.0 / tl.sqrt(squares / (N * H) + norm_eps)
    mixed, stride = mixed_ptr + row * WIDTH, T * WIDTH
    pre = _added(mixed, shares, stride, 0, N, S, S_P2) * norm
    pre = tl.sigmoid(pre * tl.load(scale_ptr) + tl.load(base_ptr + n)) + eps
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + n[:, None] * H + columns[None, :], mask=(columns < H)[None, :], other=0.0)
    collapsed = tl.sum(pre[:, None] * x.to(tl.float32), 0)
    tl.store(out_ptr + row * H + columns, collapsed.to(out_ptr.dtype.element_ty), mask=columns < H)
    if tile == 0:
        post = _added(mixed, shares, stride, N, N, S, S_P2) * norm
        post = 2.0 * tl.sigmoid(post * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + n))
        tl.store(post_ptr + row * N + n, post)
        at = tl.arange(0, N * N)
        comb = _added(mixed, shares, stride, 2 * N, N * N, S, S_P2) * norm
        comb = tl.reshape(comb * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + at), [N, N])
        comb = tl.exp(comb - tl.max(comb, 1)[:, None])
        comb = comb / tl.sum(comb, 1)[:, None] + eps
        comb = comb / (tl.sum(comb, 0) + eps)[None, :]
        for _ in range(ITERATIONS - 1):
            comb = comb / (tl.sum(comb, 1) + eps)[:, None]
            comb = comb / (tl.sum(comb, 0) + eps)[None, :]
        tl.store(comb_ptr + row * N * N + n[:, None] * N + n[None, :], comb)


def collapse(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: HyperSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse streams [T, N, H], contiguous: post fp32 [T, N], comb fp32 [T, N, N] and collapsed [T, H], in the type
    of streams.

    fn: fp32 [(2 + N) N, N H], base: fp32 [(2 + N) N], scale: fp32 [3]. N is a power of two. Raises TypeError or
    ValueError for a wrong type or shape.
    """
    rows, num, width = streams.shape
    columns = num * width
    check_float("streams", streams, (None, spec.streams, None))
    check_float("fn", fn, (spec.width, columns))
    check_float("base", base, (spec.width,))
    check_float("scale", scale, (3,))
    if num & (num - 1) or not streams.is_contiguous() or any(w.dtype != torch.float32 for w in (fn, base, scale)):
        raise ValueError(f"streams must be contiguous, {num} of them a power of two, and the weights fp32")
    out = streams.new_empty(rows, width)
    post, comb = (streams.new_empty(shape, dtype=torch.float32) for shape in ((rows, num), (rows, num, num)))
    if not rows:
        return post, comb, out
    shares = 32 if rows <= _FEW_ROWS else 4
    share = -(-columns // shares)
    share = -(-share // _COLUMNS) * _COLUMNS
    shares = -(-columns // share)
    mixed = streams.new_empty(shares, rows, spec.width, dtype=torch.float32)
    squares = streams.new_empty(shares, rows, dtype=torch.float32)
    _product_kernel[(-(-rows // _ROWS), shares)](
        streams, fn, mixed, squares, columns, rows, share, WIDTH=spec.width,
        WIDTH_P2=max(16, power_of_two(spec.width)), COLUMNS=columns, BM=_ROWS, BK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    block = min(_COLLAPSED, power_of_two(width))
    _collapse_kernel[(rows, -(-width // block))](
        streams, mixed, squares, base, scale, post, comb, out, columns, rows, float(spec.eps), float(spec.norm_eps),
        N=num, H=width, S=shares, S_P2=power_of_two(shares), ITERATIONS=spec.iterations, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return post, comb, out
