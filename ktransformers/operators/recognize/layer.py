"""Recognizes decoder layers made of parts that each get a norm of the rows and are added to them.

Llama's have two: norm, attention, add, norm, feed-forward, add. A layer with a state may take attention's place.
Nemotron-H's have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from ktransformers.models.layers import named_cache
from ktransformers.operators.recognize.probe import (
    NotRecognized,
    ProbeInputs,
    StandIn,
    answer,
    close,
    first_of,
    made_of,
    probe_module,
    recognizer,
)

__all__ = ["LayerSpec", "PartKind", "PartSpec", "keeps_keywords", "recognize_layer"]

_NORMS = ("input_layernorm", "post_attention_layernorm")
_MIXERS = frozenset({"self_attn", "linear_attn"})
_ONE_PART = ("norm", "mixer")


class PartKind(Enum):
    """Kinds of a layer's parts: what a part is given beside the rows, and what it returns."""

    ATTENTION = "all that its layer is handed; its result and something else"
    RECURRENT = "some of what its layer is handed; its result, as layers with a state do"
    FEED_FORWARD = "nothing; its result"
    IN_TUPLE = "nothing; its result and something else"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part of a layer, by which x becomes x + part(norm(x)): names of both modules."""

    norm: str
    name: str
    kind: PartKind


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Parts of a decoder layer in their order."""

    parts: tuple[PartSpec, ...]


def _sine(factor: float, hidden_states: Tensor, **_: object) -> Tensor:
    return torch.sin(factor * hidden_states)


def _stand_in(factor: float, *, in_tuple: bool = False) -> StandIn:
    """A part that computes something simple of its own. in_tuple: it returns its result and something else."""
    if not in_tuple:
        return StandIn(partial(_sine, factor))
    return StandIn(lambda hidden_states, **_: (_sine(factor, hidden_states), None))


@recognizer("a layer of the usual arrangement")
def recognize_layer(layer: nn.Module) -> LayerSpec:
    """Return the arrangement of `layer` if each part is added to the rows that its norm was given; None for others."""
    names = made_of(layer)
    specs = list(_possible(names))
    if not specs or any(True for _ in layer.parameters(recurse=False)):
        raise NotRecognized(f"it is made of {', '.join(sorted(names))}")
    return first_of(partial(_recognized, layer, spec) for spec in specs)


def _possible(names: set[str]) -> Iterator[LayerSpec]:
    """Of a layer with such children."""
    mixers, others = sorted(names & _MIXERS), sorted(names - _MIXERS - set(_NORMS))
    if names == set(_ONE_PART):
        for kind in PartKind:
            yield LayerSpec((PartSpec(*_ONE_PART, kind),))
    elif len(mixers) == len(others) == 1 and len(names) == 4:
        for mixing in (PartKind.ATTENTION, PartKind.RECURRENT):
            for kind in (PartKind.FEED_FORWARD, PartKind.IN_TUPLE):
                yield LayerSpec((PartSpec(_NORMS[0], mixers[0], mixing), PartSpec(_NORMS[1], others[0], kind)))


def keeps_keywords(layer: nn.Module) -> bool:
    """Whether `layer` runs its attention, the child `self_attn`, without the keywords that it is given itself."""
    children = made_of(layer)
    if "self_attn" not in children:
        return False
    attention, marker = _stand_in(1.3, in_tuple=True), object()
    probe = probe_module(layer, modules={name: _stand_in(0.7) for name in children} | {"self_attn": attention})
    x, given = ProbeInputs().normal(1, 3, 8), {"attention_mask": None, "position_embeddings": object(), "probe": marker}
    try:
        answer(lambda: probe(x, use_cache=False, position_ids=object(), **given, **named_cache(probe, None)))
    except NotRecognized:
        return False  # a layer of another make, which the first step shows
    return bool(attention.seen) and attention.seen.get("probe") is not marker


def _recognized(layer: nn.Module, spec: LayerSpec) -> LayerSpec:
    factors = [(0.7 + 0.2 * i, 1.3 + 0.4 * i) for i in range(len(spec.parts))]
    norms = [_stand_in(factor) for factor, _ in factors]
    in_tuples = [part.kind in (PartKind.ATTENTION, PartKind.IN_TUPLE) for part in spec.parts]
    parts = [_stand_in(factor, in_tuple=is_in) for (_, factor), is_in in zip(factors, in_tuples, strict=True)]
    modules = {part.norm: norm for part, norm in zip(spec.parts, norms, strict=True)}
    modules |= {part.name: stand_in for part, stand_in in zip(spec.parts, parts, strict=True)}
    probe, x = probe_module(layer, modules=modules), ProbeInputs().normal(1, 3, 8)
    given = {"attention_mask": None, "position_embeddings": object(), "probe": object()}
    more = named_cache(probe, None)
    got = answer(lambda: probe(x.clone(), use_cache=False, position_ids=object(), **given, **more))
    want = x
    for of_norm, of_part in factors:
        want = want + _sine(of_part, _sine(of_norm, want))
    if not close(got, want):
        raise NotRecognized("it adds or normalizes in its own way")
    for part, stand_in in zip(spec.parts, parts, strict=True):
        _check_handed(part, stand_in.seen, given)
    return spec


def _check_handed(part: PartSpec, seen: dict[str, object], given: dict[str, object]) -> None:
    """Raise NotRecognized unless a part was handed (`seen`) what its kind is, of what its layer was given."""
    if part.kind is PartKind.ATTENTION:
        if any(seen.get(name) is not value for name, value in given.items()):
            raise NotRecognized("it does not hand its keywords to attention")
    elif bool(seen) != (part.kind is PartKind.RECURRENT):
        raise NotRecognized(f"it hands {', '.join(sorted(seen)) or 'nothing'} to {part.name}")
