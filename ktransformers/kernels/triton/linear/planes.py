"""Products of one row of block-wise int16 (block_int16.py) with weights in the GPU's layout, four columns in one
instruction.

The bytes of a word are the values u of four columns, in their order, after one or two operations on what is stored
(repack.py says why: low nibbles are columns 0-3, high ones 4-7). Sums of u q over the columns of one scale are exact
int32; what types subtract from u is subtracted as sums of q, which come with the block-wise int16. Steps of KS groups
of 32 columns are loaded ahead, as in matmul.py. Knows dequant.py; does not know grids of programs, experts.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.bits import MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0
from ktransformers.kernels.triton.common.byte_ops import dot_signed, dot_unsigned
from ktransformers.kernels.triton.common.runtime import jit, static, tl
from ktransformers.kernels.triton.linear.block_int16_gemv import nibble_values
from ktransformers.kernels.triton.quant.block_int16 import block_sums, byte_plane_word, load_block_int16
from ktransformers.kernels.triton.quant.dequant import five_bits, group_scales, group_words, six_bits
from ktransformers.kernels.triton.quant.tables import VALUES_FP4
from ktransformers.kernels.types import QuantType

__all__ = ["is_plane_type", "plane_gemv", "plane_pair"]

_TYPES = frozenset(
    map(int, (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q4_0, QuantType.Q8_0, QuantType.MXFP4))
)


@static
def is_plane_type(type_number):
    """Whether this module multiplies rows of block-wise int16 with weights of a type."""
    return type_number in _TYPES


@jit
def fp4_book(tables, TYPE: tl.constexpr, KS: tl.constexpr):
    """Return twice the values of FP4, as `block_int16_gemv.value_words` has those of IQ4; of other types nothing is
    read.
    """
    at = tl.arange(0, KS)[:, None] % 8
    if TYPE != MXFP4:
        return at, at, at, at
    book = (tables + VALUES_FP4).to(tl.pointer_type(tl.int32)) + at
    return tl.load(book), tl.load(book + 8), tl.load(book + 16), tl.load(book + 24)


@jit
def nibble_bytes(words, book, j: tl.constexpr, TYPE: tl.constexpr):
    """Return columns 8 j .. 8 j + 3 and 8 j + 4 .. 8 j + 7 of a group."""
    if TYPE == MXFP4:
        return nibble_values(book, words[j])
    return words[j] & 0x0F0F0F0F, (words[j] >> 4) & 0x0F0F0F0F


@jit
def group_bytes(words, book, TYPE: tl.constexpr):
    """Return the values of groups of 32 columns as eight words; words: of `group_words`."""
    if TYPE == Q8_0:
        return words
    if TYPE == Q5_K:
        return (
            five_bits(words, 0), five_bits(words, 1), five_bits(words, 2), five_bits(words, 3),
            five_bits(words, 4), five_bits(words, 5), five_bits(words, 6), five_bits(words, 7),
        )  # fmt: skip
    if TYPE == Q6_K:
        low, high = words, (words[3], words[4], words[5])
        return (
            low[0] & 0x3F3F3F3F, low[1] & 0x3F3F3F3F, low[2] & 0x3F3F3F3F, six_bits(low, 3),
            high[0] & 0x3F3F3F3F, high[1] & 0x3F3F3F3F, high[2] & 0x3F3F3F3F, six_bits(high, 3),
        )  # fmt: skip
    a, b = nibble_bytes(words, book, 0, TYPE)
    c, d = nibble_bytes(words, book, 1, TYPE)
    e, f = nibble_bytes(words, book, 2, TYPE)
    g, h = nibble_bytes(words, book, 3, TYPE)
    return a, b, c, d, e, f, g, h


@jit
def whole_dots(values, planes, first: tl.constexpr, count: tl.constexpr):
    """Return sums over words first .. first + count - 1 of values times q, int32."""
    a = tl.zeros(values[first].shape, tl.int32)
    b = a
    for i in tl.static_range(first, first + count):
        a = dot_signed(values[i], byte_plane_word(planes, 1, i), a)
        b = dot_unsigned(values[i], byte_plane_word(planes, 0, i), b)
    return a * 256 + b


@jit
def add_bytes(acc, block_int16, sums, values, sm, TYPE: tl.constexpr):
    """Return acc [KS, BN] plus products with groups of 32 columns; block-wise int16, sums: of block_int16.py; sm: of
    `group_scales`.
    """
    planes, d = block_int16
    if TYPE == Q6_K:
        first = whole_dots(values, planes, 0, 4) - 32 * sums[0]
        second = whole_dots(values, planes, 4, 4) - 32 * sums[1]
        return acc + (first.to(tl.float32) * sm[0] + second.to(tl.float32) * sm[2]) * d
    dots = whole_dots(values, planes, 0, 8)
    if TYPE == Q4_0:
        dots -= 8 * (sums[0] + sums[1])
    acc += dots.to(tl.float32) * (sm[0] * d)
    if TYPE == Q4_K or TYPE == Q5_K:
        acc -= sm[1] * sums[2]
    return acc


@jit
def plane_gemv(x, base, n, mask, tables, first, last, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
                 KS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Products of a row of block-wise int16, in the natural order, with the rows n [1, BN] of weights, fp32 [BN].

    x: int32 pointer to the row's first block. first, last: steps of KS groups, STAGES - 1 of
    which are under way while one is multiplied.
    """
    EVEN: tl.constexpr = K // 32 % KS == 0
    acc = tl.zeros((KS, n.shape[1]), tl.float32)
    book = fp4_book(tables, TYPE, KS)
    for step in tl.range(first, last, num_stages=STAGES):
        group = step * KS + tl.arange(0, KS)[:, None]
        inside = group < K // 32
        live = mask if EVEN else mask & inside
        words, sm = group_words(base, group, n, live, TYPE, N), group_scales(base, group, n, live, TYPE, K, N)
        block_int16, sums = load_block_int16(x + group * 32, inside, EVEN), block_sums(x + group * 32, inside, EVEN)
        acc = add_bytes(acc, block_int16, sums, group_bytes(words, book, TYPE), sm, TYPE)
    return tl.sum(acc, axis=0)


@jit
def plane_pair(x, gate, up, n, mask, tables, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
               N: tl.constexpr, KS: tl.constexpr):  # fmt: skip
    """Run `plane_gemv` with two matrices of one shape in one loop."""
    EVEN: tl.constexpr = K // 32 % KS == 0
    g = tl.zeros((KS, n.shape[1]), tl.float32)
    u = g
    book = fp4_book(tables, MXFP4 if UP == MXFP4 else GATE, KS)
    for step in tl.range(first, last, num_stages=3):
        group = step * KS + tl.arange(0, KS)[:, None]
        inside = group < K // 32
        live = mask if EVEN else mask & inside
        gate_words, gate_sm = group_words(gate, group, n, live, GATE, N), group_scales(gate, group, n, live, GATE, K, N)
        up_words, up_sm = group_words(up, group, n, live, UP, N), group_scales(up, group, n, live, UP, K, N)
        block_int16, sums = load_block_int16(x + group * 32, inside, EVEN), block_sums(x + group * 32, inside, EVEN)
        g = add_bytes(g, block_int16, sums, group_bytes(gate_words, book, GATE), gate_sm, GATE)
        u = add_bytes(u, block_int16, sums, group_bytes(up_words, book, UP), up_sm, UP)
    return tl.sum(g, axis=0), tl.sum(u, axis=0)
