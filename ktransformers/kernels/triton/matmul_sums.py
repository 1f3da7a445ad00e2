"""Products of one row of digits with weights whose codes are whole numbers of up to 7 bits: w = s u - m.

Four codes lie in the bytes of a word as they are multiplied; what is subtracted needs the sum of x alone over the 16
columns of a scale, which digits.py has. Knows tiles_codes.py; does not know grids of programs, experts.
"""

from __future__ import annotations

from ktransformers.kernels.triton.digits import block_digits, block_sums
from ktransformers.kernels.triton.matmul_digits import dots
from ktransformers.kernels.triton.runtime import jit, static, tl
from ktransformers.kernels.triton.tiles_codes import code_word, plain_scales
from ktransformers.kernels.types import QuantType

__all__ = ["has_sums", "sum_pair", "sum_vector"]

_TYPES = frozenset(map(int, (QuantType.Q2_K, QuantType.Q3_K)))


@static
def has_sums(type_number):
    """Whether rows of digits, in the natural order, are multiplied with a type here."""
    return type_number in _TYPES


@jit
def half_words(base, group, half: tl.constexpr, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """The 8 words of 32 of a group's columns."""
    at: tl.constexpr = 8 * half
    return (
        code_word(base, group, at, n, mask, TYPE, K), code_word(base, group, at + 1, n, mask, TYPE, K),
        code_word(base, group, at + 2, n, mask, TYPE, K), code_word(base, group, at + 3, n, mask, TYPE, K),
        code_word(base, group, at + 4, n, mask, TYPE, K), code_word(base, group, at + 5, n, mask, TYPE, K),
        code_word(base, group, at + 6, n, mask, TYPE, K), code_word(base, group, at + 7, n, mask, TYPE, K),
    )  # fmt: skip


@jit
def add_half(acc, x, base, group, half: tl.constexpr, n, mask, TYPE: tl.constexpr, K: tl.constexpr,
             EVEN: tl.constexpr):  # fmt: skip
    """acc [G, BN] plus products with one half of groups of 64 columns."""
    part = 2 * group + half
    at, inside = x + part * 32, part < K // 32
    planes, d = block_digits(at, inside, EVEN)
    first_sum, second_sum = block_sums(at, inside, EVEN)
    words = half_words(base, group, half, n, mask, TYPE, K)
    s, m = plain_scales(base, group, 2 * half, n, mask, TYPE, K)
    t, o = plain_scales(base, group, 2 * half + 1, n, mask, TYPE, K)
    acc += dots(words, planes, 0, 4) * (s * d) - first_sum * m
    return acc + (dots(words, planes, 4, 4) * (t * d) - second_sum * o)


@jit
def sum_vector(x, base, n, mask, first, last, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr):
    """As `matmul_digits.digit_vector`."""
    EVEN: tl.constexpr = K // 32 % KS == 0
    acc = tl.zeros((KS // 2, n.shape[1]), tl.float32)
    for step in tl.range(first, last, num_stages=3):
        group = step * (KS // 2) + tl.arange(0, KS // 2)[:, None]
        live = mask & (group * 2 < K // 32)
        acc = add_half(acc, x, base, group, 0, n, live, TYPE, K, EVEN)
        acc = add_half(acc, x, base, group, 1, n, live, TYPE, K, EVEN)
    return tl.sum(acc, axis=0)


@jit
def sum_pair(x, gate, up, n, mask, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
             KS: tl.constexpr):  # fmt: skip
    """As `matmul_digits.digit_pair`."""
    EVEN: tl.constexpr = K // 32 % KS == 0
    g = tl.zeros((KS // 2, n.shape[1]), tl.float32)
    u = g
    for step in tl.range(first, last, num_stages=3):
        group = step * (KS // 2) + tl.arange(0, KS // 2)[:, None]
        live = mask & (group * 2 < K // 32)
        for half in tl.static_range(2):
            g = add_half(g, x, gate, group, half, n, live, GATE, K, EVEN)
            u = add_half(u, x, up, group, half, n, live, UP, K, EVEN)
    return tl.sum(g, axis=0), tl.sum(u, axis=0)
