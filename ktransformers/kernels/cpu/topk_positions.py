"""Chooses the cached positions that a row attends to, where an indexer scores them."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import TopkCall
from ktransformers.kernels.cpu.base import WorkerPool, check_tensor
from ktransformers.kernels.cpu.paged_attention import row_numbers
from ktransformers.kernels.extension import extension
from ktransformers.kernels.untraced import untraced

__all__ = ["MAX_INDEX_HEADS", "select_topk_positions"]

MAX_INDEX_HEADS = extension.MAX_INDEX_HEADS


@untraced
def select_topk_positions(call: TopkCall, pool: WorkerPool) -> tuple[Tensor, Tensor]:
    """Choose the best positions of T rows on the CPU: slots int32 [n, num_chosen * block] and counts int32 [n].

    n: T, or T * H where heads choose for themselves. Queries, of up to MAX_INDEX_HEADS heads, and keys are fp32.
    Slots are in the order of positions, the first counts[i] of a row in use: `attention` takes them as a block table
    for pages of one position. Raises ValueError when a page that a row sees lies outside the cache or the table.
    """
    q, weights, k_cache, pages = call.q, call.weights, call.k_cache, call.pages
    check_tensor("q", q, (None, None, None))
    num_rows, num_heads, dim = q.shape
    if weights is not None:
        check_tensor("weights", weights, (num_rows, num_heads))
    _check_keys(k_cache, dim)
    table = pages.block_table
    check_tensor("block_table", table, (None, None), torch.int32)
    _check_numbers(call)
    seqs, lens = row_numbers("seq_ids", pages.seq_ids, num_rows), row_numbers("kv_lens", pages.kv_lens, num_rows)
    choices = num_rows * call.choices_per_row
    slots = torch.empty(choices, call.num_chosen * call.block, dtype=torch.int32)
    counts = torch.empty(choices, dtype=torch.int32)
    extension.choose_positions(
        pool.handle,
        q.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        k_cache.data_ptr(),
        (num_rows, num_heads, dim, k_cache.shape[0], k_cache.stride(0)),
        table.data_ptr(),
        (table.shape[0], table.shape[1], table.stride(0), pages.page_size),
        seqs.data_ptr(),
        lens.data_ptr(),
        float(call.scale),
        (call.num_chosen, call.block, call.num_local),
        slots.data_ptr(),
        counts.data_ptr(),
    )
    return slots, counts


def _check_keys(k_cache: Tensor, dim: int) -> None:
    if k_cache.dtype != torch.float32 or k_cache.dim() != 2 or k_cache.shape[1] != dim or k_cache.device.type != "cpu":
        raise ValueError(f"k_cache must be fp32 [slots, {dim}] on the CPU, got {k_cache.dtype} {list(k_cache.shape)}")
    if k_cache.stride(1) != 1:
        raise ValueError(f"the last dimension of k_cache must be contiguous, got strides {k_cache.stride()}")


def _check_numbers(call: TopkCall) -> None:
    page_size, num_chosen, block, num_local = call.pages.page_size, call.num_chosen, call.block, call.num_local
    if page_size < 1 or num_chosen < 1 or block < 1 or not 0 <= num_local <= num_chosen:
        raise ValueError(
            f"page_size {page_size}, num_chosen {num_chosen} and block {block} must be >= 1, and num_local {num_local} "
            "at most num_chosen"
        )
