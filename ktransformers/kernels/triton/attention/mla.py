"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over a paged cache on the GPU, up-projections absorbed.

The kernels are those of `attention`; a cached row is key and value at once and is read once: a value is the first
`rank` columns of its key. All query heads share it, so a tile holds up to 64 of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.triton.attention.launch import AttentionLaunch, run

__all__ = ["mla_attention"]


def mla_attention(call: AttentionCall, *, out: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
    """Compute causal attention of T rows of absorbed queries over a latent cache; returns [T, Hq, rank].

    call: of queries [T, Hq, rank + rope], k_cache [slots, 1, rank + rope], see `rope.latent_to_cache`, and v_cache, its
    first `rank` columns. rank must be a power of two of at least 16 (512 in every model known); rope may be 0. Scales
    of keys, of a cache of codes: fp32 [slots, 1, 2], for latents and what is rotated; those of values are not read.
    out: [T, Hq, rank], made like q when None. workspace: fp32 of `workspace_numel` for one KV head. The two kernels and
    the errors as in `attention.attention`.
    """
    q, cache, rank = call.q, call.k_cache, call.v_cache.shape[-1]
    if rank < 16 or rank & (rank - 1) or rank > q.shape[-1] or 2 * rank <= q.shape[-1]:
        raise ValueError(f"rank must be the largest power of two within the {q.shape[-1]} columns of q, got {rank}")
    if cache.dim() != 3 or cache.shape[1] != 1:
        raise ValueError(f"cache must have shape [slots, 1, {q.shape[-1]}], got {list(cache.shape)}")
    if call.v_cache.data_ptr() != cache.data_ptr() or call.is_chunked:
        raise ValueError("latent attention takes the first columns of k_cache for v_cache, and no chunks")
    result = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device) if out is None else out
    return run(AttentionLaunch(call, result, is_shared=True), workspace)
