"""Writes rows of an indexer's cache, and makes entries of pools of neighbouring positions of them. Knows slots.

    T rows, M positions of a pool, D columns of an entry; pool w has the positions w M .. w M + M - 1

`rows_to_cache` writes rows to their slots; `pooled` sums up the pools that rows end, from the cache: a cached row is
the position's key [D] and, where keys are weighted, its gates [D]; `expanded` makes positions of chosen pools. Launches
depend on the number of rows alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import RowPages
from ktransformers.kernels.triton.attention.rope import check_ids, is_cached
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = ["expanded", "pooled", "rows_to_cache"]

_BLOCK = 256  # slots of a program


@jit
def _write_kernel(
    row_ptr, cache_ptr, slot_ptr, len_ptr, row_stride, cache_slot, num_slots,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): one row, where its length is a multiple of EVERY."""
    row = tl.program_id(0).to(tl.int64)
    slot, columns = tl.load(slot_ptr + row).to(tl.int64), tl.arange(0, BLOCK)
    is_written = is_cached(slot, num_slots) & (tl.load(len_ptr + row) % EVERY == 0)
    mask = (columns < WIDTH) & is_written
    values = tl.load(row_ptr + row * row_stride + columns, mask=mask, other=0.0)
    tl.store(cache_ptr + slot * cache_slot + columns, values.to(cache_ptr.dtype.element_ty), mask=mask)


def rows_to_cache(rows: Tensor, cache: Tensor, slot_mapping: Tensor, kv_lens: Tensor, every: int = 1) -> None:
    """Write rows [T, W] to the first W columns of their slots in cache [slots, >= W].

    slot_mapping: int32 or int64 [T], negative for rows to leave out, as are those whose kv_lens (int32 [T]) is no
    multiple of `every`.
    """
    check_float("rows", rows, (None, None))
    check_float("cache", cache, (None, None))
    check_ids("slot_mapping", slot_mapping, len(rows))
    check_ids("kv_lens", kv_lens, len(rows))
    width = rows.shape[1]
    if width > cache.shape[1]:
        raise ValueError(f"rows of {width} columns do not fit a cache of {cache.shape[1]}")
    if len(rows):
        _write_kernel[(len(rows),)](
            rows, cache, slot_mapping, kv_lens, rows.stride(0), cache.stride(0), cache.shape[0],
            WIDTH=width, BLOCK=power_of_two(width), EVERY=every,
        )  # fmt: skip


@jit
def _slot(table, position, page_size, is_read):
    page = tl.load(table + position // page_size, mask=is_read, other=0).to(tl.int64)
    return page * page_size + position % page_size


@jit
def _pool_kernel(
    cache_ptr, bias_ptr, table_ptr, seq_ptr, len_ptr, out_ptr, cache_slot, table_row, out_row, page_size,
    DIM: tl.constexpr, DIM_P2: tl.constexpr, SIZE: tl.constexpr, HAS_GATES: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the pool that a row ends, zeros where it ends none. Gates are gone over twice, for the largest."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(len_ptr + row)
    is_end = (length > 0) & (length % SIZE == 0)
    columns = tl.arange(0, DIM_P2)
    mask = (columns < DIM) & is_end
    table = table_ptr + tl.load(seq_ptr + row).to(tl.int64) * table_row
    total = tl.zeros([DIM_P2], tl.float32)
    weights = tl.zeros([DIM_P2], tl.float32)
    most = tl.full([DIM_P2], float("-inf"), tl.float32)
    if HAS_GATES:
        for index in range(SIZE):
            source = cache_ptr + _slot(table, length - SIZE + index, page_size, is_end) * cache_slot + columns
            gate = tl.load(source + DIM, mask=mask, other=0.0).to(tl.float32)
            gate += tl.load(bias_ptr + index * DIM + columns, mask=mask, other=0.0).to(tl.float32)
            most = tl.maximum(most, gate)
    for index in range(SIZE):
        source = cache_ptr + _slot(table, length - SIZE + index, page_size, is_end) * cache_slot + columns
        key = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        weight = tl.full([DIM_P2], 1.0, tl.float32)
        if HAS_GATES:
            gate = tl.load(source + DIM, mask=mask, other=0.0).to(tl.float32)
            gate += tl.load(bias_ptr + index * DIM + columns, mask=mask, other=0.0).to(tl.float32)
            weight = tl.exp(gate - most)
        weights += weight
        total += weight * key
    tl.store(out_ptr + row * out_row + columns, total / weights, mask=columns < DIM)


def pooled(cache: Tensor, bias: Tensor | None, pages: RowPages, dim: int, size: int) -> Tensor:
    """Compute the entry, fp32 [T, D], of the pool of `size` positions that ends with each row; zeros for rows that end
    none.

    cache: [slots, D] or, with gates, [slots, 2 D]; bias: [size, D], added to gates; None for the mean of keys.
    """
    num_rows = len(pages.kv_lens)
    check_float("cache", cache, (None, dim if bias is None else 2 * dim))
    if bias is not None:
        check_float("bias", bias, (size, dim))
    check_ids("seq_ids", pages.seq_ids, num_rows)
    check_ids("kv_lens", pages.kv_lens, num_rows)
    out = torch.empty(num_rows, dim, dtype=torch.float32, device=cache.device)
    if num_rows:
        _pool_kernel[(num_rows,)](
            cache, cache if bias is None else bias, pages.block_table, pages.seq_ids, pages.kv_lens, out,
            cache.stride(0), pages.block_table.stride(0), out.stride(0), pages.page_size,
            DIM=dim, DIM_P2=power_of_two(dim), SIZE=size, HAS_GATES=bias is not None,
        )  # fmt: skip
    return out


@jit
def _expand_kernel(
    chosen_ptr, num_ptr, table_ptr, seq_ptr, len_ptr, out_ptr, count_ptr, chosen_row, table_row, out_row, page_size,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, cdiv(WIDTH, BLOCK)): some slots of a row: those of chosen pools, then those behind the last one."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    of_pools, length = tl.load(num_ptr + row) * SIZE, tl.load(len_ptr + row)
    ends = tl.load(chosen_ptr + row * chosen_row + at // SIZE, mask=mask & (at < of_pools), other=0)
    first = length // SIZE * SIZE
    position = tl.minimum(first + tl.maximum(at - of_pools, 0), tl.maximum(length - 1, 0))
    table = table_ptr + tl.load(seq_ptr + row).to(tl.int64) * table_row
    behind = _slot(table, position, page_size, mask & (at >= of_pools)).to(tl.int32)
    slots = tl.where(at < of_pools, ends + at % SIZE - (SIZE - 1), behind)
    tl.store(out_ptr + row * out_row + at, slots, mask=mask)
    if tile == 0:
        tl.store(count_ptr + row, of_pools + length - first)


def expanded(chosen: Tensor, num_chosen: Tensor, pages: RowPages, size: int) -> tuple[Tensor, Tensor]:
    """Return the slots of chosen pools' positions, and of those behind a row's last whole pool: int32 [T, K size + size
    - 1], of which the first int32 [T] are in use; the others are slots that exist.

    chosen: int32 [T, K], slots of pools' last positions, the first num_chosen, int32 [T], of each row in use.
    """
    num_rows, most = chosen.shape
    check_ids("num_chosen", num_chosen, num_rows)
    check_ids("seq_ids", pages.seq_ids, num_rows)
    check_ids("kv_lens", pages.kv_lens, num_rows)
    width = most * size + size - 1
    slots = torch.empty(num_rows, width, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=chosen.device)
    if num_rows:
        _expand_kernel[(num_rows, -(-width // _BLOCK))](
            chosen, num_chosen, pages.block_table, pages.seq_ids, pages.kv_lens, slots, counts,
            chosen.stride(0), pages.block_table.stride(0), slots.stride(0), pages.page_size,
            SIZE=size, WIDTH=width, BLOCK=_BLOCK, num_warps=2,
        )  # fmt: skip
    return slots, counts
