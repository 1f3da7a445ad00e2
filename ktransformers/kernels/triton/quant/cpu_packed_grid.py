"""Tiles of the CPU's kernels whose codes are looked up in a grid: IQ1, IQ2 and IQ3 (csrc/kernels/packed/grid.inl).

A part is 32 columns of a block of 256: of every row one word of four codes (IQ3: two words), one of 32 signs, and what
does not fill bytes. A code is looked up once, in a table that fits into a processor's first-level cache (tables.py),
and gives a word for every 4 columns. Numbers of such a word are never converted: a *field* of it, alone, is a subnormal
fp32, which is exactly the number times a power of two, and a sign is one bit of the float.

    type      columns of a code   values of the table   field     w = s * ...        s = d (2 scale + 1) ...
    IQ2_*     8                   8, 25, 43             6 bits    +-value            / 8
    IQ3_XXS   4                   4 .. 62               6 bits    +-value            / 4
    IQ3_S     4                   1 .. 15               6 bits    +-value
    IQ1_*     8                   0, 1, 2               2 bits    8 value - 8 +- 1   / 8

Knows bytes and numbers of these types; does not know products (linear/grid.py).
"""

from __future__ import annotations

from ktransformers.kernels.formats import FORMATS, Kernels
from ktransformers.kernels.triton.common.runtime import constant, jit, static, tl
from ktransformers.kernels.triton.quant.cpu_packed_bytes import block_bytes, head_bytes, tile_bytes
from ktransformers.kernels.triton.quant.tables import AT_IQ1, AT_IQ2_S, AT_IQ2_XS, AT_IQ2_XXS, AT_IQ3_S, AT_IQ3_XXS
from ktransformers.kernels.types import QuantType

__all__ = [
    "GRID_TYPES",
    "delta_of",
    "field",
    "grid_tile",
    "has_grid",
    "part_entries",
    "part_scales",
    "part_signs",
    "part_words",
    "unit",
    "with_signs",
]

IQ2_XXS = constant(int(QuantType.IQ2_XXS))
IQ2_XS = constant(int(QuantType.IQ2_XS))
IQ2_S = constant(int(QuantType.IQ2_S))
IQ3_XXS = constant(int(QuantType.IQ3_XXS))
IQ3_S = constant(int(QuantType.IQ3_S))
IQ1_S = constant(int(QuantType.IQ1_S))
IQ1_M = constant(int(QuantType.IQ1_M))


#: Numbers of the types whose codes are looked up in a grid.
GRID_TYPES = tuple(number for number, format in FORMATS.items() if format.kernels is Kernels.GRID)


@static
def has_grid(type_number):
    """Whether codes of a type are looked up in a grid."""
    return type_number in GRID_TYPES


@jit
def row_words(base, at, n, mask, SIZE: tl.constexpr):
    """Load a word of each row from the line at byte `at` of its tile of SIZE bytes."""
    pointer = base.to(tl.pointer_type(tl.int32)) + n // 16 * (SIZE // 4) + (at // 4 + n % 16)
    return tl.load(pointer, mask=mask, other=0)


@jit
def part_words(base, part, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Load what is stored for 32 columns each of the rows n [1, BN]. part: int32 [P, 1]; mask: [P, BN] or what
    broadcasts.

    Returns codes, further codes (IQ3), signs, bits above the codes at the lowest place of every byte (IQ3_S: above
    further codes at the next), the byte of scales, all int32 [P, BN], and d, fp32; what a type lacks repeats another.
    """
    IS_IQ3: tl.constexpr = TYPE == IQ3_XXS or TYPE == IQ3_S
    IS_IQ1: tl.constexpr = TYPE == IQ1_S or TYPE == IQ1_M
    PART: tl.constexpr = 192 if IS_IQ3 else 64 if IS_IQ1 else 128
    ABOVE: tl.constexpr = 128 if TYPE == IQ2_S or TYPE == IQ3_S else 256 if IS_IQ1 else 0
    SCALES: tl.constexpr = 64 if TYPE == IQ3_S else 128 if TYPE == IQ2_XS or TYPE == IQ2_S or TYPE == IQ1_M else 0
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    s = part % 8
    block = head_bytes(TYPE, K) + part // 8 * block_bytes(TYPE)
    codes = row_words(base, block + PART * s, n, mask, SIZE)
    more, signs, above, scale = codes, codes, codes, codes
    if IS_IQ3:
        more = row_words(base, block + PART * s + 64, n, mask, SIZE)
    if not IS_IQ1:
        signs = row_words(base, block + PART * s + (PART - 64), n, mask, SIZE)
    if TYPE == IQ2_S:
        above = row_words(base, block + 8 * PART + 64 * (s // 4), n, mask, SIZE) >> (s % 4 * 2)
    elif TYPE == IQ3_S:
        first = row_words(base, block + 8 * PART, n, mask, SIZE) >> s
        second = row_words(base, block + 8 * PART + 64, n, mask, SIZE) >> s
        above = (first & 0x01010101) | ((second & 0x01010101) << 1)
    elif IS_IQ1:
        above = row_words(base, block + 8 * PART + 64 * (s // 2), n, mask, SIZE) >> (s % 2 * 4)
    if SCALES > 0:
        at = block + 8 * PART + ABOVE + (16 * s if SCALES == 128 else 16 * (s // 2))
        scale = tl.load(base + n // 16 * SIZE + (at + n % 16), mask=mask, other=0).to(tl.int32)
        if SCALES == 64:
            scale = scale >> (s % 2 * 4)
    halves = base.to(tl.pointer_type(tl.float16)) + n // 16 * (SIZE // 2) + (part // 8 * 16 + n % 16)
    return codes, more, signs, above, scale, tl.load(halves, mask=mask, other=0.0).to(tl.float32)


@jit
def byte_of(word, j: tl.constexpr):
    if j == 0:
        return word & 255
    return (word >> (8 * j)) & 255


@jit
def bits_at_8(word, j: tl.constexpr, at: tl.constexpr, MASK: tl.constexpr):
    """Return the bits of MASK, from bit `at` of byte j on, moved to bit 8."""
    place: tl.constexpr = 8 * j + at - 8
    if place >= 0:
        return (word >> place) & (MASK << 8)
    return (word << (-place)) & (MASK << 8)


@jit
def code_of(words, j: tl.constexpr, TYPE: tl.constexpr):
    """Return code j of a part: of 4, of IQ3 of 8."""
    codes, more, signs, above, _, _ = words
    code = byte_of(codes if j < 4 else more, j % 4)
    if TYPE == IQ2_XS:
        code = code | bits_at_8(signs, j, 7, 1)
    elif TYPE == IQ2_S:
        code = code | bits_at_8(above, j, 0, 3)
    elif TYPE == IQ3_S:
        code = code | bits_at_8(above, j % 4, j // 4, 1)
    elif TYPE == IQ1_S or TYPE == IQ1_M:
        code = code | bits_at_8(above, j, 0, 7)
    return code


@jit
def entry_of_8(tables, words, j: tl.constexpr, TYPE: tl.constexpr):
    """Return the words for columns 8 j .. 8 j + 3 and 8 j + 4 .. 8 j + 7 of a part."""
    code = code_of(words, j, TYPE)
    if TYPE == IQ1_S or TYPE == IQ1_M:
        low = tl.load((tables + AT_IQ1).to(tl.pointer_type(tl.uint16)) + code).to(tl.int32)
        return low, low >> 8
    AT: tl.constexpr = AT_IQ2_XXS if TYPE == IQ2_XXS else AT_IQ2_XS if TYPE == IQ2_XS else AT_IQ2_S
    both = tl.load((tables + AT).to(tl.pointer_type(tl.int64)) + code)
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@jit
def entry_of_4(tables, words, j: tl.constexpr, TYPE: tl.constexpr):
    """Return the word for columns 4 j .. 4 j + 3 of a part."""
    AT: tl.constexpr = AT_IQ3_XXS if TYPE == IQ3_XXS else AT_IQ3_S
    return tl.load((tables + AT).to(tl.pointer_type(tl.int32)) + code_of(words, j, TYPE))


@jit
def part_entries(tables, words, TYPE: tl.constexpr):
    """Return a word for every 4 columns of a part, as a tuple of 8; column 4 k + i is field i of word k."""
    if TYPE == IQ3_XXS or TYPE == IQ3_S:
        a, b = entry_of_4(tables, words, 0, TYPE), entry_of_4(tables, words, 1, TYPE)
        c, d = entry_of_4(tables, words, 2, TYPE), entry_of_4(tables, words, 3, TYPE)
        e, f = entry_of_4(tables, words, 4, TYPE), entry_of_4(tables, words, 5, TYPE)
        g, h = entry_of_4(tables, words, 6, TYPE), entry_of_4(tables, words, 7, TYPE)
    else:
        a, b = entry_of_8(tables, words, 0, TYPE)
        c, d = entry_of_8(tables, words, 1, TYPE)
        e, f = entry_of_8(tables, words, 2, TYPE)
        g, h = entry_of_8(tables, words, 3, TYPE)
    return a, b, c, d, e, f, g, h


@jit
def part_signs(words, TYPE: tl.constexpr):
    """Return the signs of a part: bit c is set where column c is negative; of IQ1 bit 8 j + 7 where delta of columns 8
    j and on is.
    """
    if TYPE == IQ1_M:
        return words[3] << 4
    if TYPE == IQ1_S:  # one for all, in the last byte
        return words[3] << 4 & -2147483648
    signs = words[2]
    if TYPE == IQ2_S or TYPE == IQ3_S:
        return signs
    seven = signs & 0x7F7F7F7F  # the last makes the number of minus signs even
    odd = seven ^ (seven >> 4)
    odd = odd ^ (odd >> 2)
    return seven | (((odd ^ (odd >> 1)) & 0x01010101) << 7)


@jit
def odd_scale(nibble, d):
    """Return the scale d (2 scale + 1) of a nibble."""
    return d * ((nibble & 15) * 2 + 1).to(tl.float32)


@jit
def part_scales(words, TYPE: tl.constexpr):
    """Return the scales s of the first and of the second 16 columns of a part, fp32."""
    _, _, signs, above, scale, d = words
    if TYPE == IQ3_XXS:
        d = d * 0.25
    elif TYPE != IQ3_S:
        d = d * 0.125
    if TYPE == IQ2_XXS or TYPE == IQ3_XXS:  # one bit of each byte, the first the lowest
        s = odd_scale((((signs >> 7) & 0x01010101) * 0x01020408) >> 24, d)
        return s, s
    if TYPE == IQ1_S:
        s = odd_scale(((((above >> 3) & 0x00010101) * 0x01020408) >> 24) & 7, d)
        return s, s
    first = odd_scale(scale, d)
    if TYPE == IQ3_S:
        return first, first
    return first, odd_scale(scale >> 4, d)


@jit
def with_signs(word, signs, k: tl.constexpr, TYPE: tl.constexpr):
    """Return word k of a part with the signs of its four columns in its highest bits, as `field` wants it."""
    if TYPE == IQ1_S or TYPE == IQ1_M:
        return word
    if k < 7:
        signs = signs << (28 - 4 * k)
    return word | (signs & -268435456)  # 0xF0000000


@jit
def field(word, i: tl.constexpr, TYPE: tl.constexpr):
    """Return 2^-149 times `unit(i, TYPE)` times value i of a word `with_signs`, fp32."""
    if TYPE == IQ1_S or TYPE == IQ1_M:
        bits = word & (3 << (2 * i))
    elif i < 3:  # one shift brings the sign to where a float has it, whatever that does to the field
        bits = (word << (3 - i)) & (-2147483648 | 63 << (5 * i + 3))
    else:
        bits = word & (-2147483648 | 63 << 18)
    return bits.to(tl.float32, bitcast=True)


@jit
def unit(i: tl.constexpr, TYPE: tl.constexpr):
    """Return the factor of value i of a word in `field`, in units of 2^-149."""
    if TYPE == IQ1_S or TYPE == IQ1_M:
        return 4.0**i
    return 8.0 * 32.0**i


@jit
def delta_of(signs, x, j: tl.constexpr, TYPE: tl.constexpr):
    """Return x, fp32, times delta of columns 8 j .. 8 j + 7 of IQ1, which is 1 or -1."""
    if TYPE == IQ1_M and j < 3:
        signs = signs << (24 - 8 * j)
    return (x.to(tl.int32, bitcast=True) ^ (signs & -2147483648)).to(tl.float32, bitcast=True)


@jit
def number(word, signs, s, k: tl.constexpr, i: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return column 4 k + i of a part from word k, as DTYPE."""
    value = field(word, i, TYPE) * 1.7014118346046923e38  # 2^127; with 2^22 neither factor is out of range
    if TYPE == IQ1_S or TYPE == IQ1_M:
        delta = delta_of(signs, tl.full(s.shape, 1.0, tl.float32), k // 2, TYPE)
        return (s * (value * (33554432.0 / unit(i, TYPE)) + (delta - 8.0))).to(DTYPE)  # 2^25: 8 times the value
    return (value * (s * (4194304.0 / unit(i, TYPE)))).to(DTYPE)


@jit
def four_numbers(word, signs, s, k: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return columns 4 k .. 4 k + 3 of a part as [..., bit 1, bit 0]."""
    word = with_signs(word, signs, k, TYPE)
    a, b = number(word, signs, s, k, 0, TYPE, DTYPE), number(word, signs, s, k, 1, TYPE, DTYPE)
    c, d = number(word, signs, s, k, 2, TYPE, DTYPE), number(word, signs, s, k, 3, TYPE, DTYPE)
    return tl.join(tl.join(a, c), tl.join(b, d))


@jit
def four_words(e, signs, s, k: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return columns of words k .. k + 3 of e as [..., bits of the column in a word, bits of the word]."""
    a, b = four_numbers(e[k], signs, s, k, TYPE, DTYPE), four_numbers(e[k + 1], signs, s, k + 1, TYPE, DTYPE)
    c, d = four_numbers(e[k + 2], signs, s, k + 2, TYPE, DTYPE), four_numbers(e[k + 3], signs, s, k + 3, TYPE, DTYPE)
    return tl.join(tl.join(a, c), tl.join(b, d))


@jit
def grid_tile(base, k0, n, mask, tables, TYPE: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Load columns k0 .. k0 + 63 (k0 a multiple of 64) of the rows n [1, BN] -> [64, BN] of DTYPE. mask: [1, BN].

    tables: int32 pointer to `tables.tables`. Equal to `gguf.quants.dequantize` up to one rounding to DTYPE.
    """
    part = k0 // 32 + tl.arange(0, 2)[:, None]
    words = part_words(base, part, n, mask, TYPE, K)
    e = part_entries(tables, words, TYPE)
    signs = part_signs(words, TYPE)
    first, second = part_scales(words, TYPE)
    low, high = four_words(e, signs, first, 0, TYPE, DTYPE), four_words(e, signs, second, 4, TYPE, DTYPE)
    tile = tl.permute(tl.join(low, high), (0, 6, 4, 5, 2, 3, 1))  # from [part, rows, bits of i, bits of k % 4, k // 4]
    return tl.reshape(tile, (64, n.shape[1]))
