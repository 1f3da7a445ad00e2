"""Kernels around the attention over compressed keys (DeepSeek-V4) on a GPU. Knows slots, pages and columns of the
cache; not modules.

    T rows, D columns of a key or an entry, P of them rotated: the last ones, in pairs (0, 1), (2, 3), ... that stay
    where they are; M tokens of an entry, W tokens of the window

Keys are the values too, so results are turned back by the angles that turned the keys (`turn` with is_back).
What a token leaves in the cache is drawn in operators/attention/compressed.py. Nothing is read back to the host, and
grids depend on shapes alone; rows whose slot is negative write nothing and attend to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import RowPages
from ktransformers.kernels.triton.attention.rope import check_angles, check_ids, is_cached
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = ["Entries", "attended", "keep_values", "make_entries", "turn"]

_COPIED = 1024  # columns of a program
_LISTED = 256


@dataclass(frozen=True, slots=True)
class Entries:
    """How a compressor makes entries of `rate` tokens, and its columns of the cache's rows: `entry` is the first one of
    an entry, `values` of C and then Z.

    bias: fp32 [M, series D]. weight: fp32 [D], eps: of the RMSNorm. frequencies: fp32 [P / 2], angles of position 1;
    factor: of cosines and sines. series: 2 where an entry is made of the tokens of the window before too.
    """

    rate: int
    series: int
    entry: int
    values: int
    bias: Tensor
    weight: Tensor
    eps: float
    frequencies: Tensor
    factor: float

    @property
    def dim(self) -> int:
        return int(self.weight.shape[0])


@jit(do_not_specialize_on_alignment=["slot_ptr"])
def _turn_kernel(
    x_ptr, out_ptr, slot_ptr, weight_ptr, cos_ptr, sin_ptr, x_row, x_head, out_row, out_head, cos_row, num_slots, eps,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    TO_SLOTS: tl.constexpr, IS_BACK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads): one head of a row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, DIM_P2)
    mask, plain = columns < DIM, DIM - 2 * HALF
    is_turned = mask & (columns >= plain)
    others = tl.where(is_turned, columns ^ 1, columns)
    source = x_ptr + row * x_row + head * x_head
    x = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + others, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + eps)
        x, y = x * scale, y * scale
        if HAS_WEIGHT:
            x *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
            y *= tl.load(weight_ptr + others, mask=mask, other=0.0).to(tl.float32)
    angles = row * cos_row + (columns - plain) // 2
    cos = tl.load(cos_ptr + angles, mask=is_turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=is_turned, other=0.0).to(tl.float32)
    is_first = columns % 2 == 0
    if IS_BACK:
        is_first = columns % 2 == 1
    result = x * cos + y * tl.where(is_first, -sin, sin)
    to = row
    if TO_SLOTS:
        to = tl.load(slot_ptr + row).to(tl.int64)
        mask = mask & is_cached(to, num_slots)
    target = out_ptr + to * out_row + head * out_head + columns
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)


def turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    norm: tuple[Tensor | None, float] | None = None,
    cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    is_back: bool = False,
) -> Tensor:
    """Rotate the last columns of x [T, H, D] by angles [T, P / 2]; returned, or written to slots of a cache.

    x: any row and head strides, D even. norm: weight [D] or None, and epsilon of an RMSNorm of each head before the
    rotation. cache: [slots, H, >= D], whose first columns take the result, which is returned; with slot_mapping, int32
    or int64 [T], negative for rows to leave out. is_back: by the angles the other way round.
    """
    rows, heads, dim = x.shape
    half = cos.shape[1]
    check_float("x", x, (None, None, None))
    check_angles(cos, sin, None, rows, 2 * half)
    if dim % 2 or 2 * half > dim:
        raise ValueError(f"{dim} columns must be even and no fewer than the {2 * half} that are rotated")
    weight, eps = norm or (None, 0.0)
    if weight is not None:
        check_float("weight", weight, (dim,))
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device) if cache is None else cache[..., :dim]
    check_float("cache", out, (None, heads, dim))
    if cache is not None:
        assert slot_mapping is not None, "a cache comes with slots"
        check_ids("slot_mapping", slot_mapping, rows)
    if rows:
        _turn_kernel[(rows, heads)](
            x, out, slot_mapping, weight, cos, sin, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            cos.stride(0), out.shape[0], float(eps), DIM=dim, DIM_P2=power_of_two(dim), HALF=half,
            HAS_NORM=norm is not None, HAS_WEIGHT=weight is not None, TO_SLOTS=cache is not None, IS_BACK=is_back,
            num_warps=min(4, max(1, dim // 128)),
        )  # fmt: skip
    return out


@jit(do_not_specialize_on_alignment=["slot_ptr"])
def _keep_kernel(
    first_ptr, second_ptr, cache_ptr, slot_ptr, first_row, second_row, cache_slot, num_slots,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, cdiv(WIDTH, BLOCK)): columns of both, which lie side by side in the cache."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    mask = (columns < WIDTH) & is_cached(slot, num_slots)
    element = cache_ptr.dtype.element_ty
    first = tl.load(first_ptr + row * first_row + columns, mask=mask, other=0.0)
    second = tl.load(second_ptr + row * second_row + columns, mask=mask, other=0.0)
    target = cache_ptr + slot * cache_slot + columns
    tl.store(target, first.to(element), mask=mask)
    tl.store(target + WIDTH, second.to(element), mask=mask)


def keep_values(values: Tensor, gates: Tensor, cache: Tensor, first: int, slot_mapping: Tensor) -> None:
    """Write C and Z, [T, N] each, to columns first .. first + 2 N - 1 of their slots in cache [slots, columns].

    slot_mapping: int32 or int64 [T], negative for rows to leave out.
    """
    rows, width = values.shape
    check_float("values", values, (None, None))
    check_float("gates", gates, (rows, width))
    part = cache[:, first : first + 2 * width]
    check_float("cache", part, (None, 2 * width))
    check_ids("slot_mapping", slot_mapping, rows)
    if rows:
        block = min(_COPIED, power_of_two(width))
        _keep_kernel[(rows, -(-width // block))](
            values, gates, part, slot_mapping, values.stride(0), gates.stride(0), part.stride(0), part.shape[0],
            WIDTH=width, BLOCK=block, num_warps=4,
        )  # fmt: skip


@jit
def _slots_of(table, positions, page_size, keep):
    """Cache slots (int64) of positions of one sequence."""
    pages = tl.load(table + positions // page_size, mask=keep, other=0).to(tl.int64)
    return pages * page_size + positions % page_size


@jit
def _cos_sin(angles):
    """Of angles from 0 to some millions: libdevice's functions reduce large ones in local memory.

    The quarter turns are taken off in fp64, by a half of pi in two parts that fp32 holds; what is left is at most
    pi / 4, for which the terms are exact to fp32.
    """
    wide = angles.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    x = (wide - quarters * 1.57079637050628662109375 + quarters * 4.371139000186243e-08).to(tl.float32)
    y = x * x
    sine = x * (1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880)))))
    cosine = 1.0 + y * (-0.5 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 + y * (-1 / 3628800)))))
    quarter = quarters.to(tl.int32) & 3
    is_swapped = (quarter & 1) == 1
    cos, sin = tl.where(is_swapped, sine, cosine), tl.where(is_swapped, cosine, sine)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where(quarter >= 2, -sin, sin)


@jit(
    do_not_specialize=["table_row", "page_size"],
    do_not_specialize_on_alignment=["slot_ptr", "seq_ptr", "len_ptr", "table_ptr"],
)
def _entry_kernel(
    cache_ptr, slot_ptr, table_ptr, seq_ptr, len_ptr, bias_ptr, weight_ptr, frequency_ptr,
    cache_slot, table_row, page_size, num_slots, eps, factor,
    RATE: tl.constexpr, SERIES: tl.constexpr, ENTRY: tl.constexpr, VALUES: tl.constexpr, DIM: tl.constexpr,
    DIM_P2: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the entry that a row ends, if it ends one. BLOCK tokens at a time, with a running maximum."""
    row = tl.program_id(0).to(tl.int64)
    slot, length = tl.load(slot_ptr + row).to(tl.int64), tl.load(len_ptr + row).to(tl.int32)
    if (length <= 0) | (length % RATE != 0) | (slot < 0) | (slot >= num_slots):
        return
    table = table_ptr + tl.load(seq_ptr + row).to(tl.int64) * table_row
    columns = tl.arange(0, DIM_P2)
    most = tl.full([DIM_P2], float("-inf"), tl.float32)
    total, pooled = tl.zeros([DIM_P2], tl.float32), tl.zeros([DIM_P2], tl.float32)
    for first in range(0, SERIES * RATE, BLOCK):
        nth = first + tl.arange(0, BLOCK)
        positions = length - SERIES * RATE + nth
        keep = (nth < SERIES * RATE) & (positions >= 0)
        slots = _slots_of(table, positions, page_size, keep)
        series = nth // RATE  # tokens before the window give their first series
        mask = keep[:, None] & (columns < DIM)[None, :]
        at = (cache_ptr + slots * cache_slot + VALUES + series * DIM)[:, None] + columns[None, :]
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        gates = tl.load(at + SERIES * DIM, mask=mask, other=0.0).to(tl.float32)
        bias = bias_ptr + (nth % RATE * (SERIES * DIM) + series * DIM)[:, None] + columns[None, :]
        gates = tl.where(keep[:, None], gates + tl.load(bias, mask=mask, other=0.0), float("-inf"))
        above = tl.maximum(most, tl.max(gates, 0))
        shift = tl.where(above == float("-inf"), 0.0, above)
        weights, decay = tl.exp(gates - shift[None, :]), tl.exp(most - shift)
        total = total * decay + tl.sum(weights, 0)
        pooled = pooled * decay + tl.sum(weights * values, 0)
        most = above
    pooled /= total
    pooled *= 1.0 / tl.sqrt(tl.sum(tl.where(columns < DIM, pooled * pooled, 0.0), 0) / DIM + eps)
    pooled *= tl.load(weight_ptr + columns, mask=columns < DIM, other=0.0)
    evens, odds = tl.split(tl.reshape(pooled, [DIM_P2 // 2, 2]))
    even = 2 * tl.arange(0, DIM_P2 // 2)
    is_turned = (even >= DIM - 2 * HALF) & (even < DIM)
    frequencies = tl.load(frequency_ptr + (even - (DIM - 2 * HALF)) // 2, mask=is_turned, other=0.0)
    cos, sin = _cos_sin((length - RATE).to(tl.float32) * frequencies)
    cos, sin = tl.where(is_turned, cos * factor, 1.0), tl.where(is_turned, sin * factor, 0.0)
    target = cache_ptr + slot * cache_slot + ENTRY + even
    element = cache_ptr.dtype.element_ty
    tl.store(target, (evens * cos - odds * sin).to(element), mask=even < DIM)
    tl.store(target + 1, (odds * cos + evens * sin).to(element), mask=even < DIM)


def make_entries(cache: Tensor, entries: Entries, slot_mapping: Tensor, pages: RowPages) -> None:
    """Write the entries that the rows of a step end, once their C and Z are in cache [slots, columns]; see the module.

    The entry of positions p - M + 1 .. p goes to the slot of row p. Raises TypeError or ValueError for tensors that do
    not fit.
    """
    rows, dim = slot_mapping.shape[0], entries.dim
    check_float("cache", cache, (None, None))
    check_ids("slot_mapping", slot_mapping, rows)
    check_ids("seq_ids", pages.seq_ids, rows)
    check_ids("kv_lens", pages.kv_lens, rows)
    check_float("bias", entries.bias, (entries.rate, entries.series * dim))
    if dim % 2 or entries.values + 2 * entries.series * dim > cache.shape[1]:
        raise ValueError(f"a cache of {cache.shape[1]} columns has no room for entries of {dim} and what makes them")
    if rows:
        block = min(8, power_of_two(entries.series * entries.rate))
        _entry_kernel[(rows,)](
            cache, slot_mapping, pages.block_table, pages.seq_ids, pages.kv_lens, entries.bias, entries.weight,
            entries.frequencies, cache.stride(0), pages.block_table.stride(0), pages.page_size, cache.shape[0],
            float(entries.eps), float(entries.factor), RATE=entries.rate, SERIES=entries.series, ENTRY=entries.entry,
            VALUES=entries.values, DIM=dim, DIM_P2=power_of_two(dim), HALF=entries.frequencies.shape[0], BLOCK=block,
            num_warps=min(8, max(1, dim * block // 512)),
        )  # fmt: skip


@jit(
    do_not_specialize=["table_row", "page_size", "width", "most", "chosen_row"],
    do_not_specialize_on_alignment=["seq_ptr", "len_ptr", "table_ptr", "chosen_ptr"],
)
def _attended_kernel(
    table_ptr, seq_ptr, len_ptr, chosen_ptr, out_ptr, count_ptr, table_row, page_size, chosen_row, width, most,
    RATE: tl.constexpr, UNITS: tl.constexpr, WINDOW: tl.constexpr, HAS_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, cdiv(width, BLOCK)): some numbers of a row. RATE: 0 for a window alone."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(len_ptr + row).to(tl.int32)
    table = table_ptr + tl.load(seq_ptr + row).to(tl.int64) * table_row
    num_entries = 0
    if RATE > 0:
        num_entries = tl.minimum(length // RATE, most)
    count = num_entries + tl.minimum(length, WINDOW)
    is_entry, is_token = at < num_entries, (at >= num_entries) & (at < count)
    found = _slots_of(table, length + at - count, page_size, is_token) * UNITS
    if RATE > 0:
        if HAS_CHOSEN:
            slots = tl.load(chosen_ptr + row * chosen_row + at, mask=is_entry, other=0).to(tl.int64) * RATE + RATE - 1
        else:
            slots = _slots_of(table, (at + 1) * RATE - 1, page_size, is_entry)
        found = tl.where(is_entry, slots * UNITS + 1, found)
    found = tl.where(is_entry | is_token, found, 0)
    tl.store(out_ptr + row * width + at, found.to(tl.int32), mask=at < width)
    if tile == 0:
        tl.store(count_ptr + row, count)


def attended(
    pages: RowPages,
    window: int,
    units: int,
    width: int,
    *,
    rate: int = 0,
    most: int = 0,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what T rows attend to: int32 [T, width] numbers of parts of the cache, and int32 [T], how many of them
    count.

    A slot of the cache has `units` parts of D columns: part 0 is its key, part 1 its entry. A row sees entries first,
    at most `most` of them, then the tokens of its window. rate: M; 0 for rows that see no entries. chosen: int32
    [T, K], which ones, in ascending order, as numbers of runs of M slots, where K is `most` or all that the table has
    room for; None: all of them. width: at least most + window.
    """
    rows = pages.seq_ids.shape[0]
    check_ids("seq_ids", pages.seq_ids, rows)
    check_ids("kv_lens", pages.kv_lens, rows)
    if chosen is not None and (chosen.dtype != torch.int32 or chosen.shape[0] != rows or chosen.stride(1) != 1):
        raise TypeError(f"chosen must be int32 [{rows}, entries] with contiguous rows, got {chosen.dtype}")
    device = pages.block_table.device
    out = torch.empty(rows, width, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        _attended_kernel[(rows, -(-width // _LISTED))](
            pages.block_table, pages.seq_ids, pages.kv_lens, chosen, out, counts, pages.block_table.stride(0),
            pages.page_size, 0 if chosen is None else chosen.stride(0), width, most, RATE=rate, UNITS=units,
            WINDOW=window, HAS_CHOSEN=chosen is not None, BLOCK=_LISTED, num_warps=4,
        )  # fmt: skip
    return out, counts
