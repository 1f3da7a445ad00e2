"""Products of one row of block-wise int16 with weights that are looked up: IQ1, IQ2, IQ3 and IQ4, four columns at a
time.

Values of 8 bits (of IQ1: 8 value - 8 +- 1) are multiplied with a word of block_int16.py, four at once, into int32; sums
over the columns of one scale then become fp32. Where they come from:

- IQ1 and IQ2 have at most 8 of them, signs included. What is looked up for a code (lookups.py) are only the ranks of
  its columns, a nibble each; values come from registers by a permutation of bytes that takes nibbles as its selector, a
  sign being one more bit of it. Ranks lie in the strided order: those of the four codes of a part are exchanged
  bytewise, so that nibble q of word r is column r + 4 q, whose sign is bit r + 4 q of the part's.
- IQ3: what is looked up for a code are its four values; their signs are computed.
- IQ4: a code is the rank.

Knows cpu_packed_grid.py and cpu_packed_codes.py; does not know grids of programs, experts.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.byte_ops import byte_signs, dot_signed, dot_unsigned, permute_bytes
from ktransformers.kernels.triton.common.runtime import jit, static, tl
from ktransformers.kernels.triton.linear.grid import later_words
from ktransformers.kernels.triton.quant.block_int16 import byte_plane_word, load_block_int16
from ktransformers.kernels.triton.quant.cpu_packed_bytes import block_bytes, head_bytes, line_words, tile_bytes
from ktransformers.kernels.triton.quant.cpu_packed_codes import IQ4_XS, code_scales
from ktransformers.kernels.triton.quant.cpu_packed_grid import (
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    has_grid,
    part_scales,
    part_signs,
)
from ktransformers.kernels.triton.quant.lookups import code_count, has_codes_of_four, looked_up
from ktransformers.kernels.triton.quant.tables import (
    BYTES_IQ3_S,
    BYTES_IQ3_XXS,
    RANKS_IQ1,
    RANKS_IQ2_S,
    RANKS_IQ2_XS,
    RANKS_IQ2_XXS,
    VALUES_IQ1,
    VALUES_IQ2,
    VALUES_IQ4,
)
from ktransformers.kernels.types import QuantType

__all__ = ["block_int16_gemv", "digit_pair", "has_block_int16", "is_strided"]


_NIBBLES = (int(QuantType.IQ4_XS), int(QuantType.IQ4_NL))


@static
def has_block_int16(type_number):
    """Whether this module multiplies rows of block-wise int16 with weights of a type."""
    return has_grid(type_number) or type_number in _NIBBLES


@static
def is_strided(type_number):
    """Whether a type takes block-wise int16 in the strided order, not in the natural one."""
    return has_grid(type_number) and not has_codes_of_four(type_number)


@jit
def value_words(tables, TYPE: tl.constexpr, P: tl.constexpr):
    """The values of IQ1, IQ2 or IQ4 by rank, in up to four words, int32 [P, 1]: of IQ1 and IQ2 in two.

    All rows are the same. What is the same for all lanes, constants too, the compiler keeps in registers of which a
    permutation takes no two, and moves it for every one; so each lane has an address of its own.
    """
    AT: tl.constexpr = (
        VALUES_IQ1 if TYPE == IQ1_S or TYPE == IQ1_M
        else VALUES_IQ2 if has_grid(TYPE)
        else VALUES_IQ4
    )  # fmt: skip
    at = (tables + AT).to(tl.pointer_type(tl.int32)) + tl.arange(0, P)[:, None] % 8
    low, high = tl.load(at), tl.load(at + 8)
    if not has_grid(TYPE):
        return low, high, tl.load(at + 16), tl.load(at + 24)
    return low, high, low, high


@jit
def code_table(tables, TYPE: tl.constexpr):
    """Return the table of a type's codes, int32 [codes]: of IQ1 and IQ2 the ranks of a code's columns, of IQ3 its
    values, as in tables.py.
    """
    AT: tl.constexpr = (
        RANKS_IQ2_XXS if TYPE == IQ2_XXS
        else RANKS_IQ2_XS if TYPE == IQ2_XS
        else RANKS_IQ2_S if TYPE == IQ2_S
        else BYTES_IQ3_XXS if TYPE == IQ3_XXS
        else BYTES_IQ3_S if TYPE == IQ3_S
        else RANKS_IQ1
    )  # fmt: skip
    return tl.load((tables + AT).to(tl.pointer_type(tl.int32)) + tl.arange(0, code_count(TYPE)))


@jit
def books(tables, TYPE: tl.constexpr, P: tl.constexpr):
    """Return the tables in which `grid_bytes` looks codes up: `code_table`, and but for IQ3 `value_words`."""
    table = code_table(tables, TYPE)
    values = table
    if not has_codes_of_four(TYPE):
        values = value_words(tables, TYPE, P)
    return table, values


@jit
def strided_ranks(table, words, TYPE: tl.constexpr):
    """Return four words; nibble q of word r is the rank of column r + 4 q of a part."""
    a, b, c, d = looked_up(table, words, TYPE)
    low_ab, low_cd = permute_bytes(a, b, 0x5140), permute_bytes(c, d, 0x5140)
    high_ab, high_cd = permute_bytes(a, b, 0x7362), permute_bytes(c, d, 0x7362)
    return (
        permute_bytes(low_ab, low_cd, 0x5410),
        permute_bytes(low_ab, low_cd, 0x7632),
        permute_bytes(high_ab, high_cd, 0x5410),
        permute_bytes(high_ab, high_cd, 0x7632),
    )


@jit
def sign_bits(signs, r: tl.constexpr):
    """Return the signs of columns r + 4 q in bits 4 q + 2."""
    if r < 2:
        return (signs << (2 - r)) & 0x44444444
    return (signs >> (r - 2)) & 0x44444444


@jit
def two_words(book, ranks, signs, r: tl.constexpr, TYPE: tl.constexpr):
    """Return the values of columns r, r + 4, r + 8, r + 12, and of those 16 further.

    book: of `value_words`; signs: of `part_signs`, of IQ1 as a mask.
    """
    ranks = ranks | (signs if TYPE == IQ1_S or TYPE == IQ1_M else sign_bits(signs, r))
    return permute_bytes(book[0], book[1], ranks), permute_bytes(book[0], book[1], ranks >> 16)


@jit
def strided_bytes(found, words, TYPE: tl.constexpr):
    """Return the 32 values of parts of IQ1 and IQ2 as eight words in the strided order, see `grid_bytes`."""
    table, book = found
    ranks = strided_ranks(table, words, TYPE)
    signs = part_signs(words, TYPE)
    if TYPE == IQ1_S:
        signs = (signs >> 31) & 0x44444444
    elif TYPE == IQ1_M:
        signs = ((signs >> 7) & 0x01010101) * 0x44
    a, e = two_words(book, ranks[0], signs, 0, TYPE)
    b, f = two_words(book, ranks[1], signs, 1, TYPE)
    c, g = two_words(book, ranks[2], signs, 2, TYPE)
    d, h = two_words(book, ranks[3], signs, 3, TYPE)
    return a, b, c, d, e, f, g, h


@jit
def with_signs(values, signs, r: tl.constexpr):
    """Negate bytes of `values`, none of them zero: byte p where bit 4 r + p of `signs` is set."""
    minus = byte_signs(((signs >> (4 * r)) & 15) * 0x10204080)  # moves bit p to bit 8 p + 7, and others below
    return (values ^ minus) + (minus & 0x01010101)


@jit
def signed_bytes(table, words, TYPE: tl.constexpr):
    """Return the 32 values of parts of IQ3 as eight words, see `grid_bytes`. Its signs are computed: looked up they are
    a third of what is read of shared memory.
    """
    a, b, c, d, e, f, g, h = looked_up(table, words, TYPE)
    signs = part_signs(words, TYPE)
    return (
        with_signs(a, signs, 0), with_signs(b, signs, 1), with_signs(c, signs, 2), with_signs(d, signs, 3),
        with_signs(e, signs, 4), with_signs(f, signs, 5), with_signs(g, signs, 6), with_signs(h, signs, 7),
    )  # fmt: skip


@jit
def grid_bytes(found, words, TYPE: tl.constexpr):
    """Return the 32 values of parts, as eight words, of IQ3 in the natural order, else in the strided one.

    found: of `books`; words: of `part_words`.
    """
    return signed_bytes(found[0], words, TYPE) if has_codes_of_four(TYPE) else strided_bytes(found, words, TYPE)


@jit
def dots(values, planes, first: tl.constexpr, count: tl.constexpr):
    """Return sums over words first .. first + count - 1 of values times q, fp32 rounded once: of 32 columns int32 holds
    it.
    """
    a = tl.zeros(values[first].shape, tl.int32)
    b = a
    for i in tl.static_range(first, first + count):
        a = dot_signed(values[i], byte_plane_word(planes, 1, i), a)
        b = dot_unsigned(values[i], byte_plane_word(planes, 0, i), b)
    return (a * 256 + b).to(tl.float32)


@jit
def add_part(acc, block_int16, values, scales, TYPE: tl.constexpr):
    """Return acc [P, BN] plus products of block-wise int16 with parts of 32 columns. scales: of `part_scales`."""
    planes, d = block_int16
    if TYPE == IQ2_XS or TYPE == IQ2_S or TYPE == IQ1_M:
        acc += dots(values, planes, 0, 4) * (scales[0] * d)
        return acc + dots(values, planes, 4, 4) * (scales[1] * d)
    return acc + dots(values, planes, 0, 8) * (scales[0] * d)


@jit
def grid_loop(x, base, words, n, mask, tables, first, last, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr):
    """Run the loop of `block_int16_gemv` for IQ1 to IQ3; words: of the first step. What the next step reads is asked
    for a step before.
    """
    EVEN: tl.constexpr = K // 32 % KS == 0
    acc = tl.zeros((KS, n.shape[1]), tl.float32)
    found = books(tables, TYPE, KS)
    for step in range(first, last):
        part = step * KS + tl.arange(0, KS)[:, None]
        values, scales = grid_bytes(found, words, TYPE), part_scales(words, TYPE)
        words = later_words(base, step + 1, last, n, mask, TYPE, K, KS)
        acc = add_part(acc, load_block_int16(x + part * 32, part < K // 32, EVEN), values, scales, TYPE)
    return tl.sum(acc, axis=0)


@jit
def nibble_word(base, group, i: tl.constexpr, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return word i of the 8 of groups of 64 columns."""
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    if TYPE == IQ4_XS:
        block = head_bytes(TYPE, K) + group // 4 * block_bytes(TYPE)
        return line_words(base, block + 128 + 64 * (8 * (group % 4) + i), n, mask, SIZE)
    b = 2 * group + i // 4
    block = head_bytes(TYPE, K) + b * block_bytes(TYPE)
    return line_words(base, block + 64 * (i % 4), n, mask & (b < K // 32), SIZE)


@jit
def later_nibbles(base, step, last, n, mask, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr):
    """Load words of the KS / 2 groups of a step and the scales of their halves; zeros from step `last` on, and
    past K.
    """
    group = step * (KS // 2) + tl.arange(0, KS // 2)[:, None]
    live = mask & (2 * group < tl.where(step < last, K // 32, 0))
    first, _ = code_scales(base, group, 0, n, live, TYPE, K)
    second, _ = code_scales(base, group, 2, n, live, TYPE, K)
    return (
        nibble_word(base, group, 0, n, live, TYPE, K), nibble_word(base, group, 1, n, live, TYPE, K),
        nibble_word(base, group, 2, n, live, TYPE, K), nibble_word(base, group, 3, n, live, TYPE, K),
        nibble_word(base, group, 4, n, live, TYPE, K), nibble_word(base, group, 5, n, live, TYPE, K),
        nibble_word(base, group, 6, n, live, TYPE, K), nibble_word(base, group, 7, n, live, TYPE, K),
    ), first, second  # fmt: skip


@jit
def nibble_values(book, word):
    """Return the values of the low nibbles of a word, and of its high ones."""
    below, chosen = word & 0x77777777, ((word >> 1) & 0x44444444) | 0x32103210
    minus, plus = permute_bytes(book[0], book[1], below), permute_bytes(book[2], book[3], below)
    first = permute_bytes(minus, plus, chosen)
    below = below >> 16
    minus, plus = permute_bytes(book[0], book[1], below), permute_bytes(book[2], book[3], below)
    second = permute_bytes(minus, plus, chosen >> 16)
    return permute_bytes(first, second, 0x6420), permute_bytes(first, second, 0x7531)


@jit
def nibble_bytes(book, words, TYPE: tl.constexpr):
    """Return the 64 values of groups, as two tuples of eight words in the natural order."""
    a, a_high = nibble_values(book, words[0])
    b, b_high = nibble_values(book, words[1])
    c, c_high = nibble_values(book, words[2])
    d, d_high = nibble_values(book, words[3])
    e, e_high = nibble_values(book, words[4])
    f, f_high = nibble_values(book, words[5])
    g, g_high = nibble_values(book, words[6])
    h, h_high = nibble_values(book, words[7])
    if TYPE == IQ4_XS:  # low nibbles are the first 32 columns
        return (a, b, c, d, e, f, g, h), (a_high, b_high, c_high, d_high, e_high, f_high, g_high, h_high)
    return (a, b, c, d, a_high, b_high, c_high, d_high), (e, f, g, h, e_high, f_high, g_high, h_high)


@jit
def add_nibbles(acc, first, second, book, nibbles, TYPE: tl.constexpr):
    """Return acc [G, BN] plus products with groups of 64 columns; first, second: block-wise int16 of their halves."""
    words, s, t = nibbles
    values = nibble_bytes(book, words, TYPE)
    acc += dots(values[0], first[0], 0, 8) * (s * first[1])
    return acc + dots(values[1], second[0], 0, 8) * (t * second[1])


@jit
def nibble_loop(x, base, n, mask, tables, first, last, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr):
    """Run the loop of `block_int16_gemv` for IQ4."""
    EVEN: tl.constexpr = K // 32 % KS == 0
    acc = tl.zeros((KS // 2, n.shape[1]), tl.float32)
    book = value_words(tables, TYPE, KS // 2)
    words = later_nibbles(base, first, last, n, mask, TYPE, K, KS)
    for step in range(first, last):
        part = 2 * (step * (KS // 2) + tl.arange(0, KS // 2)[:, None])
        low = load_block_int16(x + part * 32, part < K // 32, EVEN)
        high = load_block_int16(x + part * 32 + 32, part + 1 < K // 32, EVEN)
        after = later_nibbles(base, step + 1, last, n, mask, TYPE, K, KS)
        acc = add_nibbles(acc, low, high, book, words, TYPE)
        words = after
    return tl.sum(acc, axis=0)


@jit
def nibble_loop_pair(x, gate, up, n, mask, tables, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
                     KS: tl.constexpr):  # fmt: skip
    """Run `nibble_loop` with two matrices of one shape."""
    EVEN: tl.constexpr = K // 32 % KS == 0
    g = tl.zeros((KS // 2, n.shape[1]), tl.float32)
    u = g
    book = value_words(tables, GATE, KS // 2)  # of both
    gate_words = later_nibbles(gate, first, last, n, mask, GATE, K, KS)
    up_words = later_nibbles(up, first, last, n, mask, UP, K, KS)
    for step in range(first, last):
        part = 2 * (step * (KS // 2) + tl.arange(0, KS // 2)[:, None])
        low = load_block_int16(x + part * 32, part < K // 32, EVEN)
        high = load_block_int16(x + part * 32 + 32, part + 1 < K // 32, EVEN)
        g = add_nibbles(g, low, high, book, gate_words, GATE)
        gate_words = later_nibbles(gate, step + 1, last, n, mask, GATE, K, KS)
        u = add_nibbles(u, low, high, book, up_words, UP)
        up_words = later_nibbles(up, step + 1, last, n, mask, UP, K, KS)
    return tl.sum(g, axis=0), tl.sum(u, axis=0)


@jit
def block_int16_gemv(x, base, n, mask, tables, first, last, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr):
    """Products of a row of block-wise int16 with the rows n [1, BN] of weights in tiles, fp32 [BN]; KS even.

    x: int32 pointer to the row's first block, in the order that `is_strided` says. first, last: steps of KS parts.
    """
    if has_grid(TYPE):
        words = later_words(base, first, last, n, mask, TYPE, K, KS)
        return grid_loop(x, base, words, n, mask, tables, first, last, TYPE, K, KS)
    return nibble_loop(x, base, n, mask, tables, first, last, TYPE, K, KS)


@jit
def digit_pair(x, gate, up, n, mask, tables, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
               KS: tl.constexpr):  # fmt: skip
    """Run `block_int16_gemv` with two matrices of one shape, of types that take one order; with a grid both or neither.

    Of IQ1 to IQ3 one loop after the other: what both need at once leaves room for half as many programs.
    """
    if has_grid(GATE):
        words = later_words(gate, first, last, n, mask, GATE, K, KS)
        if UP == IQ3_XXS or UP == IQ3_S:  # these are too many to wait in registers
            g = grid_loop(x, gate, words, n, mask, tables, first, last, GATE, K, KS)
            up_words = later_words(up, first, last, n, mask, UP, K, KS)
        else:
            up_words = later_words(up, first, last, n, mask, UP, K, KS)
            g = grid_loop(x, gate, words, n, mask, tables, first, last, GATE, K, KS)
        return g, grid_loop(x, up, up_words, n, mask, tables, first, last, UP, K, KS)
    return nibble_loop_pair(x, gate, up, n, mask, tables, first, last, GATE, UP, K, KS)
