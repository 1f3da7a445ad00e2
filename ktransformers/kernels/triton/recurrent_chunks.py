"""Device code of recurrent layers, chunk by chunk: for sequences with many rows in a step. Knows pointers and strides only.

A chunk is CHUNK positions, from a multiple of CHUNK on; a sequence's first and last may be partial. With G the sums of
the log decays of a chunk up to each row, S the state before it, and everything of one head:

    out = scale (exp(G) q S + tril(q k' exp(G_i - G_j)) v)
    S   = exp(G_last) S + (exp(G_last - G) k)' v

as in Mamba-2 (arXiv 2405.21060). With the delta rule v is what corrects the state: v = u - w S, where

    (1 + L) u = beta v,   (1 + L) w = beta exp(G) k,   L = tril(beta_i k k' exp(G_i - G_j), -1)

(arXiv 2412.06464; with a decay per key dimension, arXiv 2510.26692). `prepare_kernel` computes u, w and the products of
q and k for all chunks at once; `chunks_kernel` goes over a sequence's chunks with the state in registers. A row that is
not there has k, v, beta and decay 0, which changes nothing.

No factor exceeds 1, however fast the state decays: exp is only taken of differences between a row and an earlier one.
Products are three of TF32 each ("tf32x3"), with which they are as good as those of fp32 to about 2^-20.
"""

from __future__ import annotations

from ktransformers.kernels.triton.recurrent_kernels import l2_normed
from ktransformers.kernels.triton.runtime import constant, jit, tl

__all__ = ["CHUNK_ROWS", "chunks_kernel", "prepare_kernel"]

CHUNK_ROWS = 64
"""Positions of a chunk: core.SNAPSHOT_ALIGN."""

_CHUNK = constant(CHUNK_ROWS)
_SUB = constant(16)  # rows of which every pair has its own exp
_STEP = ["first_rows_ptr", "read_ptr", "write_ptr", "save_ptr", "lens_ptr"]


@jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def _chunk_of(first_rows_ptr, lens_ptr, seq, LIMIT: tl.constexpr):
    """First row, row behind the last and number of chunks of a sequence (0: another kernel's), and the row at which
    its first chunk begins, which may be before the first."""
    first, last = tl.load(first_rows_ptr + seq), tl.load(first_rows_ptr + seq + 1)
    is_ours = (last - first >= LIMIT) & (last > first)
    begin = first - (tl.load(lens_ptr + first, mask=is_ours, other=1) - 1) % _CHUNK
    count = tl.where(is_ours, (last - begin + _CHUNK - 1) // _CHUNK, 0)
    return first, last, begin, count


@jit
def _tile(base, rows, stride, is_row, columns, WIDTH: tl.constexpr):
    """Columns of some rows as fp32 [CHUNK, columns]; zeros where there is nothing."""
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def _decays(base, rows, stride, is_row, columns, K: tl.constexpr, PER_KEY: tl.constexpr):
    """Sums of log decays up to each row of the chunk: [CHUNK, BK], or [CHUNK] without PER_KEY."""
    if PER_KEY:
        decay = _tile(base, rows, stride, is_row, columns, K)
    else:
        decay = tl.load(base + rows.to(tl.int64) * stride, mask=is_row, other=0.0).to(tl.float32)
    return tl.cumsum(decay, 0)


@jit
def _pairs(x, k, sums):
    """x k' exp(G_i - G_j) where j <= i, zeros elsewhere, [CHUNK, CHUNK]: one decay for all columns. sums: [CHUNK]."""
    rows = tl.arange(0, _CHUNK)
    is_seen = rows[:, None] >= rows[None, :]
    apart = tl.where(is_seen, sums[:, None] - sums[None, :], 0.0)
    return tl.where(is_seen, _dot(x, tl.trans(k)) * tl.exp(apart), 0.0)


@jit
def _row_of(tile, nth, BK: tl.constexpr):
    """Row nth of each sub-block of a [CHUNK, BK], as [CHUNK // SUB, 1, BK]."""
    blocks = tl.reshape(tile, (_CHUNK // _SUB, _SUB, BK))
    is_it = (tl.arange(0, _SUB) == nth)[None, :, None]
    return tl.sum(tl.where(is_it, blocks, 0.0), 1)[:, None, :]


@jit
def _in_block(x, k_row, factor, nth, BK: tl.constexpr):
    """Column nth of each sub-block of `_pairs_by_key`, in its place of a [CHUNK, CHUNK]; not cut at the diagonal."""
    blocks = tl.reshape(x, (_CHUNK // _SUB, _SUB, BK))
    column = tl.reshape(tl.sum(blocks * k_row * factor, 2), (_CHUNK,))
    rows = tl.arange(0, _CHUNK)
    is_there = rows[None, :] == (rows // _SUB * _SUB + nth)[:, None]
    return tl.where(is_there, column[:, None], 0.0)


@jit
def _pairs_by_key(q, k, sums, BK: tl.constexpr):
    """As `_pairs`, of q and of k with k, with a decay per column. sums: [CHUNK, BK].

    Within a sub-block of SUB rows each pair has its own exp. Between sub-blocks G of the later one's first row stands
    between: exp(G_i - G_ref) and exp(G_ref - G_j) are both at most 1.
    """
    rows = tl.arange(0, _CHUNK)
    blocks = tl.reshape(sums, (_CHUNK // _SUB, _SUB, BK))
    of_q = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    of_k = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    for nth in range(_SUB):
        is_seen = (tl.arange(0, _SUB) >= nth)[None, :, None]
        factor = tl.exp(tl.where(is_seen, blocks - _row_of(sums, nth, BK), 0.0))
        k_row = _row_of(k, nth, BK)
        of_q += _in_block(q, k_row, factor, nth, BK)
        of_k += _in_block(k, k_row, factor, nth, BK)
    is_seen = rows[:, None] >= rows[None, :]
    of_q, of_k = tl.where(is_seen, of_q, 0.0), tl.where(is_seen, of_k, 0.0)
    for block in range(1, _CHUNK // _SUB):
        reference = tl.sum(tl.where((rows == block * _SUB)[:, None], sums, 0.0), 0)[None, :]
        is_later, is_earlier = (rows // _SUB == block)[:, None], (rows // _SUB < block)[:, None]
        later = tl.exp(tl.where(is_later, sums - reference, 0.0))
        earlier = tl.exp(tl.where(is_earlier, reference - sums, 0.0))
        right = tl.trans(tl.where(is_earlier, k * earlier, 0.0))
        of_q += _dot(tl.where(is_later, q * later, 0.0), right)
        of_k += _dot(tl.where(is_later, k * later, 0.0), right)
    return of_q, of_k


@jit
def _inverse(lower):
    """(1 + lower)^-1 for a strictly lower triangle [CHUNK, CHUNK].

    Blocks of 8 rows by 1 - L + L^2 - ... = (1 - L) (1 + L^2) (1 + L^4), whose terms stay small; then two blocks at a
    time: what is left of the diagonal is -D^-1 B A^-1.
    """
    rows = tl.arange(0, _CHUNK)
    row, column = rows[:, None], rows[None, :]
    one = tl.where(row == column, 1.0, 0.0)
    near = tl.where(row // 8 == column // 8, lower, 0.0)
    second = _dot(near, near)
    fourth = _dot(second, second)
    result = _dot(_dot(one - near, one + second), one + fourth)
    for power in tl.static_range(3):
        size = 8 << power
        is_left = (row // size != column // size) & (row // (2 * size) == column // (2 * size))
        result -= _dot(_dot(result, tl.where(is_left, lower, 0.0)), result)
    return result


@jit(do_not_specialize_on_alignment=["first_rows_ptr", "lens_ptr"])
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, u_ptr, w_ptr, pairs_ptr, first_rows_ptr, lens_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, eps, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LIMIT: tl.constexpr, PER_KEY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, value heads, sequences): u [T, HEADS, V], w [T, HEADS, K] and scale q k' [T, HEADS, CHUNK]."""
    head, seq = tl.program_id(1), tl.program_id(2)
    first, last, begin, count = _chunk_of(first_rows_ptr, lens_ptr, seq, LIMIT)
    if tl.program_id(0) < count:
        nth, keys = tl.arange(0, _CHUNK), tl.arange(0, BK)
        rows = begin + tl.program_id(0) * _CHUNK + nth
        is_row = (rows >= first) & (rows < last)
        q = _tile(q_ptr + head // GROUP * q_head, rows, q_row, is_row, keys, K)
        k = _tile(k_ptr + head // GROUP * k_head, rows, k_row, is_row, keys, K)
        if NORM:
            q, k = l2_normed(q, eps, 1), l2_normed(k, eps, 1)
        q *= scale
        sums = _decays(decay_ptr + head * decay_head, rows, decay_row, is_row, keys, K, PER_KEY)
        beta = tl.load(beta_ptr + rows.to(tl.int64) * beta_row + head, mask=is_row, other=0.0).to(tl.float32)
        if PER_KEY:
            of_q, of_k = _pairs_by_key(q, k, sums, BK)
        else:
            of_q, of_k = _pairs(q, k, sums), _pairs(k, k, sums)
        own = rows.to(tl.int64) * HEADS + head
        tl.store(pairs_ptr + own[:, None] * _CHUNK + nth[None, :], of_q, mask=is_row[:, None])
        inverse = _inverse(tl.where(nth[:, None] > nth[None, :], of_k * beta[:, None], 0.0))
        if PER_KEY:
            k *= tl.exp(sums)
        else:
            k *= tl.exp(sums)[:, None]
        w = _dot(inverse, k * beta[:, None])
        tl.store(w_ptr + own[:, None] * K + keys[None, :], w, mask=is_row[:, None] & (keys < K)[None, :])
        for start in range(0, V, BV):
            values = start + tl.arange(0, BV)
            u = _dot(inverse, _tile(v_ptr + head * v_head, rows, v_row, is_row, values, V) * beta[:, None])
            tl.store(u_ptr + own[:, None] * V + values[None, :], u, mask=is_row[:, None] & (values < V)[None, :])


@jit
def _scaled(q, k, sums, PER_KEY: tl.constexpr):
    """exp(G) q, exp(G_last - G) k, and exp(G_last) as [BK, 1] or [1, 1]."""
    is_last = tl.arange(0, _CHUNK) == _CHUNK - 1
    if PER_KEY:
        whole = tl.sum(tl.where(is_last[:, None], sums, 0.0), 0)
        return q * tl.exp(sums), k * tl.exp(whole[None, :] - sums), tl.exp(whole)[:, None]
    else:  # noqa: RET505 (decided while compiling: only one side exists)
        whole = tl.sum(tl.where(is_last, sums, 0.0), 0)
        rest = tl.exp(whole - sums)
        return q * tl.exp(sums)[:, None], k * rest[:, None], tl.exp(tl.zeros((1, 1), tl.float32) + whole)


@jit(do_not_specialize_on_alignment=_STEP)
def chunks_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, w_ptr, pairs_ptr, state_ptr, out_ptr,
    first_rows_ptr, read_ptr, write_ptr, save_ptr, lens_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, out_row, slot, eps, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LIMIT: tl.constexpr, DELTA: tl.constexpr, PER_KEY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of V, value heads, sequences). With DELTA v is u, and w and pairs are those of `prepare_kernel`."""
    head, seq = tl.program_id(1), tl.program_id(2)
    first, last, begin, count = _chunk_of(first_rows_ptr, lens_ptr, seq, LIMIT)
    nth, keys = tl.arange(0, _CHUNK), tl.arange(0, BK)
    values = tl.program_id(0) * BV + tl.arange(0, BV)
    inside = (keys < K)[:, None] & (values < V)[None, :]
    home = state_ptr + head.to(tl.int64) * (K * V) + keys[:, None] * V + values[None, :]
    read = tl.load(read_ptr + seq).to(tl.int64)
    state = tl.load(home + read * slot, mask=inside & (read >= 0) & (count > 0), other=0.0)
    for chunk in range(count):
        start = begin + chunk * _CHUNK
        rows = start + nth
        is_row = (rows >= first) & (rows < last)
        own = rows.to(tl.int64) * HEADS + head
        v = _tile(v_ptr + head * v_head, rows, v_row, is_row, values, V)
        q = _tile(q_ptr + head // GROUP * q_head, rows, q_row, is_row, keys, K)
        k = _tile(k_ptr + head // GROUP * k_head, rows, k_row, is_row, keys, K)
        if NORM:
            q, k = l2_normed(q, eps, 1), l2_normed(k, eps, 1)
        q *= scale
        sums = _decays(decay_ptr + head * decay_head, rows, decay_row, is_row, keys, K, PER_KEY)
        if DELTA:
            pairs = tl.load(pairs_ptr + own[:, None] * _CHUNK + nth[None, :], mask=is_row[:, None], other=0.0)
            v -= _dot(_tile(w_ptr + head * K, rows, HEADS * K, is_row, keys, K), state)
        else:
            pairs = _pairs(q, k, sums)
        q, k, whole = _scaled(q, k, sums, PER_KEY)
        out = _dot(q, state) + _dot(pairs, v)
        mask = is_row[:, None] & (values < V)[None, :]
        at = rows[:, None].to(tl.int64) * out_row + head * V + values[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
        state = state * whole + _dot(tl.trans(k), v)
        end = start + _CHUNK - 1
        save = tl.load(save_ptr + end, mask=end < last, other=-1).to(tl.int64)
        if save >= 0:
            tl.store(home + save * slot, state, mask=inside)
    write = tl.load(write_ptr + seq).to(tl.int64)
    if (write >= 0) & (count > 0):
        tl.store(home + write * slot, state, mask=inside)
