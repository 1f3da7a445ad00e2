"""Which decoder layers are arranged as in Llama: norm, mixer (attention, say), add, norm, feed-forward, add."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import Draws, Unlike, answer, close, first_of, recognizer, twin_of

__all__ = ["LAYER_NORMS", "LayerSpec", "keeps_keywords", "recognize_layer"]

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_MIXERS = frozenset({"self_attn", "linear_attn"})


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """feed_forward: the name of that part; in_tuple: it returns its result and something else.

    mixer: the name of the part that brings positions together. is_recurrent: it is handed the layer's keywords without
    angles and position ids, or some of them only, and returns its result alone, as layers with a state do.
    """

    feed_forward: str
    in_tuple: bool
    mixer: str = "self_attn"
    is_recurrent: bool = False


class _StandIn(nn.Module):
    """A part that computes something simple of its own, and keeps what keywords it was given.

    in_tuple: it returns its result and something else.
    """

    def __init__(self, factor: float, *, in_tuple: bool = False):
        super().__init__()
        self.factor, self.in_tuple = factor, in_tuple
        self.seen: dict[str, object] = {}

    def apply_to(self, x: Tensor) -> Tensor:
        return torch.sin(self.factor * x)

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor | tuple[Tensor, None]:
        self.seen = kwargs
        result = self.apply_to(hidden_states)
        return (result, None) if self.in_tuple else result


@recognizer("a layer of the usual arrangement")
def recognize_layer(layer: nn.Module) -> LayerSpec:
    """The arrangement of `layer` if it is h = x + mixer(norm(x)), h + feed_forward(norm(h)); None for others."""
    names = {name for name, child in layer.named_children() if child is not None}
    mixers, others = sorted(names & _MIXERS), sorted(names - _MIXERS - set(LAYER_NORMS))
    if len(mixers) != 1 or len(others) != 1 or len(names) != 4 or any(True for _ in layer.parameters(recurse=False)):
        raise Unlike(f"it is made of {', '.join(sorted(names))}")
    ways = product((False, True), (False, True))
    specs = [LayerSpec(others[0], in_tuple, mixers[0], is_recurrent) for is_recurrent, in_tuple in ways]
    return first_of(partial(_asked, layer, spec) for spec in specs)


def keeps_keywords(layer: nn.Module) -> bool:
    """Whether `layer` runs its attention, the child `self_attn`, without the keywords that it is given itself."""
    children = {name: child for name, child in layer.named_children() if child is not None}
    if "self_attn" not in children:
        return False
    attention, probe = _StandIn(1.3, in_tuple=True), object()
    twin = twin_of(layer, modules={name: _StandIn(0.7) for name in children} | {"self_attn": attention})
    x, given = Draws().normal(1, 3, 8), {"attention_mask": None, "position_embeddings": object(), "probe": probe}
    try:
        answer(lambda: twin(x, past_key_values=None, use_cache=False, position_ids=object(), **given))
    except Unlike:
        return False  # a layer of another make, which the first step shows
    return bool(attention.seen) and attention.seen.get("probe") is not probe


def _asked(layer: nn.Module, spec: LayerSpec) -> LayerSpec:
    first, second, third = _StandIn(0.7), _StandIn(1.3, in_tuple=not spec.is_recurrent), _StandIn(0.9)
    fourth = _StandIn(1.7, in_tuple=spec.in_tuple)
    parts = {LAYER_NORMS[0]: first, spec.mixer: second, LAYER_NORMS[1]: third, spec.feed_forward: fourth}
    twin, x = twin_of(layer, modules=parts), Draws().normal(1, 3, 8)
    given = {"attention_mask": None, "position_embeddings": object(), "probe": object()}
    got = answer(lambda: twin(x.clone(), past_key_values=None, use_cache=False, position_ids=object(), **given))
    middle = x + second.apply_to(first.apply_to(x))
    if not close(got, middle + fourth.apply_to(third.apply_to(middle))):
        raise Unlike("it adds or normalizes in its own way")
    if not spec.is_recurrent and any(second.seen.get(name) is not value for name, value in given.items()):
        raise Unlike("it does not hand its keywords to attention")
    return spec
