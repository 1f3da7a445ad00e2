"""Device functions of the products with quantized weights: the GEMV, the tile loop and split-K's last step.

Two ways to multiply. `gemv_tile` is for few rows of x and packed weights: every lane unpacks words of its own rows
and multiplies them with activations that are the same for all lanes; no shared memory, no barrier inside the loop;
bound by memory. `dot_tile` is for many rows, and for any weights: a tile of weights is dequantized in registers and
goes through the tensor cores. Both accumulate in fp32. Knows dequant.py; does not know grids, bias, experts.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.bits import F8_E4M3, MXFP4, Q5_K, Q6_K, Q8_0
from ktransformers.kernels.triton.common.runtime import jit, tl
from ktransformers.kernels.triton.linear.block_int16_gemv import block_int16_gemv, digit_pair
from ktransformers.kernels.triton.linear.codes import code_gemv, code_pair
from ktransformers.kernels.triton.linear.grid import grid_gemv, grid_pair
from ktransformers.kernels.triton.linear.planes import is_plane_type, plane_gemv, plane_pair
from ktransformers.kernels.triton.quant.cpu_packed_codes import has_codes
from ktransformers.kernels.triton.quant.cpu_packed_grid import has_grid
from ktransformers.kernels.triton.quant.dequant import (
    group_scales,
    group_words,
    lane_rows,
    one_plus,
    runs_ahead,
    unit,
    weight_tile,
)
from ktransformers.kernels.triton.quant.gemv_inputs import group_inputs, pair

__all__ = ["dot_tile", "dot_tile_pair", "gemv_pair", "gemv_tile"]


@jit
def four(word, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Return the four 16-bit floats of an int64, as fp32; for MXFP4 times 2^96, so that no weight need be scaled by
    itself.

    These are 2^-126 times what they stand for, sums then 2^-30 times, and the scales half of what they are.
    """
    x0, x1 = pair(word.to(tl.int32), HALF)
    x2, x3 = pair((word >> 32).to(tl.int32), HALF)
    if TYPE == MXFP4:
        up = 7.922816251426434e28
        return x0 * up, x1 * up, x2 * up, x3 * up
    return x0, x1, x2, x3


@jit
def pick(words, c: tl.constexpr, TYPE: tl.constexpr):
    """Return the words of chunk c of a group, as `chunk_words` gives them."""
    if TYPE == Q5_K:
        return words[0], words[1], words[2], words[3], words[4]
    if TYPE == Q6_K:
        return words[3 * c], words[3 * c + 1], words[3 * c + 2], words[3 * c], words[3 * c]
    if TYPE == F8_E4M3:
        return words[2 * c], words[2 * c + 1], words[2 * c], words[2 * c], words[2 * c]
    if TYPE == Q8_0:
        low, high = words[2 * c] ^ -2139062144, words[2 * c + 1] ^ -2139062144  # as in chunk_words
        return low, high, low, low, low
    return words[c], words[c], words[c], words[c], words[c]


@jit
def add_eight(sums, x_low, x_high, words, one, i: tl.constexpr, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Add columns i .. i + 7 of a chunk to `sums`; x_low, x_high: their activations, four in an int64 each.

    sums: of x (1 + u / 2^p) over columns 0-3 of each eight and over 4-7 [KS, BN], and of x alone over each [KS, 1].
    """
    low, high, x_low_sum, x_high_sum = sums
    x0, x1, x2, x3 = four(x_low, TYPE, HALF)
    x4, x5, x6, x7 = four(x_high, TYPE, HALF)
    low += one_plus(words, one, i, TYPE) * x0
    high += one_plus(words, one, i + 4, TYPE) * x4
    low += one_plus(words, one, i + 1, TYPE) * x1
    high += one_plus(words, one, i + 5, TYPE) * x5
    low += one_plus(words, one, i + 2, TYPE) * x2
    high += one_plus(words, one, i + 6, TYPE) * x6
    low += one_plus(words, one, i + 3, TYPE) * x3
    high += one_plus(words, one, i + 7, TYPE) * x7
    return low, high, x_low_sum + ((x0 + x2) + (x1 + x3)), x_high_sum + ((x4 + x6) + (x5 + x7))


@jit
def add_scaled(acc, sums, s, m, TYPE: tl.constexpr):
    """Return acc + sum of x w over the columns of one scale, from what `add_eight` summed."""
    low, high, x_low, x_high = sums
    if TYPE == MXFP4:
        return acc + (low + high) * 2147483648.0 * s  # 2^31, see `four`
    if TYPE == F8_E4M3:
        return acc + (low + high) * s
    s_low, s_high = unit(0, TYPE) * s, unit(4, TYPE) * s
    return acc + (low * s_low - x_low * (s_low + m)) + (high * s_high - x_high * (s_high + m))


@jit
def no_sums(KS: tl.constexpr, BN: tl.constexpr):
    tile, column = tl.zeros((KS, BN), tl.float32), tl.zeros((KS, 1), tl.float32)
    return tile, tile, column, column


@jit
def add_group(acc, inputs, words, group_sm, one, TYPE: tl.constexpr, HALF: tl.constexpr):
    """Return acc [KS, BN] plus the products of one row of x with groups of 32 columns of W."""
    C: tl.constexpr = 32 if TYPE == Q5_K else 16 if TYPE == Q6_K else 8  # columns of a chunk
    sums = no_sums(acc.shape[0], acc.shape[1])
    for c in tl.static_range(32 // C):
        chunk = pick(words, c, TYPE)
        for i in tl.static_range(0, C, 8):
            sums = add_eight(sums, inputs[(C * c + i) // 4], inputs[(C * c + i) // 4 + 1], chunk, one, i, TYPE, HALF)
        if TYPE == Q6_K:
            acc = add_scaled(acc, sums, group_sm[2 * c], group_sm[2 * c + 1], TYPE)
            sums = no_sums(acc.shape[0], acc.shape[1])
    if TYPE != Q6_K:
        acc = add_scaled(acc, sums, group_sm[0], group_sm[1], TYPE)
    return acc


@jit
def gemv_tile(x, stride, base, n, mask, one, tables, first, last, TYPE: tl.constexpr, K: tl.constexpr,
                N: tl.constexpr,
                KS: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr = 3):  # fmt: skip
    """Products of M <= 4 rows of x with the rows n [1, BN] of packed weights over groups of 32 columns.

    x: rows at multiples of 8 bytes, or, with M = 1, a row of block-wise int16 (block_int16.py), which are int32, for a
    type of which `has_block_int16` or `is_plane_type` is true. first, last: range of steps of KS groups. Returns four
    fp32 [BN]; those from M on are zero.
    STAGES: of planes and block-wise int16.
    Loads run two steps ahead, through shared memory (num_stages): left to itself, the compiler issues each one where
    it is needed, and the memory's latency is paid for every word.
    """
    if x.dtype.element_ty == tl.int32:
        zero = tl.zeros((n.shape[1],), tl.float32)
        if is_plane_type(TYPE):
            return plane_gemv(x, base, n, mask, tables, first, last, TYPE, K, N, KS, STAGES), zero, zero, zero
        return block_int16_gemv(x, base, n, mask, tables, first, last, TYPE, K, KS), zero, zero, zero
    if has_grid(TYPE):
        return grid_gemv(x, stride, base, n, mask, tables, first, last, TYPE, K, KS, M)
    if has_codes(TYPE):
        return code_gemv(x, stride, base, n, mask, one, first, last, TYPE, K, KS, M)
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    EVEN: tl.constexpr = K // 32 % KS == 0
    lanes = tl.arange(0, KS)[:, None]
    a0 = tl.zeros((KS, n.shape[1]), tl.float32)
    a1, a2, a3 = a0, a0, a0
    for step in tl.range(first, last, num_stages=3):
        group = step * KS + lanes
        inside = group < K // 32
        words = group_words(base, group, n, mask if EVEN else mask & inside, TYPE, N)
        sm = group_scales(base, group, n, mask if EVEN else mask & inside, TYPE, K, N)
        a0 = add_group(a0, group_inputs(x, group, inside, EVEN), words, sm, one, TYPE, HALF)
        if M > 1:
            a1 = add_group(a1, group_inputs(x + stride, group, inside, EVEN), words, sm, one, TYPE, HALF)
        if M > 2:
            a2 = add_group(a2, group_inputs(x + 2 * stride, group, inside, EVEN), words, sm, one, TYPE, HALF)
        if M > 3:
            a3 = add_group(a3, group_inputs(x + 3 * stride, group, inside, EVEN), words, sm, one, TYPE, HALF)
    return tl.sum(a0, axis=0), tl.sum(a1, axis=0), tl.sum(a2, axis=0), tl.sum(a3, axis=0)


@jit
def gemv_pair(x, gate, up, n, mask, one, tables, first, last, GATE: tl.constexpr, UP: tl.constexpr, K: tl.constexpr,
                N: tl.constexpr, KS: tl.constexpr):  # fmt: skip
    """Run `gemv_tile` of one row of x with two matrices of one shape, in one loop if these loops are of one kind."""
    if x.dtype.element_ty == tl.int32:
        if is_plane_type(GATE):
            return plane_pair(x, gate, up, n, mask, tables, first, last, GATE, UP, K, N, KS)
        return digit_pair(x, gate, up, n, mask, tables, first, last, GATE, UP, K, KS)
    if has_grid(GATE) and has_grid(UP):
        return grid_pair(x, gate, up, n, mask, tables, first, last, GATE, UP, K, KS)
    if has_codes(GATE) and has_codes(UP):
        return code_pair(x, gate, up, n, mask, one, first, last, GATE, UP, K, KS)
    if has_grid(GATE) or has_grid(UP) or has_codes(GATE) or has_codes(UP):
        one_g, _, _, _ = gemv_tile(x, 0, gate, n, mask, one, tables, first, last, GATE, K, N, KS, 1)
        one_u, _, _, _ = gemv_tile(x, 0, up, n, mask, one, tables, first, last, UP, K, N, KS, 1)
        return one_g, one_u
    HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    EVEN: tl.constexpr = K // 32 % KS == 0
    g = tl.zeros((KS, n.shape[1]), tl.float32)
    u = g
    for step in tl.range(first, last, num_stages=3):
        group = step * KS + tl.arange(0, KS)[:, None]
        inside = group < K // 32
        live = mask if EVEN else mask & inside
        gate_words = group_words(gate, group, n, live, GATE, N)
        up_words = group_words(up, group, n, live, UP, N)
        gate_sm = group_scales(gate, group, n, live, GATE, K, N)
        up_sm = group_scales(up, group, n, live, UP, K, N)
        inputs = group_inputs(x, group, inside, EVEN)
        g = add_group(g, inputs, gate_words, gate_sm, one, GATE, HALF)
        u = add_group(u, inputs, up_words, up_sm, one, UP, HALF)
    return tl.sum(g, axis=0), tl.sum(u, axis=0)


@jit
def apart(w, R: tl.constexpr):
    """Return w [BK, BN] with its columns in another order: columns R a + b become b BN / R + a.

    A lane that reads R neighbouring rows of a matrix is R columns away from its neighbour. What lanes store to shared
    memory for the tensor cores, 16 bytes of a column each, then lies in the same banks for many of them: places are
    swizzled by the number of a column. In this order neighbouring lanes have neighbouring columns. Nothing is moved by
    it: columns are only called by other numbers.
    """
    if R == 1:
        return w
    split = tl.reshape(w, (w.shape[0], w.shape[1] // R, R))
    return tl.reshape(tl.permute(split, (0, 2, 1)), w.shape)


@jit
def together(acc, R: tl.constexpr):
    """Return products [BM, BN] with a tile that is `apart`, in the order of the matrix's rows."""
    if R == 1:
        return acc
    split = tl.reshape(acc, (acc.shape[0], R, acc.shape[1] // R))
    return tl.reshape(tl.permute(split, (0, 2, 1)), acc.shape)


@jit
def x_tile(x_rows, x_mask, step, K: tl.constexpr, BK: tl.constexpr):
    k = step * BK + tl.arange(0, BK)[None, :]
    return tl.load(x_rows + k, mask=x_mask if K % BK == 0 else x_mask & (k < K), other=0.0)


@jit
def dot_tile(x_rows, x_mask, base, n, mask, one, tables, first, last, TYPE: tl.constexpr, LAYOUT: tl.constexpr,
             K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """Products [BM, BN] in fp32 over steps first .. last - 1 of BK columns, at least one.

    x_rows: pointers [BM, 1] to rows of x, in fp16 or bf16, the type that weights are rounded to; x_mask: [BM, 1].
    base: a matrix, or of each row in n [1, BN] the matrix that it is of. WARPS: of the program.

    Where weights of the next step are dequantized beside the products of this one, they cross the loop, which also
    keeps the compiler from choosing how they lie in shared memory by the bits that they are stored in: banks collided.
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    R: tl.constexpr = lane_rows(TYPE, LAYOUT, BK, n.shape[1], WARPS)
    acc = tl.zeros((x_rows.shape[0], n.shape[1]), tl.float32)
    if runs_ahead(TYPE, LAYOUT):
        w = weight_tile(base, first * BK, n, mask, one, tables, TYPE, LAYOUT, K, N, BK, dtype, WARPS)
        for step in tl.range(first, last, num_stages=3):
            x = x_tile(x_rows, x_mask, step, K, BK)
            acc = tl.dot(x, apart(w, R), acc)
            after = tl.minimum(step + 1, last - 1) * BK
            w = weight_tile(base, after, n, mask, one, tables, TYPE, LAYOUT, K, N, BK, dtype, WARPS)
    else:
        for step in tl.range(first, last, num_stages=3):
            x = x_tile(x_rows, x_mask, step, K, BK)
            w = weight_tile(base, step * BK, n, mask, one, tables, TYPE, LAYOUT, K, N, BK, dtype, WARPS)
            acc = tl.dot(x, apart(w, R), acc)
    return together(acc, R)


@jit
def dot_tile_pair(x_rows, x_mask, gate, up, n0, one, tables, first, last, GATE: tl.constexpr, UP: tl.constexpr,
                  LAYOUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  WARPS: tl.constexpr):  # fmt: skip
    """Run `dot_tile` with rows n0 .. n0 + BN - 1 of two matrices of one shape and layout: two results [BM, BN].

    Where weights run ahead and are of one type, they are one tile of 2 BN rows.
    """
    if GATE == UP and runs_ahead(GATE, LAYOUT):
        between = tl.multiple_of(up.to(tl.int64) - gate.to(tl.int64), 16)
        i = tl.arange(0, 2 * BN)[None, :]
        base = gate + tl.where(i >= BN, between, 0)
        rows = n0 + i % BN
        both = dot_tile(x_rows, x_mask, base, rows, rows < N, one, tables, first, last, GATE, LAYOUT, K, N, BK, WARPS)
        return tl.split(tl.permute(tl.reshape(both, (x_rows.shape[0], 2, BN)), (0, 2, 1)))
    dtype: tl.constexpr = x_rows.dtype.element_ty
    n = n0 + tl.arange(0, BN)[None, :]
    G: tl.constexpr = lane_rows(GATE, LAYOUT, BK, BN, WARPS)
    U: tl.constexpr = lane_rows(UP, LAYOUT, BK, BN, WARPS)
    g = tl.zeros((x_rows.shape[0], BN), tl.float32)
    u = g
    for step in tl.range(first, last, num_stages=3):
        x = x_tile(x_rows, x_mask, step, K, BK)
        w = weight_tile(gate, step * BK, n, n < N, one, tables, GATE, LAYOUT, K, N, BK, dtype, WARPS)
        g = tl.dot(x, apart(w, G), g)
        w = weight_tile(up, step * BK, n, n < N, one, tables, UP, LAYOUT, K, N, BK, dtype, WARPS)
        u = tl.dot(x, apart(w, U), u)
    return together(g, G), together(u, U)
