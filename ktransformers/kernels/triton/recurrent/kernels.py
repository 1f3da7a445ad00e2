"""Device code of recurrent layers, row by row: convolution, scans, gated norm. Knows pointers and strides only.

A program holds its part of one sequence's state in registers: it reads that part from one slot, goes over the
sequence's rows in their order, and writes it to others. Parts are heads and blocks of columns (values, channels), which
never meet, so nothing has to wait for another program.

    GROUP   value heads per key head
    K, V    width of a key and of a value; BK, BV powers of two that hold K, and a block of V
    LIMIT   sequences of at least so many rows are another kernel's; 0: none is

What a sequence gives does not depend on the sequences beside it, nor on how many rows a step has.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["conv_kernel", "gated_norm_kernel", "gates_kernel", "rows_kernel", "selective_kernel"]

_STEP = ["first_rows_ptr", "read_ptr", "write_ptr", "save_ptr"]


@jit
def _gate(x, KIND: tl.constexpr):
    """An activation of fp32."""
    if KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "sigmoid":
        x = tl.sigmoid(x)
    return x


@jit
def _wide(row):
    """A row as int64."""
    return tl.full((), 0, tl.int64) + row


@jit
def _softplus(x):
    """log(1 + exp(x)), which does not overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@jit
def _range_of(first_rows_ptr, read_ptr, write_ptr, seq, LIMIT: tl.constexpr):
    """First row, row behind the last, and the slots of a sequence; no rows and no slots when they are not ours."""
    first, last = tl.load(first_rows_ptr + seq), tl.load(first_rows_ptr + seq + 1)
    read, write = tl.load(read_ptr + seq).to(tl.int64), tl.load(write_ptr + seq).to(tl.int64)
    if LIMIT > 0:
        is_long = last - first >= LIMIT
        last = tl.where(is_long, first, last)
        read = tl.where(is_long, -1, read)
    return first, last, read, tl.where(last > first, write, -1)


@jit
def _clear(out_ptr, out_row, first, last, columns, mask, BLOCK: tl.constexpr):
    """Zeros for rows without a token."""
    for row in range(first, last):
        zeros = tl.zeros((BLOCK,), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + _wide(row) * out_row + columns, zeros, mask=mask)


@jit
def _conv_tap(x_ptr, state_ptr, t, columns, channels, first, last, read, inside, x_row, slot, C, W: tl.constexpr):
    """Inputs at rows t [R] of some channels [B] as fp32 [R, B]: of this step, or of those that the state holds."""
    is_row = ((t >= first) & (t < last))[:, None] & inside[None, :]
    x = tl.load(x_ptr + t[:, None].to(tl.int64) * x_row + columns[None, :], mask=is_row, other=0.0).to(tl.float32)
    is_old = ((t < first) & (read >= 0))[:, None] & inside[None, :]
    old = (W - 1 + t - first)[:, None] * C + channels[None, :]
    return x + tl.load(state_ptr + read * slot + old, mask=is_old, other=0.0)


@jit
def _save_conv(
    x_ptr, state_ptr, t, to, columns, channels, first, last, read, inside, x_row, slot, C,
    W: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write the W - 1 inputs up to row t to slot `to`, all read before the first is written."""
    nth = tl.arange(0, TAPS)
    tile = _conv_tap(
        x_ptr, state_ptr, t - (W - 2) + nth, columns, channels, first, last, read, inside & (to >= 0), x_row, slot, C, W
    )
    tl.debug_barrier()  # other threads may read what this one writes
    mask = (nth < W - 1)[:, None] & (inside & (to >= 0))[None, :]
    tl.store(state_ptr + to * slot + nth[:, None] * C + channels[None, :], tile, mask=mask)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_STEP)
def conv_kernel(
    x_ptr, columns_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, first_rows_ptr, read_ptr, write_ptr, save_ptr,
    x_row, weight_row, weight_tap, out_row, slot, num_rows,
    C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Kernel of the convolution. Grid (channels, sequences, R): each R-th tile of ROWS rows of a sequence, BLOCK
    channels.

    The program with the first tile alone reads the state, so it also is the one that writes the last.
    """
    seq, part = tl.program_id(1), tl.program_id(2)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < C
    columns = channels
    if HAS_COLUMNS:
        columns = tl.load(columns_ptr + channels, mask=inside, other=0)
    first, last, read, write = _range_of(first_rows_ptr, read_ptr, write_ptr, seq, 0)
    for start in range(first + part * ROWS, last, tl.num_programs(2) * ROWS):
        t = start + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
        for w in tl.static_range(W):
            x = _conv_tap(
                x_ptr, state_ptr, t - (W - 1) + w, columns, channels, first, last, read, inside, x_row, slot, C, W
            )
            taps = weight_ptr + channels * weight_row + w * weight_tap
            total += tl.load(taps, mask=inside, other=0.0).to(tl.float32)[None, :] * x
        mask = (t < last)[:, None] & inside[None, :]
        out = out_ptr + t[:, None].to(tl.int64) * out_row + channels[None, :]
        tl.store(out, _gate(total, KIND).to(out_ptr.dtype.element_ty), mask=mask)
        if tl.max(tl.load(save_ptr + t, mask=t < last, other=-1), 0) >= 0:
            for row in range(start, tl.minimum(start + ROWS, last)):
                to = tl.load(save_ptr + row).to(tl.int64)
                _save_conv(
                    x_ptr, state_ptr, row, to, columns, channels, first, last, read, inside, x_row, slot, C, W, TAPS
                )
    if part == 0:
        _save_conv(
            x_ptr, state_ptr, last - 1, write, columns, channels, first, last, read, inside, x_row, slot, C, W, TAPS
        )
        if seq == tl.num_programs(1) - 1:
            _clear(out_ptr, out_row, last, num_rows, channels, inside, BLOCK)


@jit
def _time_step(logit, bias, least, most):
    """Mamba-2's dt."""
    return tl.minimum(tl.maximum(_softplus(logit + bias), least), most)


@jit
def _decay_of(at, rate_ptr, bias_ptr, head, keys, K, GATES: tl.constexpr, PER_KEY: tl.constexpr):
    """The log decay of a head at one row, [BK] or a scalar. at: where it is, or with GATES what it is made of."""
    if PER_KEY:
        decay = tl.load(at + keys, mask=keys < K, other=0.0).to(tl.float32)
        if GATES:
            bias = tl.load(bias_ptr + head * K + keys, mask=keys < K, other=0.0)
            decay = tl.load(rate_ptr + head) * _softplus(decay + bias)
    else:
        decay = tl.load(at).to(tl.float32)
        if GATES:
            decay = tl.load(rate_ptr + head) * _softplus(decay + tl.load(bias_ptr + head))
    return decay


@jit
def _gated(out, gate_ptr, norm_ptr, values, eps, V: tl.constexpr, KIND: tl.constexpr):
    """RMS norm of a head's output, times its gate."""
    out = out / tl.sqrt(tl.sum(out * out, 0) / V + eps)
    out *= tl.load(norm_ptr + values, mask=values < V, other=0.0).to(tl.float32)
    return out * _gate(tl.load(gate_ptr + values, mask=values < V, other=0.0).to(tl.float32), KIND)


@jit
def _key(at, keys, eps, K: tl.constexpr, NORM: tl.constexpr):
    """A key or a query, fp32 [BK]; with NORM as a unit vector."""
    x = tl.load(at + keys, mask=keys < K, other=0.0).to(tl.float32)
    if NORM:
        x = x / tl.sqrt(tl.sum(x * x, 0) + eps)
    return x


@jit
def _corrected(v, k, state, at, GATES: tl.constexpr):
    """What the delta rule adds for a value: how it differs from what the state holds for its key, times beta, which is
    at `at`, or with GATES its logit."""
    beta = tl.load(at).to(tl.float32)
    if GATES:
        beta = tl.sigmoid(beta)
    return (v - tl.sum(state * k[:, None], 0)) * beta


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_STEP)
def rows_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, rate_ptr, bias_ptr, gate_ptr, norm_ptr, state_ptr, out_ptr,
    first_rows_ptr, read_ptr, write_ptr, save_ptr,
    q_row, q_head, k_row, k_head, v_row, v_head, decay_row, decay_head, beta_row, beta_head,
    gate_row, gate_head, gate_inner, out_row, slot, num_rows, eps, scale, norm_eps, least, most,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr,
    DELTA: tl.constexpr, PER_KEY: tl.constexpr, NORM: tl.constexpr, GATES: tl.constexpr, GATED: tl.constexpr,
    SSM: tl.constexpr,
):  # fmt: skip
    """Kernel of the scan row by row. Grid (blocks of V, value heads, sequences). Gated delta rule with DELTA, linear
    attention with a decay without.

    decay, beta: of value head h at (h // GROUP) * decay_head + h % GROUP, or with PER_KEY at h * decay_head. NORM: q
    and k are made unit vectors. GATES: decay and beta are made here of logits. GATED: "" or the activation of a gate
    behind an RMS norm of the head's output, for which BV holds all of V. SSM: decay holds Mamba-2's logits of dt, which
    is cut to least .. most and times rate the log decay; norm is its D.
    """
    seq, head = tl.program_id(2), tl.program_id(1)
    group, nth = head // GROUP, head % GROUP
    keys, values = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    is_value = values < V
    inside = (keys < K)[:, None] & is_value[None, :]
    first, last, read, write = _range_of(first_rows_ptr, read_ptr, write_ptr, seq, LIMIT)
    home = state_ptr + head.to(tl.int64) * (K * V) + keys[:, None] * V + values[None, :]
    state = tl.load(home + read * slot, mask=inside & (read >= 0), other=0.0)
    for row in range(first, last):
        t = _wide(row)
        q = _key(q_ptr + t * q_row + group * q_head, keys, eps, K, NORM)
        k = _key(k_ptr + t * k_row + group * k_head, keys, eps, K, NORM)
        v = tl.load(v_ptr + t * v_row + head * v_head + values, mask=is_value, other=0.0).to(tl.float32)
        own = v
        if SSM:
            dt = tl.load(decay_ptr + t * decay_row + head).to(tl.float32)
            dt = _time_step(dt, tl.load(bias_ptr + head), least, most)
            v *= dt
            state *= tl.exp(dt * tl.load(rate_ptr + head))
        else:
            at = decay_ptr + t * decay_row + (head * decay_head if PER_KEY else group * decay_head + nth)
            decay = tl.exp(_decay_of(at, rate_ptr, bias_ptr, head, keys, K, GATES, PER_KEY))
            state *= decay[:, None] if PER_KEY else decay
        if DELTA:
            v = _corrected(v, k, state, beta_ptr + t * beta_row + group * beta_head + nth, GATES)
        state += k[:, None] * v[None, :]
        out = scale * tl.sum(state * q[:, None], 0)
        if SSM:
            out += tl.load(norm_ptr + head).to(tl.float32) * own
        if GATED != "":
            at = gate_ptr + t * gate_row + group * gate_head + nth * gate_inner
            out = _gated(out, at, norm_ptr, values, norm_eps, V, GATED)
        tl.store(out_ptr + t * out_row + head * V + values, out.to(out_ptr.dtype.element_ty), mask=is_value)
        save = tl.load(save_ptr + row).to(tl.int64)
        if save >= 0:
            tl.store(home + save * slot, state, mask=inside)
    if write >= 0:
        tl.store(home + write * slot, state, mask=inside)
    if seq == tl.num_programs(2) - 1:
        end = tl.load(first_rows_ptr + seq + 1)
        _clear(out_ptr + head * V, out_row, end, num_rows, values, is_value, BV)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_STEP)
def selective_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, skip_ptr, state_ptr, out_ptr, first_rows_ptr, read_ptr, write_ptr, save_ptr,
    x_row, dt_row, b_row, c_row, out_row, slot, num_rows,
    C: tl.constexpr, N: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Kernel of the selective scan of Mamba (arXiv 2312.00752). Grid (blocks of channels, sequences): BC channels."""
    seq = tl.program_id(1)
    channels, columns = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, BN)
    is_channel, is_column = channels < C, columns < N
    inside = is_channel[:, None] & is_column[None, :]
    first, last, read, write = _range_of(first_rows_ptr, read_ptr, write_ptr, seq, 0)
    home = state_ptr + channels[:, None] * N + columns[None, :]
    state = tl.load(home + read * slot, mask=inside & (read >= 0), other=0.0)
    a = tl.load(a_ptr + channels[:, None] * N + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    for row in range(first, last):
        t = _wide(row)
        x = tl.load(x_ptr + t * x_row + channels, mask=is_channel, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + t * dt_row + channels, mask=is_channel, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + t * b_row + columns, mask=is_column, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * c_row + columns, mask=is_column, other=0.0).to(tl.float32)
        state = tl.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], 1)
        if HAS_SKIP:
            out += tl.load(skip_ptr + channels, mask=is_channel, other=0.0).to(tl.float32) * x
        tl.store(out_ptr + t * out_row + channels, out.to(out_ptr.dtype.element_ty), mask=is_channel)
        save = tl.load(save_ptr + row).to(tl.int64)
        if save >= 0:
            tl.store(home + save * slot, state, mask=inside)
    if write >= 0:
        tl.store(home + write * slot, state, mask=inside)
    if seq == tl.num_programs(1) - 1:
        _clear(out_ptr, out_row, last, num_rows, channels, is_channel, BC)


@jit
def gates_kernel(
    a_ptr, b_ptr, rate_ptr, bias_ptr, decay_ptr, beta_ptr, a_row, a_head, b_row, b_head, least, most,
    GROUP: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PER_KEY: tl.constexpr, SSM: tl.constexpr,
):  # fmt: skip
    """Kernel of gates. Grid (rows,): decay and beta of all heads of a row, as `rows_kernel` makes them; with SSM dt
    instead of beta.
    """
    t = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BH)
    is_head = heads < HEADS
    rate = tl.load(rate_ptr + heads, mask=is_head, other=0.0)
    if not SSM:
        at = b_ptr + t * b_row + heads // GROUP * b_head + heads % GROUP
        beta = tl.sigmoid(tl.load(at, mask=is_head, other=0.0).to(tl.float32))
        tl.store(beta_ptr + t * HEADS + heads, beta, mask=is_head)
    if PER_KEY:
        keys = tl.arange(0, BK)
        mask = is_head[:, None] & (keys < K)[None, :]
        own = heads[:, None] * K + keys[None, :]
        a = tl.load(a_ptr + t * a_row + heads[:, None] * a_head + keys[None, :], mask=mask, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + own, mask=mask, other=0.0)
        tl.store(decay_ptr + t * (HEADS * K) + own, rate[:, None] * _softplus(a), mask=mask)
    else:
        at = heads // GROUP * a_head + heads % GROUP
        a = tl.load(a_ptr + t * a_row + at, mask=is_head, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + heads, mask=is_head, other=0.0)
        step = _softplus(a + bias)
        if SSM:
            step = _time_step(a, bias, least, most)
            tl.store(beta_ptr + t * HEADS + heads, step, mask=is_head)
        tl.store(decay_ptr + t * HEADS + heads, rate * step, mask=is_head)


@jit
def gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_row, gate_row, gate_head, gate_inner, out_row, weight_step, eps,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Kernel of the gated norm. Grid (rows, groups): RMS norm of SIZE columns, times act(gate) behind it, or before it
    with GATE_FIRST.
    """
    t, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + t * x_row + group * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    at = gate_ptr + t * gate_row + group // GROUP * gate_head + group % GROUP * gate_inner + columns
    gate = _gate(tl.load(at, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATE_FIRST:
        x *= gate
    x = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    x *= tl.load(weight_ptr + group * weight_step + columns, mask=mask, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        x *= gate
    tl.store(out_ptr + t * out_row + group * SIZE + columns, x.to(out_ptr.dtype.element_ty), mask=mask)
