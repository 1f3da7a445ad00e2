"""Activations as whole numbers: the input of products with weights of 8 bits or fewer, four in one instruction.

32 columns share a power of two d, and a number is d q with an integer |q| < 2^15, whose two bytes go into two planes:
x = d (256 a + b), a signed. |x - d q| <= d / 2 (d for the largest q), and d <= 2^-14 of the largest magnitude among the
32: the 8 bits of a bf16 are kept for numbers down to 2^-7 of it, and what others lose is less than what the largest
lost when it became a bf16. One block of 32 columns is 32 words:

    words 0-7   8-15   16        17, 18                                     19                       20-31
          b      a      d, fp32   sums of q of columns 0-15, 16-31, int32    d times both sums, fp32   not used

Four columns side by side fill a word, in one of two orders. Natural: word i has columns 4 i .. 4 i + 3. Strided: word
4 h + r has columns 16 h + r + 4 p in its bytes p = 0 .. 3; these are columns whose signs lie four bits apart
(cpu_packed_grid.py). A block with a number that is not finite has NaN for d. Knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.runtime import jit, tl, triton

__all__ = [
    "BLOCK_WORDS",
    "PairOrder",
    "block_int16_shape",
    "block_sums",
    "byte_plane_word",
    "load_block_int16",
    "quantize_block_int16",
    "store_block_int16",
]

#: Words of a block of 32 columns.
BLOCK_WORDS = 32
_BLOCKS = 8  # of one program


@jit
def load_block_int16(at, inside, EVEN: tl.constexpr):
    """Load the 16 words of blocks as 8 int64 [P, 1], and d, fp32 [P, 1]; zeros where not inside.

    at: int32 pointers to the blocks [P, 1]. EVEN: all are inside.
    """
    words = at.to(tl.pointer_type(tl.int64))
    mask = None if EVEN else inside
    other = None if EVEN else 0
    planes = (
        tl.load(words, mask=mask, other=other), tl.load(words + 1, mask=mask, other=other),
        tl.load(words + 2, mask=mask, other=other), tl.load(words + 3, mask=mask, other=other),
        tl.load(words + 4, mask=mask, other=other), tl.load(words + 5, mask=mask, other=other),
        tl.load(words + 6, mask=mask, other=other), tl.load(words + 7, mask=mask, other=other),
    )  # fmt: skip
    return planes, tl.load((at + 16).to(tl.pointer_type(tl.float32)), mask=mask, other=other)


@jit
def block_sums(at, inside, EVEN: tl.constexpr):
    """Load the sums of blocks that `load_block_int16` loads: of q of both halves, int32, and d times their sum, fp32;
    [P, 1].
    """
    mask = None if EVEN else inside
    other = None if EVEN else 0
    first, second = tl.load(at + 17, mask=mask, other=other), tl.load(at + 18, mask=mask, other=other)
    return first, second, tl.load((at + 19).to(tl.pointer_type(tl.float32)), mask=mask, other=other)


@jit
def byte_plane_word(planes, plane: tl.constexpr, i: tl.constexpr):
    """Return word i of plane 0 (the lower block-wise int16) or 1, of what `load_block_int16` gave."""
    both = planes[4 * plane + i // 2]
    if i % 2 == 1:
        both = both >> 32
    return both.to(tl.int32)


@jit
def store_block_int16(row, block, values, mask, STRIDED: tl.constexpr):
    """Write blocks of a row as block-wise int16. row: int32 pointer to its first; block: int32 [B]; values: fp32 [B,
    32]; mask: [B].
    """
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponent = tl.maximum(largest >> 23, 40)  # below, all numbers are as good as zero
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^14 over the power of two in the largest
    d = tl.where(largest >= 0x7F800000, 0x7FC00000, (exponent - 14) << 23).to(tl.float32, bitcast=True)
    finite = tl.where((largest < 0x7F800000)[:, None], values, 0.0)
    q = tl.minimum(tl.floor(finite * up[:, None] + 0.5), 32767.0).to(tl.int32)
    c = tl.arange(0, 32)[None, :]
    place = c // 16 * 16 + c % 4 * 4 + c // 4 % 4 if STRIDED else c
    at = row + block * 32
    bytes_at = at[:, None].to(tl.pointer_type(tl.int8)) + place
    tl.store(bytes_at, q.to(tl.int8), mask=mask[:, None])
    tl.store(bytes_at + 32, (q >> 8).to(tl.int8), mask=mask[:, None])
    tl.store((at + 16).to(tl.pointer_type(tl.float32)), d, mask=mask)
    first = tl.sum(tl.where(c < 16, q, 0), axis=1)
    total = tl.sum(q, axis=1)
    tl.store(at + 17, first, mask=mask)
    tl.store(at + 18, total - first, mask=mask)
    tl.store((at + 19).to(tl.pointer_type(tl.float32)), d * total.to(tl.float32), mask=mask)


@jit
def _order_pairs(ids, order, P, first, E: tl.constexpr, BLOCK: tl.constexpr):
    """Write pairs first .. first + BLOCK - 1 where they come in the order of their experts, unknown ones last."""
    own = first + tl.arange(0, BLOCK)[:, None]
    expert = tl.load(ids + own, mask=own < P, other=E)
    expert = tl.where((expert >= 0) & (expert < E), expert, E)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, P, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        other = tl.load(ids + at, mask=at < P, other=E)
        other = tl.where((other >= 0) & (other < E), other, E)
        is_before = (other < expert) | ((other == expert) & (at < own))
        rank += tl.sum((is_before & (at < P)).to(tl.int32), axis=1)
    tl.store(order + rank[:, None], own, mask=own < P)


@jit(do_not_specialize=["T", "P"])
def _block_int16_kernel(x, stride, out, ids, order, T, P, E: tl.constexpr, K: tl.constexpr, STRIDED: tl.constexpr,
                   BLOCKS: tl.constexpr):  # fmt: skip
    """Grid (blocks of a row, T rows, and with P pairs to order one more)."""
    row = tl.program_id(1)
    if row < T:
        block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        columns = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        values = tl.load(x + row.to(tl.int64) * stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        store_block_int16(out + row * K, block, values, block < K // 32, STRIDED)
    else:
        for first in range(tl.program_id(0) * 32, P, tl.num_programs(0) * 32):
            _order_pairs(ids, order, P, first, E, 32)


def block_int16_shape(rows: int, cols: int) -> tuple[int, int, int]:
    """Return the shape of the int32 tensor that holds x [rows, cols] as block-wise int16."""
    return rows, cols // 32, BLOCK_WORDS


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Pairs to order by their experts, in the same launch. ids: int32 [T, k]. out: int32 [T * k], see
    `quantize_block_int16`.
    """

    ids: Tensor
    num_experts: int
    out: Tensor


def quantize_block_int16(x: Tensor, out: Tensor, is_strided: bool, pairs: PairOrder | None = None) -> Tensor:
    """Write x [T, K], of any float type, K in 32s, to `out`: int32, contiguous, of `block_int16_shape`.

    pairs.out becomes the numbers of the pairs in the order of their experts, those of one in their own, and pairs
    with ids outside 0 .. num_experts - 1 at the end.
    """
    rows, cols = x.shape
    if out.shape != block_int16_shape(rows, cols) or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(
            f"block-wise int16 must be contiguous int32 {block_int16_shape(rows, cols)}, got {tuple(out.shape)}"
        )
    if rows:
        count = 0 if pairs is None else pairs.ids.numel()
        ids, order = (out, out) if pairs is None else (pairs.ids, pairs.out)
        _block_int16_kernel[(triton.cdiv(cols // 32, _BLOCKS), rows + (pairs is not None))](
            x, x.stride(0), out, ids, order, rows, count, E=0 if pairs is None else pairs.num_experts, K=cols,
            STRIDED=is_strided, BLOCKS=_BLOCKS, num_warps=2,
        )  # fmt: skip
    return out
