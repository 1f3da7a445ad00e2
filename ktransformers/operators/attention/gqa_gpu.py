"""Grouped-query attention on a GPU: projections in one launch, norms, rotation and cache write in one, attention, gate.

Knows what was recognized, and kernels; no modules but the one it stands in for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ktransformers.cache.paged import Scales
from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.triton.attention.paged import attention
from ktransformers.kernels.triton.attention.rope import HeadNorms, KvSlots, Rotation, rope_to_cache
from ktransformers.kernels.triton.common.elementwise import gate_heads, rms_norm
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.attention.pictures import attend_pictures
from ktransformers.operators.base import layer_number
from ktransformers.operators.context import ForwardContext, LayerCache
from ktransformers.operators.device import Device, use
from ktransformers.operators.linear.joined import JoinedLinears
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recognize.attention import GqaSpec, NormPlace

__all__ = ["GpuCache", "GqaParts", "gqa_forward"]


@dataclass(frozen=True, slots=True)
class GpuCache:
    """Cache of one layer on a GPU: keys and values [slots, Hkv, D], their scales where they are codes, and the type of
    queries.

    quantized_attention: prefill steps round queries to codes too.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales
    row_dtype: torch.dtype
    quantized_attention: bool

    @classmethod
    def of(cls, cache: LayerCache, layer_idx: int) -> GpuCache:
        """Return the cache of layer `layer_idx`."""
        keys, values = cache.layer(layer_idx)
        shape = cache.shape(layer_idx)
        row_dtype = shape.row_dtype if shape.is_scaled else keys.dtype
        return cls(keys, values, cache.scales(layer_idx), row_dtype, shape.kept_products)


@dataclass(frozen=True, slots=True)
class GqaParts:
    """Parts of a loaded attention module that its forward on a GPU uses.

    layer: its number in the model. projections: q, k and v. norm_weights: of queries and keys, where spec has norms,
    with its offset. sinks: fp32 [heads]. flash: what attends in prefill steps, None for Triton's kernels.
    """

    spec: GqaSpec
    layer_idx: int
    layer: int
    projections: JoinedLinears
    o_proj: nn.Module
    norm_weights: tuple[torch.Tensor, ...]
    sinks: torch.Tensor | None
    device: Device
    flash: FlashLayer | None

    @classmethod
    def of(cls, module: nn.Module, spec: GqaSpec, device: Device, flash: FlashLayer | None) -> GqaParts:
        """Take the parts of a module that `recognize_attention` found to be `spec`, its projections loaded."""
        projections = JoinedLinears([module.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")])
        norms = () if spec.norms is None else spec.norms.names
        return cls(
            spec,
            int(module.layer_idx),  # type: ignore[arg-type]
            layer_number(module),
            projections,
            module.get_submodule("o_proj"),
            tuple(_norm_weight(module.get_submodule(name), spec) for name in norms),
            module.get_parameter("sinks").float() if spec.has_sinks else None,
            device,
            flash,
        )


def _norm_weight(norm: nn.Module, spec: GqaSpec) -> torch.Tensor:
    """What a norm of queries or keys multiplies with."""
    weight = norm.get_parameter("weight")
    if spec.norms is None or not spec.norms.offset or isinstance(norm, KRMSNorm):  # which has added it
        return weight
    return weight + spec.norms.offset


def gqa_forward(
    parts: GqaParts,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    context: ForwardContext,
) -> torch.Tensor:
    """Compute the module's attention of [1, T, hidden] on its GPU; cos and sin are [1, T, P], of any float type."""
    cache = GpuCache.of(context.cache, parts.layer_idx)
    here, spec = context.on(cache.keys.device), parts.spec
    parts.device.time_part("linear", parts.layer)
    q, k, v = parts.projections(hidden_states[0])
    gate = None
    if spec.has_gate:  # by head: a query, then its gate
        q, gate = q.view(len(q), spec.num_heads, -1).chunk(2, dim=-1)
    use(cache.keys.device)
    parts.device.time_part("attention")
    query = _to_cache(parts, (q, k, v), position_embeddings, cache, here.slot_mapping)
    sees_pictures = here.pictures is not None and here.pictures.ends is not None
    planned = None if parts.flash is None or sees_pictures else parts.flash.of(context)
    if planned is not None:
        out = planned(query, cache.keys, cache.values)
    else:
        call = AttentionCall(
            query,
            cache.keys,
            cache.values,
            here.pages,
            spec.scale,
            window=spec.window,
            sinks=parts.sinks,
            softcap=spec.softcap,
            scales=cache.scales,
        )
        counters, is_quantized = parts.device.counters(), cache.quantized_attention
        attend = partial(attention, counters=counters, quantized_attention=is_quantized)
        out = attend_pictures(call, here, attend)
    if gate is not None:
        gate_heads(out, gate, out=out)
    parts.device.time_part("linear")
    output: torch.Tensor = parts.o_proj(out.view(1, out.shape[0], -1))
    return output


def _to_cache(
    parts: GqaParts,
    flat: tuple[torch.Tensor, ...],
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: GpuCache,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Write keys and values, normalized and rotated, to their slots; returns such queries [T, heads, D].

    flat: queries, keys and values [T, heads D]; queries may be [T, heads, D].
    """
    spec, weights, eps = parts.spec, parts.norm_weights, 0.0
    place = None
    if spec.norms is not None:
        place, eps = spec.norms.place, spec.norms.eps
    if place is NormPlace.WHOLE:
        flat = (*(rms_norm(part, weight, eps) for part, weight in zip(flat, weights, strict=False)), flat[2])
        weights = ()
    widths = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (
        part if part.dim() == 3 else part.view(len(part), heads, -1) for part, heads in zip(flat, widths, strict=True)
    )
    cos, sin = (part[0, :, : spec.rotary_dim // 2] for part in position_embeddings)
    return rope_to_cache(
        (q, k, v),
        Rotation(cos, sin, spec.is_interleaved, rotary_dim=spec.rotary_dim),
        KvSlots(cache.keys, cache.values, slots, cache.scales),
        HeadNorms(weights[0], weights[1], eps, is_behind=place is NormPlace.ROTATED) if weights else None,
        q_out=torch.empty(q.shape, dtype=cache.row_dtype, device=cache.keys.device),
    )
