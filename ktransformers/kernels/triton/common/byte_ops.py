"""Operations on the four bytes of an int32 for which a GPU has one instruction, and Triton no name.

Interpreted, the same bits are computed from shifts. Operands broadcast.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import constant, is_interpreted, jit, tl

__all__ = ["byte_signs", "dot_signed", "dot_unsigned", "permute_bytes"]

INTERPRETED = constant(int(is_interpreted()))


@jit
def permute_bytes(low, high, selector):
    """Make an int32 of four of the bytes of `low` (0 .. 3) and `high` (4 .. 7), which nibbles 0 .. 3 of `selector`
    name.

    The highest bit of each of these nibbles must be zero; further nibbles count for nothing.
    """
    if INTERPRETED:
        zero = tl.zeros((1, 1), tl.int64)  # operands may be plain numbers
        both = ((low + zero) & 0xFFFFFFFF) | ((high + zero) << 32)
        made = zero
        for i in tl.static_range(4):
            at = (((selector + zero) >> (4 * i)) & 7) * 8
            made = made | (((both >> at) & 255) << (8 * i))
        return made.to(tl.int32)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@jit
def byte_signs(word):
    """Return 255 for each byte whose highest bit is set, else 0."""
    if INTERPRETED:
        return (((word + tl.zeros((1, 1), tl.int64)) >> 7) & 0x01010101).to(tl.int32) * 255
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0xBA98;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
    )


@jit
def dot_signed(a, b, total):
    """Return total + the sum of the products of the bytes of a and b, all of them signed; int32."""
    if INTERPRETED:
        for i in tl.static_range(4):
            total = total + ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return total
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
    )


@jit
def dot_unsigned(a, b, total):
    """Return total + the sum of the products of the bytes of a, signed, and b, in 0 .. 255; int32."""
    if INTERPRETED:
        for i in tl.static_range(4):
            total = total + ((a << (24 - 8 * i)) >> 24) * ((b >> (8 * i)) & 255)
        return total
    return tl.inline_asm_elementwise(
        "dp4a.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
    )
