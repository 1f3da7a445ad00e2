"""Grouped-query attention on a GPU: projections in one launch, norms, rotation and cache write in one, then attention.

Which attention modules compute just that is found by asking them: a module's own forward runs on made-up projections,
with an attention function that records what it is given. Knows no family names.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktransformers.kernels.flashinfer import GqaShape
from ktransformers.kernels.triton.attention import attention
from ktransformers.kernels.triton.rope import rope_to_cache
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, use
from ktransformers.operators.flash import FlashLayer
from ktransformers.operators.gpu_joined import JoinedLinears
from ktransformers.operators.norm import computes_rms_norm, norm_epsilon

__all__ = ["GqaSpec", "gqa_forward", "recognize_gqa"]

_PROBE = "ktransformers_probe"
_ROWS = 3
_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_NORMS = frozenset({"q_norm", "k_norm"})


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """What a module's attention needs to know. eps: of the norms of query and key heads, None without them.

    has_sinks: whether each head has a sink, the module's parameter `sinks`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    window: int
    softcap: float
    eps: float | None
    has_sinks: bool = False

    def shape(self, dtype: torch.dtype) -> GqaShape | None:
        """Of its attention over a cache of `dtype`; None with sinks, which a GqaShape has not."""
        if self.has_sinks:
            return None
        return GqaShape(self.num_heads, self.num_kv_heads, self.head_dim, dtype, self.scale, self.window, self.softcap)


class _Fixed(nn.Module):
    """Returns the same whatever it is given."""

    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value


def _record(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    seen: dict[str, Any] = kwargs.pop("probe_record")
    seen.update(kwargs, query=query, key=key, value=value)
    seen["output"] = torch.randn(1, _ROWS, query.shape[1], value.shape[-1], generator=torch.Generator().manual_seed(3))
    return seen["output"], None


def recognize_gqa(module: Any) -> GqaSpec | None:
    """The spec with which `gqa_forward` equals `module`'s own forward, else None (gates, other norms or rotations)."""
    children = {name for name, child in module.named_children() if child is not None}
    head_dim = getattr(module, "head_dim", None)
    has_norms = children == _PROJECTIONS | _NORMS
    if not isinstance(head_dim, int) or not (children == _PROJECTIONS or has_norms):
        return None
    if has_norms and not all(_is_head_norm(module.get_submodule(name), head_dim) for name in _NORMS):
        return None
    eps = norm_epsilon(module.q_norm) if has_norms else None
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if not own <= {"sinks"} or (has_norms and eps != norm_epsilon(module.k_norm)):
        return None
    factor = (getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * factor)
    twin, parts = _twin(module, head_dim, has_norms)
    angles = torch.randn(_ROWS, rotary_dim // 2, generator=torch.Generator().manual_seed(1))
    seen = _probed(twin, parts, angles, eps)
    if seen is None:
        return None
    scale = seen.get("scaling")
    return GqaSpec(
        num_heads=seen["query"].shape[1],
        num_kv_heads=seen["key"].shape[1],
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=int(seen.get("sliding_window") or 0),
        softcap=float(seen.get("softcap") or 0.0),
        eps=eps,
        has_sinks=bool(own),
    )


def _probed(
    twin: Any, parts: dict[str, torch.Tensor], angles: torch.Tensor, eps: float | None
) -> dict[str, Any] | None:
    """What the twin hands to attention, if that is what `gqa_forward` computes. Some families give angles once, some
    twice, side by side."""
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE, _record)
    for copies in (2, 1):
        cos, sin = (torch.cat([part] * copies, dim=-1)[None] for part in (angles.cos(), angles.sin()))
        seen: dict[str, Any] = {}
        try:
            with torch.no_grad():
                output = twin(
                    torch.zeros(1, _ROWS, 8), position_embeddings=(cos, sin), attention_mask=None, probe_record=seen
                )[0]
        except Exception:  # noqa: BLE001 - any module of any family may be asked, and may refuse in any way
            continue
        if seen and _is_plain(seen, output, parts, angles, eps):
            return seen
    return None


def _is_head_norm(norm: nn.Module, head_dim: int) -> bool:
    """Whether it is the RMS norm of one head; some families normalize all heads at once."""
    return computes_rms_norm(norm) and getattr(norm, "weight", torch.empty(0)).shape == (head_dim,)


def _twin(module: Any, head_dim: int, has_norms: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """A copy of the module on made-up projections, and these: [T, heads, D], norm weights [D], sinks [heads]."""
    generator = torch.Generator().manual_seed(0)
    twin, parts = copy.copy(module), {}
    children: dict[str, nn.Module] = {"o_proj": nn.Identity()}
    for name in ("q_proj", "k_proj", "v_proj"):
        width = getattr(module, name).out_features
        value = torch.randn(1, _ROWS, width, generator=generator)
        children[name], parts[name] = _Fixed(value), value.view(_ROWS, -1, head_dim)
    for name in _NORMS if has_norms else ():
        norm: Any = copy.deepcopy(module.get_submodule(name)).to_empty(device="cpu")
        parts[name] = torch.rand(norm.weight.shape, generator=generator) + 0.5
        with torch.no_grad():
            norm.weight.copy_(parts[name])
        children[name] = norm
    if module._parameters.get("sinks") is not None:
        parts["sinks"] = torch.randn(parts["q_proj"].shape[1], generator=generator)
        twin.__dict__["_parameters"] = {"sinks": nn.Parameter(parts["sinks"], requires_grad=False)}
    twin.__dict__["_modules"] = children
    twin.config = copy.copy(module.config)
    twin.config._attn_implementation = _PROBE
    return twin, parts


def _is_plain(
    seen: dict[str, Any], output: Any, parts: dict[str, torch.Tensor], angles: torch.Tensor, eps: float | None
) -> bool:
    """Whether what the twin handed to attention, and made of its result, is what `gqa_forward` would."""
    known = {"query", "key", "value", "output", "scaling", "sliding_window", "softcap", "dropout", "is_causal"}
    sinks = seen.pop("s_aux", None)
    if (sinks is None) != ("sinks" not in parts) or (sinks is not None and not torch.equal(sinks, parts["sinks"])):
        return False
    if any(value is not None for name, value in seen.items() if name not in known) or seen.get("dropout"):
        return False
    want = {
        "query": _rotated(parts["q_proj"], parts.get("q_norm"), angles, eps),
        "key": _rotated(parts["k_proj"], parts.get("k_norm"), angles, eps),
        "value": parts["v_proj"],
    }
    for name, expected in want.items():
        got = seen[name][0].transpose(0, 1)
        if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-4, atol=1e-5):
            return False
    flat = seen["output"].reshape(1, _ROWS, -1)
    return isinstance(output, torch.Tensor) and output.shape == flat.shape and torch.equal(output, flat)


def _rotated(x: torch.Tensor, weight: torch.Tensor | None, angles: torch.Tensor, eps: float | None) -> torch.Tensor:
    """x [T, heads, D], normalized if there is a weight, its first columns rotated in the half layout."""
    if weight is not None and eps is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    half = angles.shape[-1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def gqa_forward(
    module: Any,
    spec: GqaSpec,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    context: ForwardContext,
    projections: JoinedLinears,
    device: Device,
    flash: FlashLayer | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The module's attention of [1, T, hidden] on a GPU; cos and sin are [1, T, P], of any float type.

    projections: the module's q_proj, k_proj and v_proj. flash: what attends in prefill steps, if not Triton's kernels.
    sinks: the module's, fp32 [heads].
    """
    keys, values = context.cache.layer(module.layer_idx)
    here = context.on(keys.device)
    flat = projections(hidden_states[0])
    widths = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (part.view(len(part), heads, -1) for part, heads in zip(flat, widths, strict=True))
    use(keys.device)
    cos, sin = (part[0, :, : spec.rotary_dim // 2] for part in position_embeddings)
    query = rope_to_cache(
        q,
        k,
        v,
        cos,
        sin,
        keys,
        values,
        here.slot_mapping,
        rotary_dim=spec.rotary_dim,
        norm_weights=None if spec.eps is None else (module.q_norm.weight, module.k_norm.weight),
        eps=spec.eps or 0.0,
        q_out=torch.empty(q.shape, dtype=keys.dtype, device=keys.device),
    )
    attend = None if flash is None else flash.of(context)
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
            sinks=sinks,
            softcap=spec.softcap,
            counters=device.counters(),
        )
    output: torch.Tensor = module.o_proj(out.view(1, out.shape[0], -1))
    return output
