"""Products of few rows with weights whose codes are looked up in a grid: one part of 32 columns at a time.

The vector loop's share of these types (matmul.py): every lane looks up the codes of its own rows. Columns are multiplied
as the subnormal numbers that they are once a field is taken out of its word, with activations times 2^96, and summed
place by place: four sums, which are powers of two apart. Knows tiles_grid.py; does not know loops.
"""

from __future__ import annotations

from ktransformers.kernels.triton.bits import half_bits
from ktransformers.kernels.triton.runtime import jit, tl
from ktransformers.kernels.triton.tiles_grid import (
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    delta_of,
    field,
    part_entries,
    part_scales,
    part_signs,
    unit,
    with_signs,
)

__all__ = ["add_part", "decode_part"]


@jit
def pair_up(word, HALF: tl.constexpr):
    """2^96 times the two 16-bit floats of an int32, fp32 each. HALF: fp16, else bf16."""
    up = 7.922816251426434e28
    if HALF:
        return half_bits(word) * up, half_bits(word >> 16) * up
    return (word << 16).to(tl.float32, bitcast=True) * up, (word & -65536).to(tl.float32, bitcast=True) * up


@jit
def add_four(sums, word, signs, four, k: tl.constexpr, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Add columns 4 k .. 4 k + 3 of a part to its four sums; four: their activations, in an int64 [P, 1].

    Returns the sums, and of the activations: 2^96 times their sum.
    """
    a, b, c, d = sums
    word = with_signs(word, signs, k, TYPE)
    x0, x1 = pair_up(four.to(tl.int32), HALF)
    x2, x3 = pair_up((four >> 32).to(tl.int32), HALF)
    a += field(word, 0, TYPE) * x0
    b += field(word, 1, TYPE) * x1
    c += field(word, 2, TYPE) * x2
    d += field(word, 3, TYPE) * x3
    return (a, b, c, d), (x0 + x2) + (x1 + x3)


@jit
def total_of(sums, TYPE: tl.constexpr):
    """Of +-value (IQ1: 8 value) times activations: sums of `field` times those times 2^96 are 2^-53 `unit` of that."""
    a, b, c, d = sums
    TWO_53: tl.constexpr = 9007199254740992.0
    UP: tl.constexpr = 8.0 * TWO_53 if TYPE == IQ1_S or TYPE == IQ1_M else TWO_53
    return a * (UP / unit(0, TYPE)) + b * (UP / unit(1, TYPE)) + (c * (UP / unit(2, TYPE)) + d * (UP / unit(3, TYPE)))


@jit
def decode_part(words, tables, TYPE: tl.constexpr):
    """What all rows of x are multiplied with, from `part_words`: entries (8), signs, scales of both halves."""
    first, second = part_scales(words, TYPE)
    return part_entries(tables, words, TYPE), part_signs(words, TYPE), first, second


@jit
def add_eight(sums, extra, entries, signs, inputs, j: tl.constexpr, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Add columns 8 j .. 8 j + 7; extra: of IQ1, 2^96 times the sum of (delta - 8) x."""
    sums, x_low = add_four(sums, entries[2 * j], signs, inputs[2 * j], 2 * j, TYPE, HALF)
    sums, x_high = add_four(sums, entries[2 * j + 1], signs, inputs[2 * j + 1], 2 * j + 1, TYPE, HALF)
    if TYPE == IQ1_S or TYPE == IQ1_M:
        x = x_low + x_high
        extra += delta_of(signs, x, j, TYPE) - 8.0 * x
    return sums, extra


@jit
def add_half(acc, decoded, s, inputs, h: tl.constexpr, J: tl.constexpr, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Add J times 8 columns from 16 h on, which have one scale s."""
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
    """acc [P, BN] plus products of one row of x with parts of 32 columns; inputs: 8 int64 [P, 1] of four activations.

    decoded: of `decode_part`.
    """
    if TYPE == IQ2_XS or TYPE == IQ2_S or TYPE == IQ1_M:
        acc = add_half(acc, decoded, decoded[2], inputs, 0, 2, TYPE, HALF)
        return add_half(acc, decoded, decoded[3], inputs, 1, 2, TYPE, HALF)
    return add_half(acc, decoded, decoded[2], inputs, 0, 4, TYPE, HALF)
