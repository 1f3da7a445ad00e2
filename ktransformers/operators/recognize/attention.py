"""Recognizes what an attention module of grouped queries does between its projections: norms, rotation, its call of
attention.

Its own forward runs on made-up projections, with an attention function that records what it is given.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from ktransformers.kernels.flashinfer import GqaShape
from ktransformers.models.layers import named_cache
from ktransformers.operators.recognize.norm import recognize_norm, rms_norm
from ktransformers.operators.recognize.probe import (
    Constant,
    NotRecognized,
    ProbeInputs,
    answer,
    close,
    first_of,
    made_of,
    matching,
    probe_module,
    recognizer,
)
from ktransformers.operators.recognize.temperature import QueryTemperature
from ktransformers.operators.rotation import rotated_columns

__all__ = ["GqaSpec", "NormPlace", "QueryNorms", "recognize_attention", "recognize_temperature"]

_PROBE = "ktransformers_probe"
_ROWS = 3
_SIZE = 64.0  # of made-up projections: large, so that clipping them shows
_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_OPTIONS = frozenset({"scaling", "sliding_window", "softcap", "dropout", "is_causal", "s_aux"})
_NORM_NAMES = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))


class NormPlace(Enum):
    """Places of the norms of queries and keys: what they normalize."""

    HEADS = "each head, before the rotation"
    ROTATED = "each head, after it"
    WHOLE = "all heads of a row at once, before the rotation"


@dataclass(frozen=True, slots=True)
class QueryNorms:
    """RMS norms of queries and keys: the names of the two modules, their epsilon, what is added to their weights."""

    place: NormPlace
    names: tuple[str, str]
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Numbers and flags of an attention module of grouped queries.

    is_interleaved: whether columns 2 i and 2 i + 1 of a head are rotated together, rather than i and i + P / 2.
    has_sinks: whether each head has a sink, the module's parameter `sinks`. has_gate: whether q_proj gives each head
    a query and, behind it, a gate, by whose logistic function the head's result is multiplied.
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
    has_gate: bool = False

    def shape(self, dtype: torch.dtype) -> GqaShape | None:
        """Return the shape of the attention over a cache of `dtype`; None with sinks, which a GqaShape has not."""
        if self.has_sinks:
            return None
        return GqaShape(self.num_heads, self.num_kv_heads, self.head_dim, dtype, self.scale, self.window, self.softcap)


class _Past:
    """A cache of transformers that says how much it holds, and holds nothing."""

    def __init__(self, length: int):
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: object) -> tuple[Tensor, Tensor]:
        return keys, values


@dataclass(frozen=True, slots=True)
class _Call:
    """What attention was given, [1, heads, T, D] and by name, and the result that it gave."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, object]
    result: Tensor

    def number(self, name: str) -> float:
        value = self.options.get(name)
        return float(value) if isinstance(value, (int, float)) else 0.0


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, *, calls: list[_Call], **options: object
) -> tuple[Tensor, None]:
    result = ProbeInputs(3).normal(1, _ROWS, query.shape[1], value.shape[-1])
    calls.append(_Call(query, key, value, {name: o for name, o in options.items() if o is not None}, result))
    return result, None


@recognizer("attention of grouped queries as kernels compute it")
def recognize_attention(module: nn.Module) -> GqaSpec:
    """Return what `module`'s own forward computes; None when that is something else (other gates, norms or
    rotations).
    """
    head_dim = getattr(module, "head_dim", None)
    children = made_of(module)
    names = next((pair for pair in _NORM_NAMES if children == _PROJECTIONS | set(pair)), ())
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if not isinstance(head_dim, int) or children != _PROJECTIONS | set(names) or not own <= {"sinks"}:
        raise NotRecognized(f"it is made of {', '.join(sorted(children | own))}")
    if any("weight" not in dict(module.get_submodule(name).named_parameters()) for name in names):
        raise NotRecognized("its norms have no weight")
    # Angles are given twice side by side, or once: both are usual.
    return first_of(partial(_recognized, module, head_dim, names, copies) for copies in (2, 1))


@recognizer("attention with queries scaled by position as operators compute it")
def recognize_temperature(module: nn.Module) -> QueryTemperature:
    """Return how a module that does not rotate scales its queries by their positions; None for another way."""
    head_dim, names = getattr(module, "head_dim", None), made_of(module)
    step, scale = getattr(module, "floor_scale", None), getattr(module, "attn_scale", None)
    if not isinstance(head_dim, int) or names != _PROJECTIONS:
        raise NotRecognized(f"it is made of {', '.join(sorted(names))}")
    if not isinstance(step, int | float) or not isinstance(scale, int | float) or step <= 0:
        raise NotRecognized("it does not say by how much")
    spec = QueryTemperature(float(scale), float(step), shift=1)
    probe, parts = _probe(module, head_dim, ())
    for first in (0, int(step) - 2, int(5 * step)):
        call = _answer(probe, torch.zeros(_ROWS, head_dim), **named_cache(probe, _Past(first)))
        positions = torch.arange(first, first + _ROWS, dtype=torch.float64)
        want = parts["q_proj"] * spec.of(positions).float()[:, None, None]
        if not close(call.query[0].transpose(0, 1), want) or not close(call.key[0].transpose(0, 1), parts["k_proj"]):
            raise NotRecognized("it scales them in its own way")
    return spec


def _recognized(module: nn.Module, head_dim: int, names: tuple[str, ...], copies: int) -> GqaSpec:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    angles = ProbeInputs(1).normal(_ROWS, int(head_dim * (rope.get("partial_rotary_factor") or 1.0)) // 2)
    has_gate = _width(module, "q_proj") == 2 * int(getattr(module.get_submodule("o_proj"), "in_features", 0))
    probe, parts = _probe(module, head_dim, names, has_gate=has_gate)
    call = _answer(probe, torch.cat([angles] * copies, dim=-1), parts.get("gate"))
    _check_plain(call, parts)
    scaling = call.options.get("scaling")
    specs = [
        GqaSpec(
            num_heads=call.query.shape[1],
            num_kv_heads=call.key.shape[1],
            head_dim=head_dim,
            rotary_dim=2 * angles.shape[-1],
            is_interleaved=is_interleaved,
            scale=head_dim**-0.5 if scaling is None else call.number("scaling"),
            window=int(call.number("sliding_window")),
            softcap=call.number("softcap"),
            norms=norms,
            has_sinks="s_aux" in call.options,
            has_gate=has_gate,
        )
        for norms, is_interleaved in product(_possible_norms(module, head_dim, names), (False, True))
    ]
    given = torch.cat((call.query, call.key), dim=1)[0].transpose(0, 1)
    return matching(given, specs, lambda spec: torch.cat([_rotated(parts, i, angles, spec) for i in (0, 1)], dim=1))


def _possible_norms(module: nn.Module, head_dim: int, names: tuple[str, ...]) -> list[QueryNorms | None]:
    """None alone for a module without norms. Raises NotRecognized for norms that are not plain RMSNorm of one
    epsilon.
    """
    if not names:
        return [None]
    norms = [module.get_submodule(name) for name in names]
    specs = {recognize_norm(norm) for norm in norms}
    spec = specs.pop()
    if specs or spec is None:
        raise NotRecognized("its norms are not plain RMSNorm of one epsilon")
    widths = [tuple(norm.get_parameter("weight").shape) for norm in norms]
    heads = [(_width(module, name),) for name in ("q_proj", "k_proj")]
    places = [NormPlace.HEADS, NormPlace.ROTATED] if widths == [(head_dim,)] * 2 else []
    if widths == heads:
        places.append(NormPlace.WHOLE)
    return [QueryNorms(place, (names[0], names[1]), spec.eps, spec.offset) for place in places]


def _width(module: nn.Module, name: str) -> int:
    return int(getattr(module.get_submodule(name), "out_features", 0))


def _probe(
    module: nn.Module, head_dim: int, norm_names: tuple[str, ...], *, has_gate: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of the module on made-up projections, and these: [T, heads, D], norm weights, sinks [heads].

    has_gate: half of each head of q_proj is a "gate", of numbers small enough that its logistic function is not 0 or 1.
    """
    probe_inputs, parts = ProbeInputs(), dict[str, Tensor]()
    children: dict[str, nn.Module] = {"o_proj": nn.Identity()}
    for name in ("q_proj", "k_proj", "v_proj"):
        value = probe_inputs.normal(1, _ROWS, _width(module, name), scale=_SIZE)
        if value.shape[-1] % head_dim:
            raise NotRecognized(f"{name} gives {value.shape[-1]} columns, which are no heads of {head_dim}")
        parts[name] = value.view(_ROWS, -1, head_dim)
        if has_gate and name == "q_proj":
            parts[name], gate = value.view(_ROWS, -1, 2 * head_dim).chunk(2, dim=-1)
            parts["gate"] = gate / _SIZE
            value = torch.cat((parts[name], parts["gate"]), dim=-1).view(value.shape)
        children[name] = Constant(value)
    for name in norm_names:
        norm = module.get_submodule(name)
        parts[name] = probe_inputs.positive(*norm.get_parameter("weight").shape)
        children[name] = probe_module(norm, parameters={"weight": parts[name]})
    sinks = {name: probe_inputs.normal(parts["q_proj"].shape[1]) for name, _ in module.named_parameters(recurse=False)}
    config = copy.copy(vars(module)["config"])
    config._attn_implementation = _PROBE
    return probe_module(module, parameters=sinks, modules=children, config=config), parts | sinks


def _answer(probe: nn.Module, angles: Tensor, gate: Tensor | None = None, **given: object) -> _Call:
    """What the probe hands to attention. Raises NotRecognized unless it calls it once, and hands on what that gives.

    gate: [T, heads, D], what the result is to be multiplied by, as logits; None: nothing.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE, _record)
    calls, embeddings = list[_Call](), (angles.cos()[None], angles.sin()[None])
    rows = torch.zeros(1, _ROWS, 8)
    output = answer(lambda: probe(rows, position_embeddings=embeddings, attention_mask=None, calls=calls, **given)[0])
    if len(calls) != 1 or not close(output, _gated(calls[0].result, gate)):
        raise NotRecognized("it calls attention otherwise than once, or changes its result")
    return calls[0]


def _gated(result: Tensor, gate: Tensor | None) -> Tensor:
    """What is made of attention's result [1, T, heads, D]: [1, T, heads D]."""
    if gate is None:
        return result.reshape(1, _ROWS, -1)
    if gate.shape != result.shape[1:]:
        raise NotRecognized(f"its gates {list(gate.shape)} are not of its results {list(result.shape[1:])}")
    return (result * torch.sigmoid(gate)).reshape(1, _ROWS, -1)


def _check_plain(call: _Call, parts: dict[str, Tensor]) -> None:
    """Raise NotRecognized when attention gets more than kernels know, or values or sinks other than the module's
    own.
    """
    unknown = call.options.keys() - _OPTIONS
    if unknown or call.number("dropout"):
        raise NotRecognized(f"it hands {', '.join(sorted(unknown)) or 'dropout'} to attention")
    if not close(call.value[0].transpose(0, 1), parts["v_proj"]):
        raise NotRecognized("it changes its values")
    sinks, given = parts.get("sinks"), call.options.get("s_aux")
    if not (given is None if sinks is None else close(given, sinks)):
        raise NotRecognized("its sinks are not its parameter")


def _rotated(parts: dict[str, Tensor], index: int, angles: Tensor, spec: GqaSpec) -> Tensor:
    """What attention gets of queries (index 0) or keys (1), [T, heads, D]."""
    x, norms = parts[("q_proj", "k_proj")[index]], spec.norms
    turned = partial(
        rotated_columns,
        cos=angles.cos(),
        sin=angles.sin(),
        is_interleaved=spec.is_interleaved,
        keeps_places=True,
    )
    if norms is None:
        return turned(x)
    weight = norms.offset + parts[norms.names[index]]
    if norms.place is NormPlace.ROTATED:
        return rms_norm(turned(x), weight, norms.eps)
    rows = x.flatten(1) if norms.place is NormPlace.WHOLE else x
    return turned(rms_norm(rows, weight, norms.eps).view(x.shape))
