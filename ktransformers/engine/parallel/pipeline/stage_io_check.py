"""Checks whether a stage gets all that its layers need from the one before, and gives all that the next one's need.

Hidden states are what goes from stage to stage. Models that hand more from layer to layer, or to all layers what they
made of embeddings, or compute something of hidden states before or behind their layers, show it in two steps of a
loaded stage that other hidden states come to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ktransformers.engine.parallel.pipeline.link import Incoming, Outgoing
from ktransformers.errors import UnsupportedError
from ktransformers.operators.comparison import same_bits
from ktransformers.operators.layers.traced import layer_list
from ktransformers.operators.recorder import RecordedCall, recorded_calls, tensors_in

__all__ = ["check_stage_io"]

_IN, _OUT = "in", "out"


def check_stage_io(model: nn.Module, kind: str, step: Callable[[], object]) -> None:
    """Run `step`, twice in a stage behind others. kind: of the model.

    Raises UnsupportedError where a stage would lack what other layers have made.
    """
    layers = layer_list(model)
    incoming = next((module for module in model.modules() if isinstance(module, Incoming)), None)
    outgoing = next((module for module in model.modules() if isinstance(module, Outgoing)), None)
    if layers is None or (incoming is None and outgoing is None):
        return
    ends = [(key, module) for key, module in ((_IN, incoming), (_OUT, outgoing)) if module is not None]
    modules: list[tuple[Any, nn.Module]] = [*ends, *enumerate(layers)]
    first = _beside_hidden_states(modules, kind, step)
    if incoming is None:
        return
    incoming.link.seed += 1
    other = _beside_hidden_states(modules, kind, step)
    incoming.link.seed -= 1
    for index, tensors in first.items():
        if len(tensors) != len(other[index]) or not all(map(same_bits, tensors, other[index])):
            _refuse(kind, "hands its layers what it makes of embeddings or of other layers")


def _beside_hidden_states(
    modules: list[tuple[Any, nn.Module]], kind: str, step: Callable[[], object]
) -> dict[int, list[torch.Tensor]]:
    """Run a step, check the ends of the stage, and return what each layer was handed beside hidden states."""
    with recorded_calls(modules) as calls:
        try:
            step()
        finally:  # a model that cannot be cut may fail for it
            _check_ends(calls, modules, kind)
    beside = {}
    for call in calls:
        if call.key not in (_IN, _OUT):
            hidden = call.hidden_states
            rest = [call.args[1:], {name: value for name, value in call.kwargs.items() if value is not hidden}]
            beside[call.key] = list(tensors_in(rest))
    return beside


def _check_ends(calls: list[RecordedCall], modules: list[tuple[Any, nn.Module]], kind: str) -> None:
    """Check that hidden states come to the first layer, and go from the last one, as they are."""
    outputs = {call.key: list(tensors_in(call.output)) for call in calls}
    last, is_cut_behind = modules[-1][0], any(key == _OUT for key, _ in modules)
    for call in calls:
        if call.key == 0 and outputs.get(_IN):
            seen = outputs[_IN][0].to(call.hidden_states.dtype)  # as layers on a GPU take it
            if not same_bits(seen, call.hidden_states):
                _refuse(kind, "before its first layer, computes what cannot be cut from it")
        if call.key == last and is_cut_behind and len(outputs[last]) > 1:
            _refuse(kind, "hands more than hidden states from layer to layer")
        if call.key == _OUT and not same_bits(outputs[last][0], call.hidden_states):
            _refuse(kind, "behind its last layer, computes what cannot be cut from it")


def _refuse(kind: str, what: str) -> None:
    raise UnsupportedError(f"--pipeline: model type {kind}, {what}")
