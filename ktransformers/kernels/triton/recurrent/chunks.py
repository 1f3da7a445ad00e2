"""Device code of recurrent layers, chunk by chunk: for sequences with many rows. Knows pointers and strides only.

A chunk is CHUNK positions, from a multiple of CHUNK on; a sequence's first and last may be partial. With G the sums of
the log decays of a chunk up to each row, S the state before it, and everything of one head:

    out = scale (exp(G) q S + tril(q k' exp(G_i - G_j)) v)
    S   = exp(G_last) S + (exp(G_last - G) k)' v

as in Mamba-2 (arXiv 2405.21060). With the delta rule v is what corrects the state: v = u - w S, where

    (1 + L) u = beta v,   (1 + L) w = beta exp(G) k,   L = tril(beta_i k k' exp(G_i - G_j), -1)

(arXiv 2412.06464; with a decay per key dimension, arXiv 2510.26692). `prepare_kernel` computes the products of q and k,
u and w for all chunks at once; `chunks_kernel` goes over a sequence's chunks with the state in registers. A row that is
not there has k, v, beta and decay 0, which changes nothing.

No factor exceeds 1, however fast the state decays: exp is only taken of differences between a row and an earlier one.
Products are three of TF32 each ("tf32x3"), with which they are as good as those of fp32 to about 2^-20. Keys are cut
into slices of BK columns, so that no tile is wider; a state has up to MAX_SLICES of them.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import constant, jit, tl

__all__ = ["CHUNK_ROWS", "MAX_SLICES", "chunks_kernel", "prepare_kernel"]

CHUNK_ROWS = 64
"""Positions of a chunk: core.SNAPSHOT_ALIGN."""

MAX_SLICES = 4

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
def _tile(base, rows, stride, is_row, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """BLOCK columns of some rows, from `first` on, as fp32 [CHUNK, BLOCK]; zeros where there is nothing."""
    columns = first + tl.arange(0, BLOCK)
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@jit
def _decays(
    base, rows, stride, is_row, first, BK: tl.constexpr, K: tl.constexpr, PER_KEY: tl.constexpr
):  # fmt: skip
    """Sums of log decays up to each row of the chunk: [CHUNK, BK] of a slice, or [CHUNK, 1] without PER_KEY.

    By a triangle of ones: Triton 3.6 does not compile a cumulative sum of such tiles.
    """
    order = tl.arange(0, _CHUNK)
    is_before = order[:, None] >= order[None, :]
    if PER_KEY:
        decay = _tile(base, rows, stride, is_row, first, BK, K)
        return _dot(tl.where(is_before, 1.0, 0.0), decay)
    else:  # noqa: RET505 (decided while compiling: only one side exists)
        decay = tl.load(base + rows.to(tl.int64) * stride, mask=is_row, other=0.0).to(tl.float32)
        return tl.sum(tl.where(is_before, decay[None, :], 0.0), 1)[:, None]


@jit
def _decayed(products, sums):
    """products exp(G_i - G_j) where j <= i, zeros elsewhere, [CHUNK, CHUNK]. sums: [CHUNK, 1]."""
    rows = tl.arange(0, _CHUNK)
    is_seen = rows[:, None] >= rows[None, :]
    return tl.where(is_seen, products * tl.exp(tl.where(is_seen, sums - tl.trans(sums), 0.0)), 0.0)


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
def _pairs_by_key(of_q, of_k, q, k, sums, BK: tl.constexpr):
    """Add a slice's part of q k' exp(G_i - G_j), and of k k', with a decay per column. sums: [CHUNK, BK].

    Within a sub-block of SUB rows each pair has its own exp. Between sub-blocks G of the later one's first row stands
    between: exp(G_i - G_ref) and exp(G_ref - G_j) are both at most 1. What is above the diagonal means nothing.
    """
    rows = tl.arange(0, _CHUNK)
    blocks = tl.reshape(sums, (_CHUNK // _SUB, _SUB, BK))
    for nth in range(_SUB):
        is_seen = (tl.arange(0, _SUB) >= nth)[None, :, None]
        factor = tl.exp(tl.where(is_seen, blocks - _row_of(sums, nth, BK), 0.0))
        k_row = _row_of(k, nth, BK)
        of_q += _in_block(q, k_row, factor, nth, BK)
        of_k += _in_block(k, k_row, factor, nth, BK)
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


@jit
def _unit_factors(
    q_base, k_base, rows, q_row, k_row, is_row, eps, BK: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """What makes unit vectors of the rows of q and k, [CHUNK] each; ones without NORM."""
    of_q = tl.full((_CHUNK,), 1.0, tl.float32)
    of_k = tl.full((_CHUNK,), 1.0, tl.float32)
    if NORM:
        of_q += eps - 1.0
        of_k += eps - 1.0
        for first in range(0, K, BK):
            q = _tile(q_base, rows, q_row, is_row, first, BK, K)
            k = _tile(k_base, rows, k_row, is_row, first, BK, K)
            of_q += tl.sum(q * q, 1)
            of_k += tl.sum(k * k, 1)
        of_q, of_k = 1.0 / tl.sqrt(of_q), 1.0 / tl.sqrt(of_k)
    return of_q, of_k


@jit
def _products(
    q_base, k_base, decays, rows, is_row, unit_q, unit_k, q_row, k_row, decay_row,
    BK: tl.constexpr, K: tl.constexpr, PER_KEY: tl.constexpr,
):  # fmt: skip
    """q k' exp(G_i - G_j) and the same of k, zeros above the diagonal, both [CHUNK, CHUNK]."""
    of_q, of_k = tl.zeros((_CHUNK, _CHUNK), tl.float32), tl.zeros((_CHUNK, _CHUNK), tl.float32)
    for at in range(0, K, BK):
        q = _tile(q_base, rows, q_row, is_row, at, BK, K) * unit_q[:, None]
        k = _tile(k_base, rows, k_row, is_row, at, BK, K) * unit_k[:, None]
        if PER_KEY:
            sums = _decays(decays, rows, decay_row, is_row, at, BK, K, PER_KEY)
            of_q, of_k = _pairs_by_key(of_q, of_k, q, k, sums, BK)
        else:
            of_q += _dot(q, tl.trans(k))
            of_k += _dot(k, tl.trans(k))
    if PER_KEY:
        nth = tl.arange(0, _CHUNK)
        is_seen = nth[:, None] >= nth[None, :]
        return tl.where(is_seen, of_q, 0.0), tl.where(is_seen, of_k, 0.0)
    else:  # noqa: RET505 (decided while compiling: only one side exists)
        sums = _decays(decays, rows, decay_row, is_row, 0, BK, K, PER_KEY)
        return _decayed(of_q, sums), _decayed(of_k, sums)


@jit
def _solve(
    lower, beta, unit_k, k_base, v_base, decays, u_ptr, w_ptr, rows, is_row, own, k_row, v_row, decay_row,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PER_KEY: tl.constexpr,
):  # fmt: skip
    """Store u and w of the module's docstring. beta, unit_k: [CHUNK, 1]."""
    inverse = _inverse(lower)
    for at in range(0, K, BK):
        keys = at + tl.arange(0, BK)
        sums = _decays(decays, rows, decay_row, is_row, at, BK, K, PER_KEY)
        w = _dot(inverse, _tile(k_base, rows, k_row, is_row, at, BK, K) * (tl.exp(sums) * unit_k * beta))
        tl.store(w_ptr + own[:, None] * K + keys[None, :], w, mask=is_row[:, None] & (keys < K)[None, :])
    for at in range(0, V, BV):
        values = at + tl.arange(0, BV)
        u = _dot(inverse, _tile(v_base, rows, v_row, is_row, at, BV, V) * beta)
        tl.store(u_ptr + own[:, None] * V + values[None, :], u, mask=is_row[:, None] & (values < V)[None, :])


@jit(do_not_specialize_on_alignment=["first_rows_ptr", "lens_ptr"])
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, u_ptr, w_ptr, pairs_ptr, unit_ptr, first_rows_ptr, lens_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, eps, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LIMIT: tl.constexpr, DELTA: tl.constexpr, PER_KEY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Kernel that prepares chunks. Grid (chunks, value heads, sequences): scale q k' [T, HEADS, CHUNK], the factors of
    q (scale included) and k [T, HEADS, 2], and with DELTA u [T, HEADS, V] and w [T, HEADS, K].
    """
    head, seq = tl.program_id(1), tl.program_id(2)
    first, last, begin, count = _chunk_of(first_rows_ptr, lens_ptr, seq, LIMIT)
    if tl.program_id(0) < count:
        nth = tl.arange(0, _CHUNK)
        rows = begin + tl.program_id(0) * _CHUNK + nth
        is_row = (rows >= first) & (rows < last)
        own = rows.to(tl.int64) * HEADS + head
        q_base, k_base = q_ptr + head // GROUP * q_head, k_ptr + head // GROUP * k_head
        decays = decay_ptr + head * decay_head
        unit_q, unit_k = _unit_factors(q_base, k_base, rows, q_row, k_row, is_row, eps, BK, K, NORM)
        unit_q *= scale
        tl.store(unit_ptr + 2 * own, unit_q, mask=is_row)
        tl.store(unit_ptr + 2 * own + 1, unit_k, mask=is_row)
        of_q, of_k = _products(
            q_base, k_base, decays, rows, is_row, unit_q, unit_k, q_row, k_row, decay_row, BK, K, PER_KEY
        )
        tl.store(pairs_ptr + own[:, None] * _CHUNK + nth[None, :], of_q, mask=is_row[:, None])
        if DELTA:
            beta = tl.load(beta_ptr + rows.to(tl.int64) * beta_row + head, mask=is_row, other=0.0).to(tl.float32)
            lower = tl.where(nth[:, None] > nth[None, :], of_k * beta[:, None], 0.0)
            _solve(
                lower, beta[:, None], unit_k[:, None], k_base, v_ptr + head * v_head, decays, u_ptr, w_ptr,
                rows, is_row, own, k_row, v_row, decay_row, K, V, BK, BV, PER_KEY,
            )  # fmt: skip


@jit
def _read_slice(
    v, out, state, at, rows, is_row, unit_q, q_base, decays, w_base, q_row, decay_row,
    HEADS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DELTA: tl.constexpr, PER_KEY: tl.constexpr,
):  # fmt: skip
    """v and out, with what keys at .. at + BK - 1 of the state before the chunk add to them."""
    if DELTA:
        v -= _dot(_tile(w_base, rows, HEADS * K, is_row, at, BK, K), state)
    sums = _decays(decays, rows, decay_row, is_row, at, BK, K, PER_KEY)
    out += _dot(_tile(q_base, rows, q_row, is_row, at, BK, K) * (unit_q * tl.exp(sums)), state)
    return v, out


@jit
def _advance_slice(
    v, state, at, rows, is_row, unit_k, k_base, decays, k_row, decay_row,
    K: tl.constexpr, BK: tl.constexpr, PER_KEY: tl.constexpr,
):  # fmt: skip
    """Keys at .. at + BK - 1 of the state behind the chunk."""
    sums = _decays(decays, rows, decay_row, is_row, at, BK, K, PER_KEY)
    is_last = tl.arange(0, _CHUNK)[:, None] == _CHUNK - 1
    whole = tl.sum(tl.where(is_last, sums, 0.0), 0)
    k = _tile(k_base, rows, k_row, is_row, at, BK, K) * (unit_k * tl.exp(whole[None, :] - sums))
    return state * tl.exp(whole)[:, None] + _dot(tl.trans(k), v)


@jit
def _load_slice(base, at, values, is_there, BK: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    keys = at + tl.arange(0, BK)
    mask = (keys < K)[:, None] & (values < V)[None, :] & is_there
    return tl.load(base + keys[:, None] * V + values[None, :], mask=mask, other=0.0)


@jit
def _store_slices(
    base, s0, s1, s2, s3, values, BK: tl.constexpr, SLICES: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    for i in tl.static_range(SLICES):
        keys = i * BK + tl.arange(0, BK)
        state = s0 if i == 0 else s1 if i == 1 else s2 if i == 2 else s3
        tl.store(base + keys[:, None] * V + values[None, :], state, mask=(keys < K)[:, None] & (values < V)[None, :])


@jit(do_not_specialize_on_alignment=_STEP)
def chunks_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, w_ptr, pairs_ptr, unit_ptr, dt_ptr, skip_ptr, state_ptr, out_ptr,
    first_rows_ptr, read_ptr, write_ptr, save_ptr, lens_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, out_row, slot,
    GROUP: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SLICES: tl.constexpr, LIMIT: tl.constexpr, DELTA: tl.constexpr, PER_KEY: tl.constexpr,
    SSM: tl.constexpr,
):  # fmt: skip
    """Kernel of the scan by chunks. Grid (blocks of V, value heads, sequences). w, pairs, unit: of `prepare_kernel`.
    DELTA: v is u. SSM: v is multiplied by dt [T, HEADS], and skip (D) times v is added."""
    head, seq = tl.program_id(1), tl.program_id(2)
    first, last, begin, count = _chunk_of(first_rows_ptr, lens_ptr, seq, LIMIT)
    nth, values = tl.arange(0, _CHUNK), tl.program_id(0) * BV + tl.arange(0, BV)
    home = state_ptr + head.to(tl.int64) * (K * V)
    read, write = tl.load(read_ptr + seq).to(tl.int64), tl.load(write_ptr + seq).to(tl.int64)
    is_there = (read >= 0) & (count > 0)
    s0 = _load_slice(home + read * slot, 0, values, is_there, BK, K, V)
    s1, s2, s3 = s0, s0, s0
    if SLICES > 1:
        s1 = _load_slice(home + read * slot, BK, values, is_there, BK, K, V)
    if SLICES > 2:
        s2 = _load_slice(home + read * slot, 2 * BK, values, is_there, BK, K, V)
        s3 = _load_slice(home + read * slot, 3 * BK, values, is_there, BK, K, V)
    q_base, k_base = q_ptr + head // GROUP * q_head, k_ptr + head // GROUP * k_head
    decays = decay_ptr + head * decay_head
    w_base = w_ptr + head * K if DELTA else q_base
    for chunk in range(count):
        end = begin + chunk * _CHUNK + _CHUNK - 1
        rows = end - _CHUNK + 1 + nth
        is_row = (rows >= first) & (rows < last)
        own = rows.to(tl.int64) * HEADS + head
        unit_q = tl.load(unit_ptr + 2 * own, mask=is_row, other=0.0)[:, None]
        unit_k = tl.load(unit_ptr + 2 * own + 1, mask=is_row, other=0.0)[:, None]
        v = _tile(v_ptr + head * v_head, rows, v_row, is_row, tl.program_id(0) * BV, BV, V)
        out = tl.zeros((_CHUNK, BV), tl.float32)
        if SSM:
            out += tl.load(skip_ptr + head) * v
            v *= tl.load(dt_ptr + own, mask=is_row, other=0.0)[:, None]
        for i in tl.static_range(SLICES):
            state = s0 if i == 0 else s1 if i == 1 else s2 if i == 2 else s3
            v, out = _read_slice(
                v, out, state, i * BK, rows, is_row, unit_q, q_base, decays, w_base, q_row, decay_row,
                HEADS, K, BK, DELTA, PER_KEY,
            )  # fmt: skip
        pairs = tl.load(pairs_ptr + own[:, None] * _CHUNK + nth[None, :], mask=is_row[:, None], other=0.0)
        out += _dot(pairs, v)
        at = out_ptr + rows[:, None].to(tl.int64) * out_row + head * V + values[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (values < V)[None, :])
        s0 = _advance_slice(v, s0, 0, rows, is_row, unit_k, k_base, decays, k_row, decay_row, K, BK, PER_KEY)
        if SLICES > 1:
            s1 = _advance_slice(v, s1, BK, rows, is_row, unit_k, k_base, decays, k_row, decay_row, K, BK, PER_KEY)
        if SLICES > 2:
            s2 = _advance_slice(v, s2, 2 * BK, rows, is_row, unit_k, k_base, decays, k_row, decay_row, K, BK, PER_KEY)
            s3 = _advance_slice(v, s3, 3 * BK, rows, is_row, unit_k, k_base, decays, k_row, decay_row, K, BK, PER_KEY)
        save = tl.load(save_ptr + end, mask=end < last, other=-1).to(tl.int64)
        if save >= 0:
            _store_slices(home + save * slot, s0, s1, s2, s3, values, BK, SLICES, K, V)
    if (write >= 0) & (count > 0):
        _store_slices(home + write * slot, s0, s1, s2, s3, values, BK, SLICES, K, V)
