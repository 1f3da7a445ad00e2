"""What pictures add to hidden states between decoder layers (deepstack), for as long as one step runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ktransformers.operators.context import ForwardContext
from ktransformers.operators.layers.gpu import LayerStack
from ktransformers.operators.layers.joined import Done
from ktransformers.operators.layers.native_stack import NativeStack
from ktransformers.operators.layers.traced import layer_list
from ktransformers.operators.recorder import intercepted

__all__ = ["adding_pictures", "is_later_stage"]


def is_later_stage(model: nn.Module) -> bool:
    """Whether the layers of `model` get their hidden states from another stage of a pipeline."""
    return _first_layer(layer_list(model)) > 0


def _first_layer(layers: nn.ModuleList | None) -> int:
    first: int = getattr(layers, "first", 0)
    return first


def adding_pictures(model: nn.Module, context: ForwardContext) -> AbstractContextManager[None]:
    """Let the layers of `model` give their hidden states with what the step's pictures add behind them, and the first
    one take them with what is added in front of it, while the block runs. Layers that are joined do so themselves."""
    pictures, layers = context.pictures, layer_list(model)
    if pictures is None or not pictures.by_layer or layers is None:
        return nullcontext()
    alone = [
        (index, layer)
        for index, layer in enumerate(layers._modules.values(), _first_layer(layers))
        if layer is not None and not isinstance(layer, NativeStack | LayerStack | Done)
    ]

    def run(
        key: int, forward: Callable[..., object], /, hidden_states: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        if not key:
            hidden_states = pictures.add_behind(-1, hidden_states)
        output = forward(hidden_states, *args, **kwargs)
        if isinstance(output, torch.Tensor):
            return pictures.add_behind(key, output)
        assert isinstance(output, tuple), "layers give hidden states, or something behind them"
        return pictures.add_behind(key, output[0]), *output[1:]

    return intercepted(alone, run)
