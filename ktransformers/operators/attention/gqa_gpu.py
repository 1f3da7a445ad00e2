"""Grouped-query attention on a GPU: projections in one launch, norms, rotation and cache write in one, then attention.

Knows what gqa_spec found, and kernels; no modules but the one it stands in for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ktransformers.kernels.triton.attention import attention
from ktransformers.kernels.triton.elementwise import rms_norm
from ktransformers.kernels.triton.rope import rope_to_cache
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.attention.gqa_spec import GqaSpec, NormPlace
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, use
from ktransformers.operators.linear.joined import JoinedLinears

__all__ = ["GqaLayer", "gqa_forward"]


@dataclass(frozen=True, slots=True)
class GqaLayer:
    """An attention module and what computes it on its GPU.

    projections: its q_proj, k_proj and v_proj. sinks: its own, fp32 [heads]. flash: what attends in prefill steps, None
    for Triton's kernels.
    """

    module: Any
    spec: GqaSpec
    device: Device
    projections: JoinedLinears
    sinks: torch.Tensor | None = None
    flash: FlashLayer | None = None


def gqa_forward(
    layer: GqaLayer,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    context: ForwardContext,
) -> torch.Tensor:
    """The layer's attention of [1, T, hidden] on its GPU; cos and sin are [1, T, P], of any float type."""
    module, spec = layer.module, layer.spec
    keys, values = context.cache.layer(module.layer_idx)
    here = context.on(keys.device)
    flat = layer.projections(hidden_states[0])
    use(keys.device)
    query = _to_cache(module, spec, tuple(flat), position_embeddings, (keys, values), here.slot_mapping)
    attend = None if layer.flash is None else layer.flash.of(context)
    if attend is not None:
        out = attend(query, keys, values)
    else:
        out = attention(
            query,
            keys,
            values,
            here.block_table,
            here.page_size,
            here.seq_ids,
            here.kv_lens,
            spec.scale,
            window=spec.window,
            sinks=layer.sinks,
            softcap=spec.softcap,
            counters=layer.device.counters(),
        )
    output: torch.Tensor = module.o_proj(out.view(1, out.shape[0], -1))
    return output


def _to_cache(
    module: Any,
    spec: GqaSpec,
    flat: tuple[torch.Tensor, ...],
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Write keys and values, normalized and rotated, to their slots; returns such queries [T, heads, D]."""
    weights = None if spec.norms is None else [getattr(module, name).weight for name in spec.norms.names]
    eps = 0.0 if spec.norms is None else spec.norms.eps
    if weights is not None and spec.norms is not None and spec.norms.place is NormPlace.WHOLE:
        flat = (*(rms_norm(part, weight, eps) for part, weight in zip(flat, weights, strict=False)), flat[2])
        weights = None
    widths = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (part.view(len(part), heads, -1) for part, heads in zip(flat, widths, strict=True))
    cos, sin = (part[0, :, : spec.rotary_dim // 2] for part in position_embeddings)
    return rope_to_cache(
        q,
        k,
        v,
        cos,
        sin,
        *cache,
        slots,
        rotary_dim=spec.rotary_dim,
        is_interleaved=spec.is_interleaved,
        norm_weights=None if weights is None else (weights[0], weights[1]),
        eps=eps,
        norms_rotated=spec.norms is not None and spec.norms.place is NormPlace.ROTATED,
        q_out=torch.empty(q.shape, dtype=cache[0].dtype, device=cache[0].device),
    )
