"""Reads bytes of the CPU kernels' tiles of 16 rows: one number of each row, the rows side by side."""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["byte_pairs", "halves", "line_words", "row_bytes_at"]


@jit
def halves(base, at, n, mask, SIZE: tl.constexpr):
    """Load an fp16 of each row from byte `at` of its tile on, fp32. SIZE: bytes of a tile of 16 rows."""
    pointer = base.to(tl.pointer_type(tl.float16)) + n // 16 * (SIZE // 2) + (at // 2 + n % 16)
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@jit
def byte_pairs(base, at, n, mask, SIZE: tl.constexpr):
    """Load two bytes of each row from byte `at` of its tile on, as an int32."""
    pointer = base.to(tl.pointer_type(tl.int16)) + n // 16 * (SIZE // 2) + (at // 2 + n % 16)
    return tl.load(pointer, mask=mask, other=0).to(tl.int32)


@jit
def line_words(base, at, n, mask, SIZE: tl.constexpr):
    """Load a word of each row from the line at byte `at` of its tile."""
    pointer = base.to(tl.pointer_type(tl.int32)) + n // 16 * (SIZE // 4) + (at // 4 + n % 16)
    return tl.load(pointer, mask=mask, other=0)


@jit
def row_bytes_at(base, at, n, mask, SIZE: tl.constexpr):
    """Load a byte of each row from byte `at` of its tile on, as an int32 in 0 .. 255."""
    return tl.load(base + n // 16 * SIZE + (at + n % 16), mask=mask, other=0).to(tl.int32)
