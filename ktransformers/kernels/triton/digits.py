"""Activations as whole numbers: what products with weights of 8 bits or fewer, four in one instruction, take.

32 columns share a power of two d, and a number is d q with an integer |q| < 2^15, whose two bytes go into two planes:
x = d (256 a + b), a signed. |x - d q| <= d / 2 (d for the largest q), and d <= 2^-14 of the largest magnitude among the
32: the 8 bits of a bf16 are kept for numbers down to 2^-7 of it, and what others lose is less than what the largest
lost when it became a bf16. One block of 32 columns is 32 words:

    words 0-7   8-15   16         17-31
          b      a      d, fp32    not used

Four columns side by side fill a word, in one of two orders. Natural: word i has columns 4 i .. 4 i + 3. Strided: word
4 h + r has columns 16 h + r + 4 p in its bytes p = 0 .. 3; these are columns whose signs lie four bits apart
(tiles_grid.py). A block with a number that is not finite has NaN for d. Knows no weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.runtime import jit, tl, triton

__all__ = ["BLOCK_WORDS", "block_digits", "digit_shape", "make_digits", "plane_word", "store_digits"]

#: Words of a block of 32 columns.
BLOCK_WORDS = 32
_BLOCKS = 8  # of one program


@jit
def block_digits(at, inside, EVEN: tl.constexpr):
    """The 16 words of blocks as 8 int64 [P, 1], and d, fp32 [P, 1]; zeros where not inside.

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
def plane_word(planes, plane: tl.constexpr, i: tl.constexpr):
    """Word i of plane 0 (the lower digits) or 1, of what `block_digits` gave."""
    both = planes[4 * plane + i // 2]
    if i % 2 == 1:
        both = both >> 32
    return both.to(tl.int32)


@jit
def store_digits(row, block, values, mask, STRIDED: tl.constexpr):
    """Write blocks of a row. row: int32 pointer to its first; block: int32 [B]; values: fp32 [B, 32]; mask: [B]."""
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


@jit
def _digits_kernel(x, stride, out, K: tl.constexpr, STRIDED: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    columns = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row.to(tl.int64) * stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    store_digits(out + row * K, block, values, block < K // 32, STRIDED)


def digit_shape(rows: int, cols: int) -> tuple[int, int, int]:
    """Of the int32 tensor for x [rows, cols]."""
    return rows, cols // 32, BLOCK_WORDS


def make_digits(x: Tensor, out: Tensor, is_strided: bool) -> Tensor:
    """Write x [T, K], of any float type, K in 32s, to `out`: int32, contiguous, of `digit_shape`."""
    rows, cols = x.shape
    if out.shape != digit_shape(rows, cols) or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(f"digits must be contiguous int32 {digit_shape(rows, cols)}, got {tuple(out.shape)}")
    if rows:
        _digits_kernel[(triton.cdiv(cols // 32, _BLOCKS), rows)](
            x, x.stride(0), out, K=cols, STRIDED=is_strided, BLOCKS=_BLOCKS, num_warps=2
        )
    return out
