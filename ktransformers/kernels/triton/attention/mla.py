"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over a paged cache on the GPU, up-projections absorbed.

The kernels are those of `attention`; a cached row is key and value at once and is read once: a value is the first
`rank` columns of its key. All query heads share it, so a tile holds up to 64 of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.attention.launch import (
    DECODE_ROWS,
    AttentionLaunch,
    check_call,
    launch_decode,
    launch_prefill,
)

__all__ = ["mla_attention"]


def mla_attention(
    q: Tensor,
    cache: Tensor,
    rank: int,
    block_table: Tensor,
    page_size: int,
    seq_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of T rows of absorbed queries over a latent cache; returns [T, Hq, rank].

    q: [T, Hq, rank + rope]. cache: [slots, 1, rank + rope]; see `rope.latent_to_cache`. out: [T, Hq, rank], made like q
    when None. rank must be a power of two of at least 16 (512 in every model known); rope may be 0. workspace:
    fp32 of `workspace_numel` for one KV head. scales: of a cache of codes, fp32 [slots, 1, 2], for latents and what is
    rotated. The others, the two kernels and the errors as in `attention.attention`.
    """
    if rank < 16 or rank & (rank - 1) or rank > q.shape[-1] or 2 * rank <= q.shape[-1]:
        raise ValueError(f"rank must be the largest power of two within the {q.shape[-1]} columns of q, got {rank}")
    if cache.dim() != 3 or cache.shape[1] != 1:
        raise ValueError(f"cache must have shape [slots, 1, {q.shape[-1]}], got {list(cache.shape)}")
    result = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device) if out is None else out
    call = AttentionLaunch(
        q, cache, cache[..., :rank], block_table, page_size, seq_ids, kv_lens, scale, result,
        window=window, sinks=sinks, softcap=float(softcap), is_shared=True, scales=(scales, None),
    )  # fmt: skip
    check_call(call)
    if q.shape[0] == 0:
        return result
    if q.shape[0] <= max(DECODE_ROWS, block_table.shape[0]):
        launch_decode(call, workspace)
    else:
        launch_prefill(call)
    return result
