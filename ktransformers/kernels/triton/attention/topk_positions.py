"""Chooses the cached positions that a row attends to, where an indexer scores them (`cpu.select_topk_positions`).

Scores are a kernel's, for all positions that a block table has room for, so that launches do not depend on lengths; the
choice is torch's top-k of whole numbers in which ties are broken already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import RowPages, TopkCall
from ktransformers.kernels.triton.attention.launch import compute_type
from ktransformers.kernels.triton.attention.rope import check_ids
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = ["select_topk_positions"]

_MAX_SCORES = 1 << 26
"""Scores that are kept at a time, but for one row's at least."""
_BLOCK_N = 64


@jit
def _score_kernel(
    q_ptr, weight_ptr, k_ptr, table_ptr, seq_ptr, len_ptr, out_ptr,
    q_row, q_head, weight_row, k_slot, table_row, out_row, page_size, scale,
    NUM_HEADS: tl.constexpr, HEADS_P2: tl.constexpr, DIM: tl.constexpr, DIM_P2: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_SUMMED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, cdiv(positions, BLOCK_N)): scores of some positions of a row, -inf beyond its length."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    heads, columns = tl.arange(0, HEADS_P2), tl.arange(0, DIM_P2)
    length = tl.load(len_ptr + row)
    is_seen = positions < length
    table = table_ptr + tl.load(seq_ptr + row).to(tl.int64) * table_row
    pages = tl.load(table + positions // page_size, mask=is_seen, other=0).to(tl.int64)
    slots = pages * page_size + positions % page_size
    q_mask = (heads < NUM_HEADS)[:, None] & (columns < DIM)[None, :]
    q = tl.load(q_ptr + row * q_row + heads[:, None] * q_head + columns[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    k_mask = is_seen[:, None] & (columns < DIM)[None, :]
    k = tl.load(k_ptr + slots[:, None] * k_slot + columns[None, :], mask=k_mask, other=0.0).to(COMPUTE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
    if IS_SUMMED:
        weights = tl.load(weight_ptr + row * weight_row + heads, mask=heads < NUM_HEADS, other=0.0)
        total = tl.sum(tl.maximum(scores, 0.0) * weights[:, None], 0)
        tl.store(out_ptr + row * out_row + positions, tl.where(is_seen, total, float("-inf")))
    else:
        to = out_ptr + (row * NUM_HEADS + heads[:, None]) * out_row + positions[None, :]
        kept = tl.where(is_seen[None, :], scores, float("-inf"))
        tl.store(to, kept, mask=(heads < NUM_HEADS)[:, None])


def _scores(call: TopkCall) -> Tensor:
    """fp32 [T, N], or [T * H, N] of heads apart; N: what a row of the table has room for, and a tile's rest."""
    q, weights, k_cache, pages = call.q, call.weights, call.k_cache, call.pages
    num_rows, num_heads, dim = q.shape
    tiles = -(-pages.room // _BLOCK_N)
    out = torch.empty(num_rows * call.choices_per_row, tiles * _BLOCK_N, dtype=torch.float32, device=q.device)
    _score_kernel[(num_rows, tiles)](
        q, q if weights is None else weights, k_cache, pages.block_table, pages.seq_ids, pages.kv_lens, out,
        q.stride(0), q.stride(1), 0 if weights is None else weights.stride(0), k_cache.stride(0),
        pages.block_table.stride(0), out.stride(0), pages.page_size, float(call.scale),
        NUM_HEADS=num_heads, HEADS_P2=max(power_of_two(num_heads), 16), DIM=dim, DIM_P2=max(power_of_two(dim), 16),
        BLOCK_N=_BLOCK_N, IS_SUMMED=weights is not None,
        COMPUTE=compute_type(k_cache.dtype),
    )  # fmt: skip
    return out


def _best(scores: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Numbers of the best columns, ascending, int64 [R, K], and which of them exist: have a score above -inf.

    Those that do not exist come last.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0 is 0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    columns = torch.arange(scores.shape[1], device=scores.device)
    ranks = (ascending << 32) | (0x7FFFFFFF - columns)
    best = 0x7FFFFFFF - (ranks.topk(min(num_chosen, scores.shape[1]), dim=-1).values & 0xFFFFFFFF)
    exists = scores.gather(1, best) > float("-inf")
    best = torch.where(exists, best, scores.shape[1]).sort(dim=-1).values
    return best, best < scores.shape[1]


def select_topk_positions(call: TopkCall) -> tuple[Tensor, Tensor]:
    """Choose the best positions of T rows: slots int32 [n, K] and counts int32 [n], as `cpu.select_topk_positions`.

    Queries and keys are of one type, fp16, bf16 or fp32; weights: fp32 [T, H]. K is smaller where the block table has
    room for fewer positions. Nothing is read back to the host, and the same kernels are launched whatever the lengths.
    """
    q, k_cache, pages = call.q, call.k_cache, call.pages
    num_rows, _, dim = q.shape
    check_float("q", q, (None, None, None))
    check_float("k_cache", k_cache, (None, dim))
    check_ids("seq_ids", pages.seq_ids, num_rows)
    check_ids("kv_lens", pages.kv_lens, num_rows)
    if q.dtype != k_cache.dtype or q.stride(2) != 1:
        raise TypeError(f"q is {q.dtype} with strides {q.stride()} and k_cache {k_cache.dtype}: they must be alike")
    width = -(-pages.room // _BLOCK_N) * _BLOCK_N
    step = max(_MAX_SCORES // (width * call.choices_per_row), 1)
    found = [_chosen(call.of(slice(first, first + step))) for first in range(0, max(num_rows, 1), step)]
    return torch.cat([slots for slots, _ in found]), torch.cat([counts for _, counts in found])


def _chosen(call: TopkCall) -> tuple[Tensor, Tensor]:
    """The slots and counts of as many rows as are scored at a time."""
    scores, pages = _scores(call), call.pages
    seqs, lens = (ids.repeat_interleave(call.choices_per_row) for ids in (pages.seq_ids, pages.kv_lens))
    choices = RowPages(pages.block_table, pages.page_size, seqs, lens)
    return _slots(_positions(scores, lens, call), choices)


def _positions(scores: Tensor, kv_lens: Tensor, call: TopkCall) -> Tensor:
    """Of the chosen blocks, ascending: int64 [R, K]; those that a row does not see come last."""
    block = call.block
    if block > 1:
        spare = -scores.shape[1] % block
        scores = torch.nn.functional.pad(scores, (0, spare), value=float("-inf"))
        scores = scores.view(len(scores), -1, block).amax(-1)
        numbers = torch.arange(scores.shape[1], device=scores.device)
        last = ((kv_lens.long() - 1) // block)[:, None]
        is_local = (numbers > last - call.num_local) & (numbers <= last)
        scores = scores.masked_fill(is_local, float("inf"))
    best, _ = _best(scores, call.num_chosen)
    inside = torch.arange(block, device=scores.device)
    return (best[..., None] * block + inside).flatten(1)


def _slots(positions: Tensor, pages: RowPages) -> tuple[Tensor, Tensor]:
    is_seen = positions < pages.kv_lens.long()[:, None]
    known = torch.where(is_seen, positions, 0)
    found = pages.block_table[pages.seq_ids.long()].gather(1, known // pages.page_size)
    slots = found * pages.page_size + (known % pages.page_size).to(torch.int32)
    return slots.to(torch.int32), is_seen.sum(1, dtype=torch.int32)
