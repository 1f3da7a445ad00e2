"""Products of few rows with weights in the CPU's tiles whose codes stand for numbers: a GEMV.

Every lane multiplies groups of 64 columns of its own rows: the words of a line lie side by side for 16 rows, so that
reads are as wide as those of planes. Numbers are multiplied as they come out of their code and summed over 16 columns,
which share a scale. Sums are fp32. Knows cpu_packed_codes.py; does not know grids of programs, experts.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import jit, tl
from ktransformers.kernels.triton.quant.cpu_packed_codes import code_scales, code_word, has_offset, number
from ktransformers.kernels.triton.quant.gemv_inputs import pair

__all__ = ["code_gemv", "code_pair"]


@jit
def group_codes(base, group, n, mask, TYPE: tl.constexpr, K: tl.constexpr):
    """Return the 16 words of each group, and S and M of its four quarters."""
    words = (
        code_word(base, group, 0, n, mask, TYPE, K), code_word(base, group, 1, n, mask, TYPE, K),
        code_word(base, group, 2, n, mask, TYPE, K), code_word(base, group, 3, n, mask, TYPE, K),
        code_word(base, group, 4, n, mask, TYPE, K), code_word(base, group, 5, n, mask, TYPE, K),
        code_word(base, group, 6, n, mask, TYPE, K), code_word(base, group, 7, n, mask, TYPE, K),
        code_word(base, group, 8, n, mask, TYPE, K), code_word(base, group, 9, n, mask, TYPE, K),
        code_word(base, group, 10, n, mask, TYPE, K), code_word(base, group, 11, n, mask, TYPE, K),
        code_word(base, group, 12, n, mask, TYPE, K), code_word(base, group, 13, n, mask, TYPE, K),
        code_word(base, group, 14, n, mask, TYPE, K), code_word(base, group, 15, n, mask, TYPE, K),
    )  # fmt: skip
    s0, m0 = code_scales(base, group, 0, n, mask, TYPE, K)
    s1, m1 = code_scales(base, group, 1, n, mask, TYPE, K)
    s2, m2 = code_scales(base, group, 2, n, mask, TYPE, K)
    s3, m3 = code_scales(base, group, 3, n, mask, TYPE, K)
    return words, (s0, s1, s2, s3), (m0, m1, m2, m3)


@jit
def four_inputs(at, i: tl.constexpr, inside, HALF: tl.constexpr):
    """Return the activations of columns 4 i .. 4 i + 3 of each group, fp32 [G, 1] each."""
    word = tl.load(at + i, mask=inside, other=0)
    x0, x1 = pair(word.to(tl.int32), HALF)
    x2, x3 = pair((word >> 32).to(tl.int32), HALF)
    return x0, x1, x2, x3


@jit
def add_group(acc, x, group, codes, one, TYPE: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr):
    """Return acc [G, BN] plus the products of one row of x with groups of 64 columns. x: at a multiple of 8 bytes."""
    words, s, m = codes
    at = x.to(tl.pointer_type(tl.int64)) + group * 16
    for q in tl.static_range(4):
        even = tl.zeros(acc.shape, tl.float32)
        odd = even
        total = tl.zeros((acc.shape[0], 1), tl.float32)
        inside = group * 2 + q // 2 < K // 32
        for i in tl.static_range(4 * q, 4 * q + 4):
            x0, x1, x2, x3 = four_inputs(at, i, inside, HALF)
            even += number(words[i], one, 0, TYPE) * x0
            odd += number(words[i], one, 1, TYPE) * x1
            even += number(words[i], one, 2, TYPE) * x2
            odd += number(words[i], one, 3, TYPE) * x3
            total += (x0 + x2) + (x1 + x3)
        if has_offset(TYPE):
            acc += (even + odd) * s[q] - total * m[q]
        else:
            acc += (even + odd) * s[q]
    return acc


@jit
def code_gemv(x, stride, base, n, mask, one, first, last, TYPE: tl.constexpr, K: tl.constexpr, KS: tl.constexpr,
                M: tl.constexpr):  # fmt: skip
    """Products of M <= 4 rows of x with the rows n [1, BN] of weights in tiles; as `matmul.gemv_tile`, KS even."""
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    a0 = tl.zeros((KS // 2, n.shape[1]), tl.float32)
    a1, a2, a3 = a0, a0, a0
    for step in tl.range(first, last, num_stages=3):
        group = step * (KS // 2) + tl.arange(0, KS // 2)[:, None]
        codes = group_codes(base, group, n, mask & (group * 2 < K // 32), TYPE, K)
        a0 = add_group(a0, x, group, codes, one, TYPE, K, HALF)
        if M > 1:
            a1 = add_group(a1, x + stride, group, codes, one, TYPE, K, HALF)
        if M > 2:
            a2 = add_group(a2, x + 2 * stride, group, codes, one, TYPE, K, HALF)
        if M > 3:
            a3 = add_group(a3, x + 3 * stride, group, codes, one, TYPE, K, HALF)
    return tl.sum(a0, axis=0), tl.sum(a1, axis=0), tl.sum(a2, axis=0), tl.sum(a3, axis=0)


@jit
def code_pair(x, gate, up, n, mask, one, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
              KS: tl.constexpr):  # fmt: skip
    """Run `code_gemv` of one row of x with two matrices of one shape in one loop."""
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    g = tl.zeros((KS // 2, n.shape[1]), tl.float32)
    u = g
    for step in tl.range(first, last, num_stages=3):
        group = step * (KS // 2) + tl.arange(0, KS // 2)[:, None]
        live = mask & (group * 2 < K // 32)
        g = add_group(g, x, group, group_codes(gate, group, n, live, GATE, K), one, GATE, K, HALF)
        u = add_group(u, x, group, group_codes(up, group, n, live, UP, K), one, UP, K, HALF)
    return tl.sum(g, axis=0), tl.sum(u, axis=0)
