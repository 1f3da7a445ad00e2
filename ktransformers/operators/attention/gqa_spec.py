"""What an attention module of grouped queries computes, found by asking it.

A module's own forward runs on made-up projections, with an attention function that records what it is given. Knows no
family names, no devices.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from ktransformers.kernels.flashinfer import GqaShape
from ktransformers.operators.norm import computes_rms_norm, norm_epsilon

__all__ = ["GqaSpec", "NormPlace", "QueryNorms", "recognize_gqa"]

_PROBE = "ktransformers_probe"
_ROWS = 3
_SIZE = 64.0  # of made-up projections: large, so that clipping them shows
_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_NORM_NAMES = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))


class NormPlace(Enum):
    """What the norms of queries and keys normalize."""

    HEADS = "each head, before the rotation"
    ROTATED = "each head, after it"
    WHOLE = "all heads of a row at once, before the rotation"


@dataclass(frozen=True, slots=True)
class QueryNorms:
    """RMS norms of queries and keys: the names of the two modules, and their epsilon."""

    place: NormPlace
    names: tuple[str, str]
    eps: float


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """What a module's attention needs to know.

    is_interleaved: whether columns 2 i and 2 i + 1 of a head are rotated together, rather than i and i + P / 2.
    has_sinks: whether each head has a sink, the module's parameter `sinks`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    is_interleaved: bool
    scale: float
    window: int
    softcap: float
    norms: QueryNorms | None
    has_sinks: bool

    def shape(self, dtype: torch.dtype) -> GqaShape | None:
        """Of its attention over a cache of `dtype`; None with sinks, which a GqaShape has not."""
        if self.has_sinks:
            return None
        return GqaShape(self.num_heads, self.num_kv_heads, self.head_dim, dtype, self.scale, self.window, self.softcap)


@dataclass(frozen=True, slots=True)
class _Probe:
    """Made-up numbers: projections [T, heads, D] and what else a module holds, by name; angles [T, P / 2]."""

    parts: dict[str, torch.Tensor]
    angles: torch.Tensor

    def rotated(self, name: str, norm: str | None, norms: QueryNorms | None, is_interleaved: bool) -> torch.Tensor:
        """What attention should get of the projection `name`, [T, heads, D]."""
        x = self.parts[name]
        if norms is None or norm is None:
            return _rotated(x, self.angles, is_interleaved)
        weight = self.parts[norm]
        if norms.place is NormPlace.ROTATED:
            return _normed(_rotated(x, self.angles, is_interleaved), weight, norms.eps)
        rows = x.flatten(1) if norms.place is NormPlace.WHOLE else x
        return _rotated(_normed(rows, weight, norms.eps).view(x.shape), self.angles, is_interleaved)


class _Fixed(nn.Module):
    """Returns the same whatever it is given."""

    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.clone()  # which the module may change in place


def _record(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    seen: dict[str, Any] = kwargs.pop("probe_record")
    seen.update(kwargs, query=query, key=key, value=value)
    seen["output"] = torch.randn(1, _ROWS, query.shape[1], value.shape[-1], generator=torch.Generator().manual_seed(3))
    return seen["output"], None


def recognize_gqa(module: Any) -> GqaSpec | None:
    """What `module`'s own forward computes, or None when that is something else (gates, other norms or rotations)."""
    head_dim = getattr(module, "head_dim", None)
    children = {name for name, child in module.named_children() if child is not None}
    names = next((pair for pair in _NORM_NAMES if children == _PROJECTIONS | set(pair)), None)
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if not isinstance(head_dim, int) or (names is None and children != _PROJECTIONS) or not own <= {"sinks"}:
        return None
    kinds = _possible_norms(module, names)
    factor = (getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * factor)
    twin, parts = _twin(module, head_dim, names or ())
    probe = _Probe(parts, torch.randn(_ROWS, rotary_dim // 2, generator=torch.Generator().manual_seed(1)))
    for seen, output in _answers(twin, probe.angles):
        if not _is_plain(seen, output, parts):
            continue
        for norms, is_interleaved in ((norms, side) for norms in kinds for side in (False, True)):
            if _is_rotated_so(seen, probe, norms, is_interleaved):
                return _spec(seen, head_dim, rotary_dim, is_interleaved, norms)
    return None


def _spec(
    seen: dict[str, Any], head_dim: int, rotary_dim: int, is_interleaved: bool, norms: QueryNorms | None
) -> GqaSpec:
    scale = seen.get("scaling")
    return GqaSpec(
        num_heads=seen["query"].shape[1],
        num_kv_heads=seen["key"].shape[1],
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        is_interleaved=is_interleaved,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=int(seen.get("sliding_window") or 0),
        softcap=float(seen.get("softcap") or 0.0),
        norms=norms,
        has_sinks=seen.get("s_aux") is not None,
    )


def _possible_norms(module: Any, names: tuple[str, str] | None) -> list[QueryNorms | None]:
    """None alone for a module without norms; nothing for norms that are not plain RMSNorm of one epsilon."""
    if names is None:
        return [None]
    norms = [module.get_submodule(name) for name in names]
    epsilons = {norm_epsilon(norm) for norm in norms}
    eps = epsilons.pop()
    if epsilons or eps is None or not all(computes_rms_norm(norm) for norm in norms):
        return []
    widths = [tuple(norm.weight.shape) for norm in norms]
    heads = [(getattr(module, name).out_features,) for name in ("q_proj", "k_proj")]
    found = [NormPlace.HEADS, NormPlace.ROTATED] if widths == [(module.head_dim,)] * 2 else []
    places = [*found, *([NormPlace.WHOLE] if widths == heads else [])]
    return [QueryNorms(place, names, eps) for place in places]


def _twin(module: Any, head_dim: int, norm_names: tuple[str, ...]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A copy of the module on made-up projections, and these: [T, heads, D], norm weights, sinks [heads]."""
    generator = torch.Generator().manual_seed(0)
    twin, parts = copy.copy(module), {}
    children: dict[str, nn.Module] = {"o_proj": nn.Identity()}
    for name in ("q_proj", "k_proj", "v_proj"):
        width = getattr(module, name).out_features
        value = _SIZE * torch.randn(1, _ROWS, width, generator=generator)
        children[name], parts[name] = _Fixed(value), value.view(_ROWS, -1, head_dim)
    for name in norm_names:
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


def _answers(twin: Any, angles: torch.Tensor) -> list[tuple[dict[str, Any], Any]]:
    """What the twin hands to attention and what it makes of the result, with angles given twice side by side, or once:
    both are usual."""
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE, _record)
    found = []
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
        if seen:
            found.append((seen, output))
    return found


def _is_plain(seen: dict[str, Any], output: Any, parts: dict[str, torch.Tensor]) -> bool:
    """Whether nothing else is handed to attention, values and sinks are as they were, and so is the result."""
    known = {"query", "key", "value", "output", "scaling", "sliding_window", "softcap", "dropout", "is_causal", "s_aux"}
    if any(value is not None for name, value in seen.items() if name not in known) or seen.get("dropout"):
        return False
    sinks, wanted = seen.get("s_aux"), parts.get("sinks")
    same_sinks = sinks is wanted if sinks is None or wanted is None else torch.equal(sinks, wanted)
    flat = seen["output"].reshape(1, _ROWS, -1)
    same_output = isinstance(output, torch.Tensor) and output.shape == flat.shape and torch.equal(output, flat)
    return same_sinks and same_output and _is_close(seen["value"], parts["v_proj"])


def _is_rotated_so(seen: dict[str, Any], probe: _Probe, norms: QueryNorms | None, is_interleaved: bool) -> bool:
    query, key = (None, None) if norms is None else norms.names
    return _is_close(seen["query"], probe.rotated("q_proj", query, norms, is_interleaved)) and _is_close(
        seen["key"], probe.rotated("k_proj", key, norms, is_interleaved)
    )


def _is_close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of [1, heads, T, D] as attention gets it, and [T, heads, D]."""
    got = given[0].transpose(0, 1)
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotated(x: torch.Tensor, angles: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """x [T, heads, D], its first columns rotated in pairs and left where they are."""
    half = angles.shape[-1]
    cos, sin, turned = angles.cos()[:, None], angles.sin()[:, None], x[..., : 2 * half]
    a, b = (turned[..., ::2], turned[..., 1::2]) if is_interleaved else (turned[..., :half], turned[..., half:])
    members = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(members, dim=-1).flatten(-2) if is_interleaved else torch.cat(members, dim=-1)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)
