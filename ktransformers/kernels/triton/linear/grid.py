"""Products of few rows with weights whose codes are looked up in a grid: the GEMV of these types.

Every lane has the codes of its own rows, a part of 32 columns at a time (lookups.py). Columns are multiplied as the
subnormal numbers that they are once a field is taken out of its word, with activations times 2^96, and summed place by
place: four sums, which are powers of two apart. What the next two steps read is asked for first, into registers. Sums
are fp32. Knows cpu_packed_grid.py; does not know grids of programs, experts.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import jit, tl
from ktransformers.kernels.triton.quant.cpu_packed_grid import (
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_XXS,
    delta_of,
    field,
    part_scales,
    part_signs,
    part_words,
    unit,
    with_signs,
)
from ktransformers.kernels.triton.quant.gemv_inputs import group_inputs, pair
from ktransformers.kernels.triton.quant.lookups import code_count, has_codes_of_four, looked_up
from ktransformers.kernels.triton.quant.tables import AT_IQ1, AT_IQ2_S, AT_IQ2_XS, AT_IQ2_XXS, AT_IQ3_S, AT_IQ3_XXS

__all__ = ["grid_gemv", "grid_pair"]


@jit
def add_four(sums, word, signs, four, k: tl.constexpr, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Add columns 4 k .. 4 k + 3 of a part to its four sums; four: their activations, in an int64 [P, 1].

    Returns the sums, and of the activations: 2^96 times their sum.
    """
    a, b, c, d = sums
    word = with_signs(word, signs, k, TYPE)
    x0, x1 = pair(four.to(tl.int32), HALF)
    x2, x3 = pair((four >> 32).to(tl.int32), HALF)
    up = 7.922816251426434e28  # 2^96
    x0, x1, x2, x3 = x0 * up, x1 * up, x2 * up, x3 * up
    a += field(word, 0, TYPE) * x0
    b += field(word, 1, TYPE) * x1
    c += field(word, 2, TYPE) * x2
    d += field(word, 3, TYPE) * x3
    return (a, b, c, d), (x0 + x2) + (x1 + x3)


@jit
def total_of(sums, TYPE: tl.constexpr):
    """Return a part's products of +-value (IQ1: 8 value) with activations, from the sums of `field` times activations
    times 2^96, which are 2^-53 `unit` of that.
    """
    a, b, c, d = sums
    TWO_53: tl.constexpr = 9007199254740992.0
    UP: tl.constexpr = 8.0 * TWO_53 if TYPE == IQ1_S or TYPE == IQ1_M else TWO_53
    return a * (UP / unit(0, TYPE)) + b * (UP / unit(1, TYPE)) + (c * (UP / unit(2, TYPE)) + d * (UP / unit(3, TYPE)))


@jit
def entry_table(tables, TYPE: tl.constexpr):
    """Return the entries of all codes of a type: int64 for 8 columns of IQ2, int32 for 8 of IQ1 and for 4 of IQ3."""
    at = tl.arange(0, code_count(TYPE))
    if TYPE == IQ1_S or TYPE == IQ1_M:
        table = tl.load((tables + AT_IQ1).to(tl.pointer_type(tl.uint16)) + at).to(tl.int32)
    elif has_codes_of_four(TYPE):
        AT_IQ3: tl.constexpr = AT_IQ3_XXS if TYPE == IQ3_XXS else AT_IQ3_S
        table = tl.load((tables + AT_IQ3).to(tl.pointer_type(tl.int32)) + at)
    else:
        AT_IQ2: tl.constexpr = AT_IQ2_XXS if TYPE == IQ2_XXS else AT_IQ2_XS if TYPE == IQ2_XS else AT_IQ2_S
        table = tl.load((tables + AT_IQ2).to(tl.pointer_type(tl.int64)) + at)
    return table


@jit
def entries_of(table, words, TYPE: tl.constexpr):
    """Return a word for every 4 columns of a part, as `cpu_packed_grid.part_entries` does; table: of `entry_table`."""
    found = looked_up(table, words, TYPE)
    if not has_codes_of_four(TYPE):
        a, b, c, d = found
        UP: tl.constexpr = 8 if TYPE == IQ1_S or TYPE == IQ1_M else 32
        found = (
            a.to(tl.int32), (a >> UP).to(tl.int32), b.to(tl.int32), (b >> UP).to(tl.int32),
            c.to(tl.int32), (c >> UP).to(tl.int32), d.to(tl.int32), (d >> UP).to(tl.int32),
        )  # fmt: skip
    return found


@jit
def decode_part(words, table, TYPE: tl.constexpr):
    """Return what all rows of x are multiplied with, from `part_words`: entries (8), signs, scales of both halves."""
    first, second = part_scales(words, TYPE)
    return entries_of(table, words, TYPE), part_signs(words, TYPE), first, second


@jit
def add_eight(sums, extra, entries, signs, inputs, j: tl.constexpr, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Add columns 8 j .. 8 j + 7 of a part to its sums; extra: of IQ1, 2^96 times the sum of (delta - 8) x."""
    sums, x_low = add_four(sums, entries[2 * j], signs, inputs[2 * j], 2 * j, TYPE, HALF)
    sums, x_high = add_four(sums, entries[2 * j + 1], signs, inputs[2 * j + 1], 2 * j + 1, TYPE, HALF)
    if TYPE == IQ1_S or TYPE == IQ1_M:
        x = x_low + x_high
        extra += delta_of(signs, x, j, TYPE) - 8.0 * x
    return sums, extra


@jit
def add_half(acc, decoded, s, inputs, h: tl.constexpr, J: tl.constexpr, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Add J times 8 columns of a part from 16 h on, which have one scale s."""
    entries, signs, _, _ = decoded
    zero = tl.zeros(acc.shape, tl.float32)
    sums, extra = (zero, zero, zero, zero), zero
    for j in tl.static_range(2 * h, 2 * h + J):
        sums, extra = add_eight(sums, extra, entries, signs, inputs, j, TYPE, HALF)
    total = total_of(sums, TYPE)
    if TYPE == IQ1_S or TYPE == IQ1_M:
        total += extra * 1.262177448353619e-29  # 2^-96
    return acc + total * s


@jit
def add_part(acc, inputs, decoded, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Return acc [P, BN] plus products of one row of x with parts of 32 columns; inputs: 8 int64 [P, 1] of four
    activations.

    decoded: of `decode_part`.
    """
    if TYPE == IQ2_XS or TYPE == IQ2_S or TYPE == IQ1_M:
        acc = add_half(acc, decoded, decoded[2], inputs, 0, 2, TYPE, HALF)
        return add_half(acc, decoded, decoded[3], inputs, 1, 2, TYPE, HALF)
    return add_half(acc, decoded, decoded[2], inputs, 0, 4, TYPE, HALF)


@jit
def later_words(base, step, last, n, mask, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr):
    """Load `part_words` of KS parts from step * KS on; zeros from step `last` on, and past K."""
    part = step * KS + tl.arange(0, KS)[:, None]
    return part_words(base, part, n, mask & (part < tl.where(step < last, K // 32, 0)), TYPE, K)


@jit
def grid_gemv(x, stride, base, n, mask, tables, first, last, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr,
                M: tl.constexpr):  # fmt: skip
    """Products of M <= 4 rows of x with the rows n [1, BN] of weights in tiles; as `matmul.gemv_tile`."""
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    EVEN: tl.constexpr = K // 32 % KS == 0
    a0 = tl.zeros((KS, n.shape[1]), tl.float32)
    a1, a2, a3 = a0, a0, a0
    table = entry_table(tables, TYPE)
    words = later_words(base, first, last, n, mask, TYPE, K, KS)
    after = later_words(base, first + 1, last, n, mask, TYPE, K, KS)
    for step in range(first, last):
        part = step * KS + tl.arange(0, KS)[:, None]
        inside = part < K // 32
        inputs = group_inputs(x, part, inside, EVEN)
        decoded = decode_part(words, table, TYPE)
        words = after
        after = later_words(base, step + 2, last, n, mask, TYPE, K, KS)
        a0 = add_part(a0, inputs, decoded, TYPE, HALF)
        if M > 1:
            a1 = add_part(a1, group_inputs(x + stride, part, inside, EVEN), decoded, TYPE, HALF)
        if M > 2:
            a2 = add_part(a2, group_inputs(x + 2 * stride, part, inside, EVEN), decoded, TYPE, HALF)
        if M > 3:
            a3 = add_part(a3, group_inputs(x + 3 * stride, part, inside, EVEN), decoded, TYPE, HALF)
    return tl.sum(a0, axis=0), tl.sum(a1, axis=0), tl.sum(a2, axis=0), tl.sum(a3, axis=0)


@jit
def grid_pair(x, gate, up, n, mask, tables, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
              KS: tl.constexpr):  # fmt: skip
    """Run `grid_gemv` of one row of x with two matrices of one shape in one loop."""
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    EVEN: tl.constexpr = K // 32 % KS == 0
    g = tl.zeros((KS, n.shape[1]), tl.float32)
    u = g
    gate_table, up_table = entry_table(tables, GATE), entry_table(tables, UP)
    gate_words = later_words(gate, first, last, n, mask, GATE, K, KS)
    up_words = later_words(up, first, last, n, mask, UP, K, KS)
    for step in range(first, last):
        part = step * KS + tl.arange(0, KS)[:, None]
        inputs = group_inputs(x, part, part < K // 32, EVEN)
        decoded = decode_part(gate_words, gate_table, GATE)
        gate_words = later_words(gate, step + 1, last, n, mask, GATE, K, KS)
        g = add_part(g, inputs, decoded, GATE, HALF)
        decoded_up = decode_part(up_words, up_table, UP)
        up_words = later_words(up, step + 1, last, n, mask, UP, K, KS)
        u = add_part(u, inputs, decoded_up, UP, HALF)
    return tl.sum(g, axis=0), tl.sum(u, axis=0)
