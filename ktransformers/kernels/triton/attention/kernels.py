"""Device code of paged attention: split-KV decode, its reduction, and prefill. Knows pointers and strides only.

One inner loop, `_attend`, serves all of it: a tile of BLOCK_M query rows against BLOCK_N cached positions at a time,
with the running maximum and sum of Milakov and Gimelshein (arXiv 1805.02867) as FlashAttention does it (arXiv
2205.14135). Logits are in units of log 2, so that exp2 serves.

    GROUP   query heads per KV head; a tile holds HEADS of them for each of its tokens
    DK, DV  width of a key and a value; each is cut into a power of two (DK0, DV0) and a rest (DK1, DV1, 0 for none),
            so that 80, 96, 192 or 576 columns cost 80, 96, 192 or 576 and not the next power of two
    COMPUTE the type of the products: the cache's own, but fp32 for bf16 in the interpreter, which cannot multiply it
    SHARED  latent attention: a value is the first DV0 columns of its key and is not loaded again
    CODES   the cache holds codes of 8 bits (kv_codes.py), which are multiplied as they are, in the queries' type; the
            scale of a key multiplies its logits, that of a value its probabilities
    QUANTIZED_ATTENTION queries are rounded to codes too, a scale for each row, and multiplied with the keys' codes:
    int8
            exactly, e4m3 as tensor cores do. Probabilities and values stay in COMPUTE: rounded to 8 bits, either
            probabilities far below the largest would vanish, or each be off by up to 1/16

The cache's strides are constants: Triton takes of an argument only whether it is a multiple of 16, and without knowing
that 40 is one of 8 it reads keys two bytes at a time, which cannot be prefetched into shared memory.

A chunk of KV in decode starts at a multiple of BLOCK_N and its size depends on the row's length and the table's width
alone: what a row gives does not depend on the rows beside it.
"""

from __future__ import annotations

from ktransformers.kernels.triton.attention.kv_codes import codes_of, factor_and_scale, magnitude, widened
from ktransformers.kernels.triton.common.arrival import arrive_last
from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["decode_kernel", "prefill_kernel", "reduce_kernel"]


@jit
def _tile(base, rows, stride, keep, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr):
    """Columns FIRST .. LAST - 1 of some rows as [rows, WIDTH], zeros beyond; with MASK, zeros where not `keep`."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if LAST - FIRST < WIDTH:
        mask = columns[None, :] < LAST
        if MASK:
            mask = mask & keep[:, None]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif MASK:
        tile = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@jit
def _slots(table_ptr, start, positions, keep, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache slots (int64) of BLOCK_N positions; `start`, the first, is a multiple of BLOCK_N."""
    if PAGE % BLOCK_N == 0:
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        slots = page * PAGE + (start % PAGE) + tl.arange(0, BLOCK_N)
    else:
        pages = tl.load(table_ptr + positions // PAGE, mask=keep, other=0).to(tl.int64)
        slots = pages * PAGE + positions % PAGE
    return slots


@jit
def _of_slots(scale_ptr, slots, stride, keep, MASK: tl.constexpr):
    """Scales [1, BLOCK_N] of some slots; with MASK, 0 where not `keep`.

    The sum is over one number each. What it is for: Triton 3.6 would compute addresses where the logits are, sixteen in
    a thread and all of them in each warp, and copy from there; a sum it leaves where the slots are.
    """
    pointers = scale_ptr + tl.sum((slots * stride)[:, None], 1)
    return (tl.load(pointers, mask=keep, other=0.0) if MASK else tl.load(pointers))[None, :]


@jit
def _tanh(x):
    small = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|)
    return tl.where(x < 0.0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)


@jit
def _keys(
    k_ptr, slots, stride, keep, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
    COMPUTE: tl.constexpr, QUANTIZED_ATTENTION: tl.constexpr,
):  # fmt: skip
    """Columns of keys as they are multiplied, see `_tile`."""
    tile = _tile(k_ptr, slots, stride, keep, FIRST, LAST, WIDTH, MASK)
    return tile if QUANTIZED_ATTENTION else widened(tile, COMPUTE)


@jit
def _exponentials(s, m, scale, SCALED_HERE: tl.constexpr):
    """The running maximum with the logits s, their exponentials below it, and what earlier ones are multiplied with.

    SCALED_HERE: s is still to be multiplied with scale [BLOCK_M], where the maximum is subtracted: one instruction.
    """
    top = tl.max(s, 1)
    if SCALED_HERE:
        top *= scale
    m_new = tl.maximum(m, top)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen nothing yet
    p = tl.exp2((s * scale[:, None] if SCALED_HERE else s) - shift[:, None])
    return m_new, p, tl.exp2(m - shift)


@jit
def _attend(  # noqa: C901 (nearly all of it is decided while compiling)
    m, total, acc0, acc1, q0, q1, k_ptr, v_ptr, ks_ptr, vs_ptr, k_slot, v_slot, ks_slot, vs_slot, table_ptr,
    row_lo, row_hi, start, stop, end, scale, softcap,
    DK: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    SHARED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    CODES: tl.constexpr, QUANTIZED_ATTENTION: tl.constexpr,
):  # fmt: skip
    """Positions start .. stop - 1 into the running state. MASKED: some rows do not see some of them.

    end: the first position that no row sees; nothing is read from there on. With a softcap `scale` already holds the
    division by it and `softcap` the factor behind tanh. Of keys that are values too there are so many addresses in
    shared memory that do not change that, kept in registers over the loop, they would spill others.
    QUANTIZED_ATTENTION: queries are codes as keys are, and `scale` [BLOCK_M] holds the scales of theirs, all above 0.
    """
    for first in tl.range(start, stop, BLOCK_N, disable_licm=SHARED):
        positions = first + tl.arange(0, BLOCK_N)
        keep = positions < end
        slots = _slots(table_ptr, first, positions, keep, PAGE, BLOCK_N)
        k0 = _keys(k_ptr, slots, k_slot, keep, 0, DK if DK1 == 0 else DK0, DK0, MASKED, COMPUTE, QUANTIZED_ATTENTION)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if CODES:
            of_keys = _of_slots(ks_ptr, slots, ks_slot, keep, MASKED)
            if SHARED:  # what is rotated has a scale of its own
                s *= of_keys
        if DK1 > 0:
            k1 = _keys(k_ptr, slots, k_slot, keep, DK0, DK, DK1, MASKED, COMPUTE, QUANTIZED_ATTENTION)
            if CODES and SHARED:
                rotated = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
                s += rotated * _of_slots(ks_ptr + 1, slots, ks_slot, keep, MASKED)
            else:
                s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION, out_dtype=s.dtype)
        if QUANTIZED_ATTENTION:
            s = s.to(tl.float32)
        if CODES and not SHARED:
            s *= of_keys
        if not QUANTIZED_ATTENTION:
            s *= scale
        if HAS_SOFTCAP:
            s = softcap * _tanh(s * scale[:, None] if QUANTIZED_ATTENTION else s)
        if MASKED:
            seen = positions[None, :] < row_hi[:, None]
            if HAS_WINDOW:
                seen = seen & (positions[None, :] >= row_lo[:, None])
            s = tl.where(seen, s, float("-inf"))
        m, p, decay = _exponentials(s, m, scale, QUANTIZED_ATTENTION and not HAS_SOFTCAP)
        total = total * decay + tl.sum(p, 1)
        if SHARED:
            v0 = k0
        else:
            v0 = widened(_tile(v_ptr, slots, v_slot, keep, 0, DV if DV1 == 0 else DV0, DV0, MASKED), COMPUTE)
        if CODES:
            p *= of_keys if SHARED else _of_slots(vs_ptr, slots, vs_slot, keep, MASKED)
        p = p.to(v0.dtype)
        acc0 = tl.dot(p, v0, acc0 * decay[:, None], input_precision=PRECISION)
        if DV1 > 0:
            v1 = widened(_tile(v_ptr, slots, v_slot, keep, DV0, DV, DV1, MASKED), COMPUTE)
            acc1 = tl.dot(p, v1, acc1 * decay[:, None], input_precision=PRECISION)
    return m, total, acc0, acc1


@jit
def _oldest(length, window):
    """The first position that a row of `length` positions sees: of its last `window`; of its chunk of -window positions
    where that is negative; 0 where it is 0."""
    size = tl.maximum(-window, 1)
    in_chunk = tl.maximum(length - 1, 0) // size * size
    return tl.where(window > 0, tl.maximum(length - window, 0), tl.where(window < 0, in_chunk, 0))


@jit
def _chunk(length, window, MAX_SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """First position to read (a multiple of BLOCK_N) and positions per split, for a row that sees `length`."""
    first = _oldest(length, window) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(length - first, MAX_SPLITS), BLOCK_N) * BLOCK_N
    return first, tl.maximum(share, MIN_CHUNK)


@jit
def _queries(base, rows, stride, keep, DK: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, COMPUTE: tl.constexpr):
    """Both parts of the columns, see `_parts` of launch.py; the first twice where there is no second."""
    q0 = _tile(base, rows, stride, keep, 0, DK if DK1 == 0 else DK0, DK0, True).to(COMPUTE)
    q1 = q0
    if DK1 > 0:
        q1 = _tile(base, rows, stride, keep, DK0, DK, DK1, True).to(COMPUTE)
    return q0, q1


@jit
def _query_codes(base, rows, keep, codes_ptr, DK: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr):
    """`_queries` as codes of the type that codes_ptr points to, and their scales, fp32 [rows].

    The scale of a row of zeros is 1: one of 0 would make something that is no number of logits of -infinity.
    """
    x0 = _tile(base, rows, 1, keep, 0, DK if DK1 == 0 else DK0, DK0, True).to(tl.float32)
    top = tl.max(magnitude(x0), 1)
    if DK1 > 0:
        x1 = _tile(base, rows, 1, keep, DK0, DK, DK1, True).to(tl.float32)
        top = tl.maximum(top, tl.max(magnitude(x1), 1))
    factor, scale = factor_and_scale(top, codes_ptr)
    q0 = codes_of(x0, factor[:, None], codes_ptr).to(codes_ptr.dtype.element_ty, bitcast=True)
    q1 = q0
    if DK1 > 0:
        q1 = codes_of(x1, factor[:, None], codes_ptr).to(codes_ptr.dtype.element_ty, bitcast=True)
    return q0, q1, tl.where(scale == 0.0, 1.0, scale)


@jit
def _put_part(pointers, acc, keep, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr):
    columns = FIRST + tl.arange(0, WIDTH)
    mask = keep[:, None] & (columns[None, :] < LAST)
    tl.store(pointers[:, None] + columns[None, :], acc.to(pointers.dtype.element_ty), mask=mask)


@jit
def _put(pointers, acc0, acc1, keep, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr):
    _put_part(pointers, acc0, keep, 0, DV if DV1 == 0 else DV0, DV0)
    if DV1 > 0:
        _put_part(pointers, acc1, keep, DV0, DV, DV1)


@jit(
    do_not_specialize=["window", "table_row"],
    do_not_specialize_on_alignment=["seq_ptr", "len_ptr", "lse_ptr", "table_ptr"],
)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr, seq_ptr, len_ptr, acc_ptr, lse_ptr, sink_ptr, out_ptr, counters,
    q_row, q_head, k_slot: tl.constexpr, k_head: tl.constexpr, v_slot: tl.constexpr, v_head: tl.constexpr,
    ks_slot: tl.constexpr, ks_head: tl.constexpr, vs_slot: tl.constexpr, vs_head: tl.constexpr,
    table_row, out_row, out_head, scale, softcap, window,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    DK: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    SHARED: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr,
    CODES: tl.constexpr, FOLDED: tl.constexpr, SPLITS_P2: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Kernel of split-KV decode. Grid (rows, KV heads * HEAD_BLOCKS, MAX_SPLITS): one split of one row for HEADS heads.

    Writes the normalized result, fp32 [rows, NUM_HEADS, MAX_SPLITS, DV], and the logarithm of its denominator, fp32
    [rows, NUM_HEADS, MAX_SPLITS]. Splits without positions write nothing; the reduction does not read them.
    FOLDED: the last split of a row and its heads to finish weighs them all, and there is no `reduce_kernel`.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_head, head_block = tl.program_id(1) // HEAD_BLOCKS, tl.program_id(1) % HEAD_BLOCKS
    length = tl.load(len_ptr + row).to(tl.int32)
    first, chunk = _chunk(length, window, MAX_SPLITS, MIN_CHUNK, BLOCK_N)
    start = first + split * chunk
    stop = tl.minimum(start + chunk, length)
    local = tl.arange(0, BLOCK_M)
    in_group = head_block * HEADS + local
    keep = (local < HEADS) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    if FOLDED:  # noqa: SIM102 (decided while compiling)
        if length <= 0 and split == 0:  # a row that pads the batch
            out = out_ptr + row * out_row + heads * out_head
            nothing0 = tl.zeros([BLOCK_M, DV0], tl.float32)
            _put(out, nothing0, tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32), keep, DV, DV0, DV1)
    if start >= stop:
        return
    q0, q1 = _queries(q_ptr + row * q_row, heads, q_head, keep, DK, DK0, DK1, COMPUTE)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
    row_hi = tl.zeros([BLOCK_M], tl.int32) + length
    table = table_ptr + tl.load(seq_ptr + row).to(tl.int64) * table_row
    ks_base, vs_base = ks_ptr + kv_head * ks_head, vs_ptr + kv_head * vs_head
    m, total, acc0, acc1 = _attend(
        m, total, acc0, acc1, q0, q1, k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, ks_base, vs_base,
        k_slot, v_slot, ks_slot, vs_slot, table, _oldest(row_hi, window), row_hi, start, stop, length, scale, softcap,
        DK, DK0, DK1, DV, DV0, DV1, SHARED, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION, COMPUTE, CODES,
        False,
    )  # fmt: skip
    slot = (row * NUM_HEADS + heads) * MAX_SPLITS + split
    denominator = tl.where(total == 0.0, 1.0, total)  # nothing but positions before the window
    tl.store(lse_ptr + slot, m + tl.log2(denominator), mask=keep)
    _put(acc_ptr + slot * DV, acc0 / denominator[:, None], acc1 / denominator[:, None], keep, DV, DV0, DV1)
    if FOLDED:
        active = tl.cdiv(length - first, chunk)
        if arrive_last(counters + row * tl.num_programs(1) + tl.program_id(1), active):
            slots = (row * NUM_HEADS + heads) * MAX_SPLITS
            _weigh_splits(
                acc_ptr + slots * DV, lse_ptr + slots, sink_ptr + heads, out_ptr + row * out_row + heads * out_head,
                active, keep, DV, DV0, DV1, BLOCK_M, SPLITS_P2, HAS_SINKS,
            )  # fmt: skip


@jit
def _weigh_splits(
    parts, lses, sinks, out, active, keep, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS_P2: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """What `reduce_kernel` does, for BLOCK_M heads; the pointers [BLOCK_M] are those of each head's first split."""
    splits = tl.arange(0, SPLITS_P2)
    mask = keep[:, None] & (splits < active)[None, :]
    lse = tl.load(lses[:, None] + splits[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(lse, 1)
    if HAS_SINKS:
        sink = tl.load(sinks, mask=keep, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - shift[:, None])
    total = tl.sum(weights, 1)
    if HAS_SINKS:
        total += tl.exp2(sink - shift)
    weights /= tl.where(total == 0.0, 1.0, total)[:, None]
    columns0, columns1 = tl.arange(0, DV0), DV0 + tl.arange(0, DV1 if DV1 > 0 else 1)
    mask0, mask1 = keep[:, None] & (columns0 < DV)[None, :], keep[:, None] & (columns1 < DV)[None, :]
    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
    for split in tl.range(0, active, num_stages=4):
        weight = tl.sum(tl.where(splits[None, :] == split, weights, 0.0), 1)[:, None]
        at = parts[:, None] + split * DV
        acc0 += weight * tl.load(at + columns0[None, :], mask=mask0, other=0.0, cache_modifier=".cg")
        if DV1 > 0:
            acc1 += weight * tl.load(at + columns1[None, :], mask=mask1, other=0.0, cache_modifier=".cg")
    _put(out, acc0, acc1, keep, DV, DV0, DV1)


@jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["lse_ptr", "len_ptr"])
def reduce_kernel(
    acc_ptr, lse_ptr, len_ptr, sink_ptr, out_ptr, out_row, out_head, window,
    NUM_HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr, MIN_CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Kernel that weighs the splits of decode. Grid (rows, NUM_HEADS, cdiv(DV, BLOCK_D)): one row and head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    length = tl.load(len_ptr + row).to(tl.int32)
    first, chunk = _chunk(length, window, MAX_SPLITS, MIN_CHUNK, BLOCK_N)
    splits = tl.arange(0, SPLITS_P2)
    active = (splits < MAX_SPLITS) & (first + splits * chunk < length)
    slots = (row * NUM_HEADS + head) * MAX_SPLITS + splits
    lse = tl.load(lse_ptr + slots, mask=active, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - shift)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - shift)
    total = tl.where(total == 0.0, 1.0, total)
    mask = active[:, None] & (columns[None, :] < DV)
    parts = tl.load(acc_ptr + slots[:, None] * DV + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    target = out_ptr + row * out_row + head * out_head + columns
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=columns < DV)


@jit
def _prefill_run(
    mine, rows, heads, seqs, q_ptr, k_base, v_base, ks_base, vs_base, table_ptr, len_ptr, sink_ptr, out_ptr,
    q_row, q_head, k_slot, v_slot, ks_slot, vs_slot, table_row, out_row, out_head, scale, softcap, window,
    DK: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    SHARED: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, CODES: tl.constexpr, QUANTIZED_ATTENTION: tl.constexpr,
):  # fmt: skip
    """The rows of a tile that are `mine`, all of one sequence: attends and writes their results."""
    row_hi = tl.load(len_ptr + rows, mask=mine, other=0).to(tl.int32)
    end = tl.max(row_hi, 0)
    shortest = tl.maximum(tl.min(tl.where(mine, row_hi, end), 0), 0)
    table = table_ptr + tl.max(tl.where(mine, seqs, 0), 0).to(tl.int64) * table_row
    q_rows = rows * q_row + heads * q_head
    if QUANTIZED_ATTENTION:
        q0, q1, q_scale = _query_codes(q_ptr, q_rows, mine, k_base, DK, DK0, DK1)
        scale = q_scale * scale
    else:
        q0, q1 = _queries(q_ptr, q_rows, 1, mine, DK, DK0, DK1, COMPUTE)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
    row_lo = _oldest(row_hi, window)
    if HAS_WINDOW:
        start = _oldest(shortest, window) // BLOCK_N * BLOCK_N
    else:
        start = shortest // BLOCK_N * BLOCK_N  # before it every row sees every position
        m, total, acc0, acc1 = _attend(
            m, total, acc0, acc1, q0, q1, k_base, v_base, ks_base, vs_base, k_slot, v_slot, ks_slot, vs_slot, table,
            row_lo, row_hi, 0, start, end, scale, softcap, DK, DK0, DK1, DV, DV0, DV1, SHARED, PAGE, BLOCK_N,
            False, False, HAS_SOFTCAP, PRECISION, COMPUTE, CODES, QUANTIZED_ATTENTION,
        )  # fmt: skip
    m, total, acc0, acc1 = _attend(
        m, total, acc0, acc1, q0, q1, k_base, v_base, ks_base, vs_base, k_slot, v_slot, ks_slot, vs_slot, table,
        row_lo, row_hi, start, end, end, scale, softcap, DK, DK0, DK1, DV, DV0, DV1, SHARED, PAGE, BLOCK_N,
        True, HAS_WINDOW, HAS_SOFTCAP, PRECISION, COMPUTE, CODES, QUANTIZED_ATTENTION,
    )  # fmt: skip
    rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sink_ptr + heads, mask=mine, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        rescale = tl.exp2(m - top)
        total = total * rescale + tl.exp2(sink - top)
    rescale = rescale / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + rows * out_row + heads * out_head
    _put(out, acc0 * rescale[:, None], acc1 * rescale[:, None], mine, DV, DV0, DV1)


@jit(
    do_not_specialize=["num_rows", "window", "table_row"],
    do_not_specialize_on_alignment=["seq_ptr", "len_ptr", "table_ptr"],
)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr, seq_ptr, len_ptr, sink_ptr, out_ptr,
    q_row, q_head, k_slot: tl.constexpr, k_head: tl.constexpr, v_slot: tl.constexpr, v_head: tl.constexpr,
    ks_slot: tl.constexpr, ks_head: tl.constexpr, vs_slot: tl.constexpr, vs_head: tl.constexpr,
    table_row, out_row, out_head, scale, softcap, window, num_rows,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    DK: tl.constexpr, DK0: tl.constexpr, DK1: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
    SHARED: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, CODES: tl.constexpr, QUANTIZED_ATTENTION: tl.constexpr,
):  # fmt: skip
    """Kernel of prefill. Grid (cdiv(num_rows, TOKENS), KV heads * HEAD_BLOCKS, SHARES): TOKENS rows of the batch for
    HEADS heads.

    A tile may hold the rows of several sequences, in runs; of these the z-th program takes z, z + SHARES, ... With
    SHARES = 1 all rows belong to one sequence.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows see more positions: start them first
    kv_head, head_block = tl.program_id(1) // HEAD_BLOCKS, tl.program_id(1) % HEAD_BLOCKS
    local = tl.arange(0, BLOCK_M)
    rows = (tile * TOKENS + local // HEADS).to(tl.int64)
    in_group = head_block * HEADS + local % HEADS
    heads = kv_head * GROUP + in_group
    mine = (local < TOKENS * HEADS) & (rows < num_rows) & (in_group < GROUP)
    seqs = tl.load(seq_ptr + rows, mask=mine, other=0).to(tl.int32)
    k_base, v_base = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head
    ks_base, vs_base = ks_ptr + kv_head * ks_head, vs_ptr + kv_head * vs_head
    if SHARES == 1:
        _prefill_run(
            mine, rows, heads, seqs, q_ptr, k_base, v_base, ks_base, vs_base, table_ptr, len_ptr, sink_ptr,
            out_ptr, q_row, q_head, k_slot, v_slot, ks_slot, vs_slot, table_row, out_row, out_head, scale, softcap,
            window, DK, DK0, DK1, DV, DV0, DV1, SHARED, PAGE, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS,
            PRECISION, COMPUTE, CODES, QUANTIZED_ATTENTION,
        )  # fmt: skip
    else:
        follows = mine & (local >= HEADS)
        before = tl.load(seq_ptr + rows - 1, mask=follows, other=0).to(tl.int32)
        begins = follows & (local % HEADS == 0) & (seqs != before)
        runs = tl.cumsum(begins.to(tl.int32), 0)
        for run in range(tl.program_id(2), tl.max(runs, 0) + 1, SHARES):
            _prefill_run(
                mine & (runs == run), rows, heads, seqs, q_ptr, k_base, v_base, ks_base, vs_base, table_ptr, len_ptr,
                sink_ptr, out_ptr, q_row, q_head, k_slot, v_slot, ks_slot, vs_slot, table_row, out_row, out_head,
                scale, softcap, window, DK, DK0, DK1, DV, DV0, DV1, SHARED, PAGE, BLOCK_M, BLOCK_N, HAS_WINDOW,
                HAS_SOFTCAP, HAS_SINKS, PRECISION, COMPUTE, CODES, QUANTIZED_ATTENTION,
            )  # fmt: skip
