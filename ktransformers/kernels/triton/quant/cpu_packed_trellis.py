"""Tiles of the CPU's kernels whose codes are seeds of values: IQ1_KT to IQ4_KT (csrc/kernels/packed/trellis.inl).

A value is computed from its code alone, as kernels/trellis_blocks.py says, and comes out + 126, from 0 to 252: four of
them are the bytes of a word, as other types' codes are (cpu_packed_codes.py). Knows bytes; no products.
"""

from __future__ import annotations

from ktransformers.kernels.trellis_blocks import SEED_OFFSET, TRELLIS_POWERS, TRELLIS_TYPES
from ktransformers.kernels.triton.common.runtime import constant, jit, static, tl
from ktransformers.kernels.triton.quant.cpu_packed_bytes import line_words, row_bytes_at
from ktransformers.kernels.types import QuantType

__all__ = ["is_trellis", "trellis_scale", "trellis_word"]

IQ1_KT = constant(int(QuantType.IQ1_KT))
IQ3_KT = constant(int(QuantType.IQ3_KT))
IQ4_KT = constant(int(QuantType.IQ4_KT))
SEED = constant(SEED_OFFSET)

# What is static is Python's: of plain numbers.
_TYPES = tuple(map(int, TRELLIS_TYPES))


@static
def is_trellis(type_number):
    """Whether codes of a type are seeds."""
    return type_number in _TYPES


@static
def power(k):
    """Return what a seed is multiplied with for value k, as a signed int32."""
    return TRELLIS_POWERS[k] - (TRELLIS_POWERS[k] >> 31 << 32)


@jit
def sum_of(seeds, k: tl.constexpr):
    """Return value k of seeds, int32, + 126."""
    fields = seeds * power(k) & 0x3F3F3F3F
    return fields * 0x01010101 >> 24 & 255


@jit
def signed_sum(seeds, signs, k: tl.constexpr):
    """Return 126 + or - the size of value k, as bit k of signs says."""
    value = sum_of(seeds, k) - 126
    return 126 + tl.where((signs >> k & 1) == 1, -tl.abs(value), tl.abs(value))


@jit
def trellis_word(base, block, g, i, n, mask, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """Return columns 4 i .. 4 i + 3 of group g of a block of 256: value + 126 in a byte each."""
    s = 2 * g + i // 8
    PART: tl.constexpr = 64 if TYPE == IQ1_KT else 192 if TYPE == IQ3_KT else 256 if TYPE == IQ4_KT else 128
    part = block + PART * s
    if TYPE == IQ1_KT:
        j = i % 8 // 2
        code = line_words(base, part, n, mask, SIZE) >> (8 * j) & 255
        above = line_words(base, block + 512 + 64 * (s // 2), n, mask, SIZE) >> (8 * j + 4 * (s % 2))
        mark = row_bytes_at(base, block + 768 + 16 * s, n, mask, SIZE) >> (4 + j)
        code = code | (above & 15) << 8 | (mark & 1) << 12
    else:
        j = i % 8 if TYPE == IQ4_KT else i % 8 // 2
        code = line_words(base, part + 64 * (j // 2), n, mask, SIZE) >> (16 * (j % 2)) & 0xFFFF
    seeds = code + SEED
    if TYPE != IQ4_KT:  # of the second four columns of a code
        seeds = seeds * (i % 2 * (power(3) - 1) + 1)
    if TYPE == IQ3_KT:
        signs = line_words(base, part + 128, n, mask, SIZE) >> (4 * (i % 8))
        word = signed_sum(seeds, signs, 0) | signed_sum(seeds, signs, 1) << 8
        return word | signed_sum(seeds, signs, 2) << 16 | signed_sum(seeds, signs, 3) << 24
    return sum_of(seeds, 0) | sum_of(seeds, 1) << 8 | sum_of(seeds, 2) << 16 | sum_of(seeds, 3) << 24


@jit
def trellis_scale(base, block, g, q, n, mask, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """Return what is stored of the scale of columns 16 q .. 16 q + 15 of group g: of IQ4_KT the scale, of IQ3_KT that,
    of others the code of one of IQ4_NL's values.
    """
    s = 2 * g + q // 2
    if TYPE == IQ4_KT:
        return row_bytes_at(base, block + 2048 + 16 * s, n, mask, SIZE) << 24 >> 24
    if TYPE == IQ1_KT:
        return row_bytes_at(base, block + 768 + 16 * s, n, mask, SIZE) & 15
    AT: tl.constexpr = 1536 if TYPE == IQ3_KT else 1024
    return row_bytes_at(base, block + AT + 16 * (s // 2), n, mask, SIZE) >> (4 * (s % 2)) & 15
