"""Device functions of the products with quantized weights: the vector loop, the tile loop and split-K's last step.

Two ways to multiply. `vector_tile` is for few rows of x and packed weights: every lane unpacks words of its own rows
and multiplies them with activations that are the same for all lanes; no shared memory, no barrier inside the loop;
bound by memory. `dot_tile` is for many rows, and for any weights: a tile of weights is dequantized in registers and
goes through the tensor cores. Both accumulate in fp32. Knows dequant.py; does not know grids, bias, experts.
"""

from __future__ import annotations

from ktransformers.kernels.triton.bits import F8_E4M3, Q5_K, Q6_K, half_bits
from ktransformers.kernels.triton.dequant import chunk_words, one_plus, scales, unit, weight_tile
from ktransformers.kernels.triton.runtime import jit, tl

__all__ = ["arrive_last", "dot_tile", "dot_tile_pair", "vector_row", "vector_row_pair", "vector_tile"]


@jit
def pair(word, HALF: tl.constexpr):
    """The two 16-bit floats of an int32, fp32 each. HALF: fp16, else bf16."""
    if HALF:
        return half_bits(word), half_bits(word >> 16)
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@jit
def four(at, inside, EVEN: tl.constexpr):
    """Four 16-bit floats from an aligned address [KS, 1], as fp32."""
    at64 = at.to(tl.pointer_type(tl.int64))
    both = tl.load(at64) if EVEN else tl.load(at64, mask=inside, other=0)
    HALF: tl.constexpr = at.dtype.element_ty == tl.float16
    x0, x1 = pair(both.to(tl.int32), HALF)
    x2, x3 = pair((both >> 32).to(tl.int32), HALF)
    return x0, x1, x2, x3


@jit
def add_eight(sums, at, inside, words, one, i: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr):
    """Add columns i .. i + 7 of a chunk, whose activations are at `at`, to `sums`.

    sums: of x (1 + u / 2^p) over even and over odd columns [KS, BN], and of x alone over each [KS, 1].
    """
    even, odd, x_even, x_odd = sums
    x0, x1, x2, x3 = four(at, inside, EVEN)
    even += one_plus(words, one, i, TYPE) * x0
    odd += one_plus(words, one, i + 1, TYPE) * x1
    even += one_plus(words, one, i + 2, TYPE) * x2
    odd += one_plus(words, one, i + 3, TYPE) * x3
    x_even += x0 + x2
    x_odd += x1 + x3
    x4, x5, x6, x7 = four(at + 4, inside, EVEN)
    even += one_plus(words, one, i + 4, TYPE) * x4
    odd += one_plus(words, one, i + 5, TYPE) * x5
    even += one_plus(words, one, i + 6, TYPE) * x6
    odd += one_plus(words, one, i + 7, TYPE) * x7
    return even, odd, x_even + (x4 + x6), x_odd + (x5 + x7)


@jit
def add_group(acc, sums, s, m, TYPE: tl.constexpr):
    """acc + sum of x w over the columns of one scale, from what `add_eight` summed."""
    even, odd, x_even, x_odd = sums
    if TYPE == F8_E4M3:
        return acc + (even + odd) * s
    s_even, s_odd = unit(0, TYPE) * s, unit(1, TYPE) * s
    return acc + (even * s_even - x_even * (s_even + m)) + (odd * s_odd - x_odd * (s_odd + m))


@jit
def no_sums(KS: tl.constexpr, BN: tl.constexpr):
    tile, column = tl.zeros((KS, BN), tl.float32), tl.zeros((KS, 1), tl.float32)
    return tile, tile, column, column


@jit
def vector_tile(x, stride, base, n, mask, one, first, last, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
                KS: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """Products of M <= 4 rows of x with the rows n [1, BN] of packed weights over groups of 32 columns.

    x: rows at multiples of 8 bytes. first, last: range of steps of KS groups. Returns four fp32 [BN]; those from M on
    are zero.
    """
    BN: tl.constexpr = n.shape[1]
    a0 = tl.zeros((KS, BN), tl.float32)
    a1, a2, a3 = a0, a0, a0
    EVEN: tl.constexpr = K // 32 % KS == 0
    C: tl.constexpr = 32 if TYPE == Q5_K else 16 if TYPE == Q6_K else 8  # columns of a chunk
    PARTS: tl.constexpr = 2 if TYPE == Q6_K else 1  # scales of 32 columns
    for step in range(first, last):
        group = step * KS + tl.arange(0, KS)[:, None]
        inside = group < K // 32
        live = mask if EVEN else mask & inside
        for part in tl.static_range(PARTS):
            s, m = scales(base, group * PARTS + part, n, live, TYPE, K, N)
            t0 = no_sums(KS, BN)
            t1, t2, t3 = t0, t0, t0
            for c in tl.static_range(32 // PARTS // C):
                words = chunk_words(base, group * (32 // C) + part + c, n, live, TYPE, N)
                for i in tl.static_range(0, C, 8):
                    at = x + group * 32 + (16 * part + C * c + i)
                    t0 = add_eight(t0, at, inside, words, one, i, TYPE, EVEN)
                    if M > 1:
                        t1 = add_eight(t1, at + stride, inside, words, one, i, TYPE, EVEN)
                    if M > 2:
                        t2 = add_eight(t2, at + 2 * stride, inside, words, one, i, TYPE, EVEN)
                    if M > 3:
                        t3 = add_eight(t3, at + 3 * stride, inside, words, one, i, TYPE, EVEN)
            a0 = add_group(a0, t0, s, m, TYPE)
            if M > 1:
                a1 = add_group(a1, t1, s, m, TYPE)
            if M > 2:
                a2 = add_group(a2, t2, s, m, TYPE)
            if M > 3:
                a3 = add_group(a3, t3, s, m, TYPE)
    return tl.sum(a0, axis=0), tl.sum(a1, axis=0), tl.sum(a2, axis=0), tl.sum(a3, axis=0)


@jit
def add_step(acc, at, base, n, live, inside, group, one, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
             EVEN: tl.constexpr):  # fmt: skip
    """acc [KS, BN] plus the products of one row of x, at the pointers [KS, 1], with groups of 32 columns of W."""
    C: tl.constexpr = 32 if TYPE == Q5_K else 16 if TYPE == Q6_K else 8  # columns of a chunk
    PARTS: tl.constexpr = 2 if TYPE == Q6_K else 1  # scales of 32 columns
    for part in tl.static_range(PARTS):
        s, m = scales(base, group * PARTS + part, n, live, TYPE, K, N)
        sums = no_sums(acc.shape[0], acc.shape[1])
        for c in tl.static_range(32 // PARTS // C):
            words = chunk_words(base, group * (32 // C) + part + c, n, live, TYPE, N)
            for i in tl.static_range(0, C, 8):
                sums = add_eight(sums, at + (16 * part + C * c + i), inside, words, one, i, TYPE, EVEN)
        acc = add_group(acc, sums, s, m, TYPE)
    return acc


@jit
def vector_row(x, base, n, mask, one, first, last, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
               KS: tl.constexpr):  # fmt: skip
    """`vector_tile` for one row of x: fp32 [BN]."""
    acc = tl.zeros((KS, n.shape[1]), tl.float32)
    EVEN: tl.constexpr = K // 32 % KS == 0
    for step in range(first, last):
        group = step * KS + tl.arange(0, KS)[:, None]
        inside = group < K // 32
        live = mask if EVEN else mask & inside
        acc = add_step(acc, x + group * 32, base, n, live, inside, group, one, TYPE, K, N, EVEN)
    return tl.sum(acc, axis=0)


@jit
def vector_row_pair(x, gate, up, n, mask, one, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
                    N: tl.constexpr, KS: tl.constexpr):  # fmt: skip
    """`vector_row` with two matrices of one shape in one loop, so that the words of both are on their way at once."""
    g = tl.zeros((KS, n.shape[1]), tl.float32)
    u = g
    EVEN: tl.constexpr = K // 32 % KS == 0
    for step in range(first, last):
        group = step * KS + tl.arange(0, KS)[:, None]
        inside = group < K // 32
        live = mask if EVEN else mask & inside
        at = x + group * 32
        g = add_step(g, at, gate, n, live, inside, group, one, GATE, K, N, EVEN)
        u = add_step(u, at, up, n, live, inside, group, one, UP, K, N, EVEN)
    return tl.sum(g, axis=0), tl.sum(u, axis=0)


@jit
def dot_tile(x_rows, x_mask, base, n, mask, one, first, last, TYPE: tl.constexpr, LAYOUT: tl.constexpr, K: tl.constexpr,
             N: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Products [BM, BN] in fp32 over steps first .. last - 1 of BK columns.

    x_rows: pointers [BM, 1] to rows of x, in fp16 or bf16, the type that weights are rounded to; x_mask: [BM, 1].
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    acc = tl.zeros((x_rows.shape[0], n.shape[1]), tl.float32)
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)[None, :]
        x = tl.load(x_rows + k, mask=x_mask if K % BK == 0 else x_mask & (k < K), other=0.0)
        w = weight_tile(base, step * BK, n, mask, one, TYPE, LAYOUT, K, N, BK, dtype)
        acc = tl.dot(x, w, acc)
    return acc


@jit
def dot_tile_pair(x_rows, x_mask, gate, up, n, mask, one, first, last, GATE: tl.constexpr, UP: tl.constexpr,
                  LAYOUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """`dot_tile` with two matrices of one shape, whose layout is one and whose types may differ."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    g = tl.zeros((x_rows.shape[0], n.shape[1]), tl.float32)
    u = g
    for step in range(first, last):
        k = step * BK + tl.arange(0, BK)[None, :]
        x = tl.load(x_rows + k, mask=x_mask if K % BK == 0 else x_mask & (k < K), other=0.0)
        g = tl.dot(x, weight_tile(gate, step * BK, n, mask, one, GATE, LAYOUT, K, N, BK, dtype), g)
        u = tl.dot(x, weight_tile(up, step * BK, n, mask, one, UP, LAYOUT, K, N, BK, dtype), u)
    return g, u


@jit
def arrive_last(counter, count: tl.constexpr):
    """Whether this program is the last of `count` to come here; the last one finds what the others stored before.

    The counter is 0 before and after. Loads of the others' results must bypass L1 (cache_modifier ".cg").
    """
    tl.debug_barrier()  # the stores of all threads of this program come before its arrival
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
