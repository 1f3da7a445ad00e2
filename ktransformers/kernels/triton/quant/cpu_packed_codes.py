"""Tiles of the CPU's kernels whose weights are codes of up to 8 bits under scales of 16 columns or more.

A group is 64 columns. All readers here work element by element: word i of a group, for any i, has the codes of columns
4 i .. 4 i + 3 in its bytes (`code_word`), and quarter i / 4 has a scale and an offset (`code_scales`); a weight is
f S - M with the float f that a code stands for (`number`). Group, i and rows may be of any shapes that broadcast, so
that a tile of many words and a loop over one row's words read with the same lines. Integers u become 1 + u / 256, see
dequant.py. Bytes: packed.inl, packed/k2k3.inl, packed/small.inl, packed/ternary.inl in csrc/kernels; weights in
groups: cpu_packed_groups.py. Knows the bytes; does not know products (linear/codes.py).
"""

from __future__ import annotations

from ktransformers.kernels.iqk_blocks import IQK_VALUES
from ktransformers.kernels.triton.common.bits import e2m1, e4m3, shifted
from ktransformers.kernels.triton.common.byte_ops import permute_bytes
from ktransformers.kernels.triton.common.runtime import constant, jit, static, tl
from ktransformers.kernels.triton.quant.cpu_packed_bytes import (
    block_bytes,
    byte_pairs,
    floats,
    halves,
    head_bytes,
    is_super,
    line_words,
    tile_bytes,
)
from ktransformers.kernels.triton.quant.cpu_packed_groups import (
    E2M1,
    F8,
    code_kind,
    group_scales,
    group_word,
    has_float_codes,
    is_grouped,
)
from ktransformers.kernels.triton.quant.cpu_packed_trellis import (
    IQ3_KT,
    IQ4_KT,
    is_trellis,
    trellis_scale,
    trellis_word,
)
from ktransformers.kernels.types import FORK_TYPES, QuantType, row_head

__all__ = ["CODE_TYPES", "code_scales", "code_tile", "code_word", "has_codes", "has_offset", "number"]

Q2_K = constant(int(QuantType.Q2_K))
Q3_K = constant(int(QuantType.Q3_K))
Q4_1 = constant(int(QuantType.Q4_1))
Q5_0 = constant(int(QuantType.Q5_0))
Q5_1 = constant(int(QuantType.Q5_1))
IQ4_NL = constant(int(QuantType.IQ4_NL))
IQ4_XS = constant(int(QuantType.IQ4_XS))
IQ2_K = constant(int(QuantType.IQ2_K))
IQ6_K = constant(int(QuantType.IQ6_K))
TQ1_0 = constant(int(QuantType.TQ1_0))
TQ2_0 = constant(int(QuantType.TQ2_0))
NVFP4 = constant(int(QuantType.NVFP4))
Q1_0 = constant(int(QuantType.Q1_0))


def _bytes_of(*values: int) -> int:
    return int.from_bytes(bytes(values), "little", signed=True)


# What is static is Python's: of plain numbers.
#: Numbers of the ggml types that the readers of this module know, beside those of weights in groups.
CODE_TYPES = (
    *(
        int(QuantType[name])
        for name in ("Q2_K", "Q3_K", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0")
    ),
    *sorted(map(int, FORK_TYPES)),
)
_IQK = {int(qtype): values for qtype, values in IQK_VALUES.items()}
_VALUES = {
    int(QuantType.IQ4_NL): IQK_VALUES[QuantType.IQ4_K].values,
    int(QuantType.IQ4_XS): IQK_VALUES[QuantType.IQ4_K].values,
    **{number: values.values for number, values in _IQK.items()},
}
_ROW_SCALES = tuple(int(qtype) for qtype in FORK_TYPES if row_head(qtype))


@static
def table_bits(type_number):
    """Bits of a code that is looked up in a table of values; 0 of other types."""
    return (len(_VALUES[type_number]) - 1).bit_length() if type_number in _VALUES else 0


@static
def table_word(type_number, index):
    """Return four of a table's values, plus 128, as the bytes of an int32; zeros behind the table's end."""
    values = _VALUES[type_number][4 * index : 4 * index + 4]
    return int.from_bytes(bytes(value + 128 for value in values).ljust(4, b"\0"), "little", signed=True)


@static
def value_shift(type_number):
    """Addend of the values of a sub-block whose bit is set; 0 of types without such bits."""
    return _IQK[type_number].shift if type_number in _IQK else 0


@static
def has_scales_of_16(type_number):
    """Whether a table's type has a scale for every 16 columns, not for 32."""
    return type_number in _IQK and _IQK[type_number].subs == 16


@static
def has_odd_scales(type_number):
    """Whether the lowest bit of a packed scale is the sub-block's bit, and the scale is odd."""
    return type_number in _IQK and _IQK[type_number].is_odd


@static
def has_row_scale(type_number):
    """Whether a tile has one fp32 scale for each row."""
    return type_number in _ROW_SCALES


@static
def has_codes(type_number):
    """Whether the readers of this module know a type."""
    return type_number in CODE_TYPES or is_grouped(type_number)


@static
def has_integers(type_number):
    """Whether the codes of a type are integers u: f is 1 + u / 256, and M is not zero for that alone."""
    if type_number in _VALUES or type_number == int(QuantType.NVFP4):
        return False
    return not (is_grouped(type_number) and has_float_codes(type_number))


@static
def has_offset(type_number):
    """Whether a type has an offset M that is not zero."""
    return has_integers(type_number) or type_number in _IQK


@jit
def ternary_digits(word, digit):
    """Return digit number 0 .. 4 of the four bytes of TQ1_0: three times the byte, less the digits before,
    above 256.
    """
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    even = ((word & 0x00FF00FF) * power & 0x00FF00FF) * 3
    odd = ((word >> 8 & 0x00FF00FF) * power & 0x00FF00FF) * 3
    return (even >> 8 & 0x00030003) | (odd & 0x03000300)


@jit
def table_code(base, block, g, i, n, mask, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """Return `code_word` of group g of a block of 256 columns whose codes are looked up in a table."""
    BITS: tl.constexpr = table_bits(TYPE)
    LINES: tl.constexpr = 256 if has_scales_of_16(TYPE) and TYPE != IQ2_K else 128
    if BITS <= 3:
        word = line_words(base, block + LINES + 64 * (4 * g + i % 4), n, mask, SIZE) >> (2 * (i // 4)) & 0x03030303
    else:
        word = line_words(base, block + LINES + 64 * (8 * g + i % 8), n, mask, SIZE) >> (4 * (i // 8)) & 0x0F0F0F0F
    if BITS == 3 or BITS == 5:
        LOW: tl.constexpr = BITS - 1
        upper = line_words(base, block + LINES + 512 * LOW + 128 * g + 64 * (i // 8), n, mask, SIZE)
        word = word | (upper >> (i % 8) & 0x01010101) << LOW
    elif BITS == 6:
        upper = line_words(base, block + LINES + 2048 + 64 * (4 * g + i % 4), n, mask, SIZE) >> (2 * (i // 4))
        word = word | (upper & 0x03030303) << 4
    return word


@jit
def super_word(base, group, i, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return `code_word` of types with blocks of 256 columns."""
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    block, g = head_bytes(TYPE, K) + group // 4 * block_bytes(TYPE), group % 4
    if table_bits(TYPE) > 0:
        return table_code(base, block, g, i, n, mask, TYPE, SIZE)
    if is_trellis(TYPE):
        return trellis_word(base, block, g, i, n, mask, TYPE, SIZE)
    if TYPE == TQ1_0:
        step = 16 * g + i
        return ternary_digits(line_words(base, block + 64 * (step // 5), n, mask, SIZE), step % 5)
    LINES: tl.constexpr = 320 if TYPE == Q2_K else 256 if TYPE == Q3_K else 0
    word = line_words(base, block + LINES + 64 * (4 * g + i % 4), n, mask, SIZE) >> (2 * (i // 4)) & 0x03030303
    if TYPE == Q3_K:
        third = line_words(base, block + 1280 + 128 * g + 64 * (i // 8), n, mask, SIZE)
        word = word | (third >> (i % 8) & 0x01010101) << 2
    return word


@jit
def small_word(base, group, i, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return `code_word` of types with blocks of 32 columns."""
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    b = 2 * group + i // 8
    block = head_bytes(TYPE, K) + b * block_bytes(TYPE)
    mask = mask & (b < K // 32)
    if TYPE == Q1_0:
        return line_words(base, block, n, mask, SIZE) >> (i % 8) & 0x01010101
    word = line_words(base, block + 64 * (i % 4), n, mask, SIZE) >> (4 * (i // 4 % 2)) & 0x0F0F0F0F
    if TYPE == Q5_0 or TYPE == Q5_1:
        fifth = line_words(base, block + 256, n, mask, SIZE)
        word = word | (fifth >> (i % 8) & 0x01010101) << 4
    return word


@jit
def code_word(base, group, i, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return the codes of columns 4 i .. 4 i + 3 of a group of 64 columns, a byte each; of columns past K: anything."""
    # One return: the compiler visits what follows the others, and a type has sizes in its own branch alone.
    if is_grouped(TYPE):
        word = group_word(base, group, i, n, mask, TYPE, K)
    elif is_super(TYPE):
        word = super_word(base, group, i, n, mask, TYPE, K)
    else:
        word = small_word(base, group, i, n, mask, TYPE, K)
    return word


@jit
def super_scales(base, group, q, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return the scale s and offset m of types with blocks of 256 columns: w = s u - m."""
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    block, g = head_bytes(TYPE, K) + group // 4 * block_bytes(TYPE), group % 4
    if TYPE == Q2_K:
        both = byte_pairs(base, block + 64 + 32 * (2 * g + q // 2), n, mask, SIZE) >> (8 * (q % 2))
        d, dmin = halves(base, block, n, mask, SIZE), halves(base, block + 32, n, mask, SIZE)
        return d * (both & 15).to(tl.float32), dmin * (both >> 4 & 15).to(tl.float32)
    d = floats(base, 0, n, mask, SIZE) if has_row_scale(TYPE) else halves(base, group // 4 * 32, n, mask, SIZE)
    if is_trellis(TYPE):
        scale = trellis_scale(base, block, g, q, n, mask, TYPE, SIZE)
        if TYPE != IQ3_KT and TYPE != IQ4_KT:
            scale = (values_of_16(scale, IQ4_NL, 0) & 255) - 128
        s = d * scale.to(tl.float32)
        m = 126.0 * s
    elif TYPE == TQ1_0 or TYPE == TQ2_0:
        s, m = d, d
    else:
        if TYPE == Q3_K or (has_scales_of_16(TYPE) and TYPE != IQ2_K):
            pair = byte_pairs(base, block + 32 * (2 * g + q // 2), n, mask, SIZE) >> (8 * (q % 2))
        else:
            pair = byte_pairs(base, block + 32 * g, n, mask, SIZE) >> (8 * (q // 2))
        scale = (pair << 24) >> 24
        if value_shift(TYPE) > 0:
            SHIFT: tl.constexpr = value_shift(TYPE)
            if TYPE == IQ2_K or TYPE == IQ6_K:  # bits of a row's 16 sub-blocks in two bytes, behind the lines
                bit = byte_pairs(base, block + block_bytes(TYPE) - 64, n, mask, SIZE) >> (4 * g + q) & 1
                if TYPE == IQ2_K:
                    scale = (pair >> (4 * (q % 2)) & 15) - 8
            else:
                bit = scale & 1
                scale = (scale | 1) if has_odd_scales(TYPE) else (scale >> 1)
            s = d * scale.to(tl.float32)
            m = s * (bit * -SHIFT).to(tl.float32)
        else:
            s = d * scale.to(tl.float32)
            m = 4.0 * s
    return s, m


@jit
def small_scales(base, group, q, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return the scale s and offset m of types with blocks of 32 columns."""
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    b = 2 * group + q // 2
    mask = mask & (b < K // 32)
    if TYPE == NVFP4:
        pair = byte_pairs(base, 32 * b, n, mask, SIZE) >> (8 * (q % 2))
        s = e4m3(pair, 0) * 0.5  # `number` is twice the value
        return s, s
    if TYPE == Q4_1 or TYPE == Q5_1:
        return halves(base, 64 * b, n, mask, SIZE), -halves(base, 64 * b + 32, n, mask, SIZE)
    if TYPE == Q1_0:
        d = halves(base, b // 4 * 32, n, mask, SIZE)
        return 2.0 * d, d
    d = halves(base, 32 * b, n, mask, SIZE)
    return d, 16.0 * d


@jit
def code_scales(base, group, q, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return S and M of columns 16 q .. 16 q + 15 of a group; zero where masked or past K. M counts if `has_offset`."""
    if is_grouped(TYPE):
        s, m = group_scales(base, group, q, n, mask, TYPE, K)
    elif is_super(TYPE):
        s, m = super_scales(base, group, q, n, mask, TYPE, K)
    else:
        s, m = small_scales(base, group, q, n, mask, TYPE, K)
    if has_integers(TYPE):
        s = 256.0 * s
        m = s + m
    return s, m


@jit
def values_of_8(word, TYPE: tl.constexpr):
    """Return what a table of 8 bytes has for four codes in bytes."""
    pairs = word | (word >> 4)
    return permute_bytes(table_word(TYPE, 0), table_word(TYPE, 1), permute_bytes(pairs, pairs, 0x2020))


@jit
def values_of_16(word, TYPE: tl.constexpr, FIRST: tl.constexpr):
    """Return what 16 bytes of a table, from word FIRST on, have for four codes in bytes."""
    pairs = word | (word >> 4)
    nibbles = permute_bytes(pairs, pairs, 0x2020)  # the four of them side by side
    below, chosen = nibbles & 0x7777, ((nibbles >> 1) & 0x4444) | 0x3210
    low = permute_bytes(table_word(TYPE, FIRST), table_word(TYPE, FIRST + 1), below)
    high = permute_bytes(table_word(TYPE, FIRST + 2), table_word(TYPE, FIRST + 3), below)
    return permute_bytes(low, high, chosen)


@jit
def values_of_32(word, TYPE: tl.constexpr, FIRST: tl.constexpr):
    """Return what 32 bytes of a table, from word FIRST on, have for the lower 5 bits of four codes in bytes."""
    nibbles = word & 0x0F0F0F0F
    low, high = values_of_16(nibbles, TYPE, FIRST), values_of_16(nibbles, TYPE, FIRST + 4)
    return low ^ ((low ^ high) & ((word >> 4 & 0x01010101) * 255))


@jit
def table_bytes(word, TYPE: tl.constexpr):
    """Return the values that a table has for four codes in bytes, plus 128."""
    if table_bits(TYPE) <= 3:
        values = values_of_8(word, TYPE)
    elif table_bits(TYPE) == 4:
        values = values_of_16(word, TYPE, 0)
    elif table_bits(TYPE) == 5:
        values = values_of_32(word, TYPE, 0)
    else:
        low, high = values_of_32(word, TYPE, 0), values_of_32(word, TYPE, 8)
        values = low ^ ((low ^ high) & ((word >> 5 & 0x01010101) * 255))
    return values


@jit
def number(word, one, b: tl.constexpr, TYPE: tl.constexpr):
    """Return what the code in byte b of a word stands for, as fp32."""
    if table_bits(TYPE) > 0:
        u = shifted(table_bytes(word, TYPE), 15 - 8 * b) & 0x7F8000
        return (u | one).to(tl.float32, bitcast=True) * 256.0 - 384.0  # 256 (1 + u / 256), of u = value + 128: exact
    if TYPE == NVFP4:
        return e2m1(word, 8 * b)
    if is_grouped(TYPE):
        if code_kind(TYPE) == E2M1:
            return e2m1(word, 8 * b)
        if code_kind(TYPE) == F8:
            return e4m3(word, 8 * b)
    return (shifted(word, 15 - 8 * b) & 0x7F8000 | one).to(tl.float32, bitcast=True)


@jit
def weight(word, s, m, one, b: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the weight of byte b of a word of codes."""
    if has_offset(TYPE):
        return (number(word, one, b, TYPE) * s - m).to(DTYPE)
    return (number(word, one, b, TYPE) * s).to(DTYPE)


@jit
def code_tile(base, k0, n, mask, one, TYPE: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Load columns k0 .. k0 + 63 (k0 a multiple of 64) of the rows n [1, BN] -> [64, BN] of DTYPE; zero past K."""
    i = tl.arange(0, 16)[:, None]
    word = code_word(base, k0 // 64, i, n, mask, TYPE, K)
    s, m = code_scales(base, k0 // 64, i // 4, n, mask, TYPE, K)
    even = tl.join(weight(word, s, m, one, 0, TYPE, DTYPE), weight(word, s, m, one, 2, TYPE, DTYPE))
    odd = tl.join(weight(word, s, m, one, 1, TYPE, DTYPE), weight(word, s, m, one, 3, TYPE, DTYPE))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (64, n.shape[1]))
