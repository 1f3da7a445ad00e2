"""Weights in groups with scales of their own (`GroupType`) in the CPU's tiles, for the readers of cpu_packed_codes.py.

A type's number says in bits what it holds (csrc/runtime/grouped.h); csrc/kernels/packed/groups.inl describes the bytes.
Codes of 4 bits are integers + 8, of 8 bits integers, here + 128, or e4m3; NVFP4_F32 has e2m1.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.bits import e4m3, e8m0
from ktransformers.kernels.triton.common.runtime import constant, jit, static, tl
from ktransformers.kernels.triton.quant.cpu_packed_bytes import byte_pairs, halves, line_words, row_bytes_at
from ktransformers.kernels.types import GroupType

__all__ = ["E2M1", "F8", "code_kind", "group_scales", "group_word", "has_float_codes", "is_grouped"]

_FIRST = min(int(each) for each in GroupType)
# Kinds of codes, and of scales.
I4, I8, F8, E2M1 = constant(0), constant(1), constant(2), constant(3)
F16, BF16, F32, E8M0, E4M3 = constant(0), constant(1), constant(2), constant(3), constant(4)
_SCALE_BYTES = (2, 2, 4, 1)


@static
def is_grouped(type_number):
    """Whether a type is a GroupType."""
    return type_number >= _FIRST


@static
def code_kind(type_number):
    """Return the kind of a type's codes: I4, I8, F8 or E2M1."""
    return type_number // 32 % 4


@static
def has_float_codes(type_number):
    """Whether a type's codes are floats: F8 or E2M1."""
    return type_number // 32 % 4 >= 2


@static
def scale_kind(type_number):
    """Return the kind of a type's scales: F16, BF16, F32, E8M0, or E4M3 under an fp32 number."""
    return type_number // 4 % 8


@static
def has_zero(type_number):
    """Whether a type has a zero point beside the scale."""
    return type_number // 2 % 2 == 1


@static
def blocks_of_group(type_number):
    """Return the blocks of 32 columns that share a scale; of E2M1, none does."""
    return 4 if type_number % 2 else 1


@static
def zeros_at(type_number, cols):
    """Return the bytes of a tile in front of its zero points."""
    return cols // 32 // (4 if type_number % 2 else 1) * 16 * _SCALE_BYTES[type_number // 4 % 8]


@static
def head_bytes(type_number, cols):
    """Return the bytes of a tile in front of its lines."""
    if type_number // 4 % 8 == 4:
        return (64 + cols + 63) // 64 * 64
    groups = cols // 32 // (4 if type_number % 2 else 1)
    return (groups * 16 * (_SCALE_BYTES[type_number // 4 % 8] + type_number // 2 % 2) + 63) // 64 * 64


@static
def block_bytes(type_number):
    """Return the bytes of a tile's block of 32 columns."""
    return 512 if type_number // 32 % 4 in (1, 2) else 256


@jit
def group_word(base, group, i, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return the codes of four columns of a group, as `cpu_packed_codes.code_word` does."""
    SIZE: tl.constexpr = head_bytes(TYPE, K) + K // 32 * block_bytes(TYPE)
    b = 2 * group + i // 8
    block = head_bytes(TYPE, K) + b * block_bytes(TYPE)
    mask = mask & (b < K // 32)
    if code_kind(TYPE) == F8:
        line = block + 64 * (i % 8)
        low = byte_pairs(base, line, n, mask, SIZE) & 0xFFFF
        return low | byte_pairs(base, line + 32, n, mask, SIZE) << 16
    if code_kind(TYPE) == I8:
        return line_words(base, block + 64 * (i % 8), n, mask, SIZE) ^ -2139062144  # 0x80808080
    return line_words(base, block + 64 * (i % 4), n, mask, SIZE) >> (4 * (i // 4 % 2)) & 0x0F0F0F0F


@jit
def words_as_floats(base, at, n, mask, SIZE: tl.constexpr):
    return line_words(base, at, n, mask, SIZE).to(tl.float32, bitcast=True)


@jit
def group_scales(base, group, q, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return s and m of quarter q of 64 columns: w = s u - m, or s times the number of a code that is a float."""
    SIZE: tl.constexpr = head_bytes(TYPE, K) + K // 32 * block_bytes(TYPE)
    b = 2 * group + q // 2
    mask = mask & (b < K // 32)
    if scale_kind(TYPE) == E4M3:
        pair = byte_pairs(base, 64 + 32 * b, n, mask, SIZE) >> (8 * (q % 2))
        row = words_as_floats(base, 0, n, mask, SIZE) * 0.00390625  # 128 times the number; codes are doubled
        s = e4m3(pair, 0) * row
        return s, s
    at = b // blocks_of_group(TYPE)
    if scale_kind(TYPE) == F32:
        s = words_as_floats(base, 64 * at, n, mask, SIZE)
    elif scale_kind(TYPE) == BF16:
        s = (byte_pairs(base, 32 * at, n, mask, SIZE) << 16).to(tl.float32, bitcast=True)
    elif scale_kind(TYPE) == E8M0:
        exponent = row_bytes_at(base, 16 * at, n, mask, SIZE)
        s = tl.where(exponent == 255, float("nan"), 2.0 * e8m0(exponent))
    else:
        s = halves(base, 32 * at, n, mask, SIZE)
    m = (128.0 if code_kind(TYPE) == I8 else 8.0) * s
    if has_zero(TYPE):
        zero = row_bytes_at(base, zeros_at(TYPE, K) + 16 * at, n, mask, SIZE)
        m += s * ((zero << 24) >> 24).to(tl.float32)
    return s, m
