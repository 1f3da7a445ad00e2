"""Chooses the cached positions that a row attends to, where an indexer scores them."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor
from ktransformers.kernels.cpu.paged_attention import row_numbers
from ktransformers.kernels.extension import extension

__all__ = ["MAX_INDEX_HEADS", "select_topk_positions"]

MAX_INDEX_HEADS = extension.MAX_INDEX_HEADS


def select_topk_positions(  # noqa: PLR0913 - what a call of the kernel takes; the rest is by keyword
    q: Tensor,
    weights: Tensor | None,
    k_cache: Tensor,
    block_table: Tensor,
    page_size: int,
    seq_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    num_chosen: int,
    pool: WorkerPool,
    *,
    block: int = 1,
    num_local: int = 0,
) -> tuple[Tensor, Tensor]:
    """Choose the best positions of T rows: slots int32 [T, num_chosen * block] and counts int32 [T].

    q: [T, H, D], up to MAX_INDEX_HEADS heads. k_cache: [slots, D], any slot stride. A position's score is
    sum_h weights[t, h] * max(scale * q[t, h] . k, 0) with weights [T, H]; with None each head chooses for itself, by
    scale * q . k, and there are T * H rows of slots, the heads of a row side by side. The others as in `attention`.
    Chosen are the num_chosen blocks of `block` positions whose best position scores highest, the lower ones where
    scores are equal, and the last num_local blocks that a row sees in any case; no position that a row does not see.
    Slots are in the order of positions: `attention` takes them as a block table for pages of one position.
    Raises ValueError when a page that a row sees lies outside the cache or the table.
    """
    check_tensor("q", q, (None, None, None))
    num_rows, num_heads, dim = q.shape
    if weights is not None:
        check_tensor("weights", weights, (num_rows, num_heads))
    if k_cache.dtype != torch.float32 or k_cache.dim() != 2 or k_cache.shape[1] != dim or k_cache.device.type != "cpu":
        raise ValueError(f"k_cache must be fp32 [slots, {dim}] on the CPU, got {k_cache.dtype} {list(k_cache.shape)}")
    if k_cache.stride(1) != 1:
        raise ValueError(f"the last dimension of k_cache must be contiguous, got strides {k_cache.stride()}")
    check_tensor("block_table", block_table, (None, None), torch.int32)
    if page_size < 1 or num_chosen < 1 or block < 1 or not 0 <= num_local <= num_chosen:
        raise ValueError(
            f"page_size {page_size}, num_chosen {num_chosen} and block {block} must be >= 1, and num_local {num_local} "
            "at most num_chosen"
        )
    seqs, lens = row_numbers("seq_ids", seq_ids, num_rows), row_numbers("kv_lens", kv_lens, num_rows)
    choices = num_rows if weights is not None else num_rows * num_heads
    slots = torch.empty(choices, num_chosen * block, dtype=torch.int32)
    counts = torch.empty(choices, dtype=torch.int32)
    extension.choose_positions(
        pool.handle,
        q.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        k_cache.data_ptr(),
        (num_rows, num_heads, dim, k_cache.shape[0], k_cache.stride(0)),
        block_table.data_ptr(),
        (block_table.shape[0], block_table.shape[1], block_table.stride(0), page_size),
        seqs.data_ptr(),
        lens.data_ptr(),
        float(scale),
        (num_chosen, block, num_local),
        slots.data_ptr(),
        counts.data_ptr(),
    )
    return slots, counts
