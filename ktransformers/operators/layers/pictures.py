"""What pictures change of a model's layers for as long as one step runs: what they add to hidden states between them
(deepstack), and which experts their rows are routed to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ktransformers.models.composite import VISION_EXPERTS
from ktransformers.operators.context import ForwardContext, PictureRows
from ktransformers.operators.layers.gpu import LayerStack
from ktransformers.operators.layers.joined import Done
from ktransformers.operators.layers.native_stack import NativeStack
from ktransformers.operators.layers.traced import layer_list
from ktransformers.operators.recorder import intercepted

__all__ = ["adding_pictures", "is_later_stage"]

_Interception = tuple[Sequence[tuple[Hashable, nn.Module]], Callable[..., object]]


def is_later_stage(model: nn.Module) -> bool:
    """Whether the layers of `model` get their hidden states from another stage of a pipeline."""
    return _first_layer(layer_list(model)) > 0


def _first_layer(layers: nn.ModuleList | None) -> int:
    first: int = getattr(layers, "first", 0)
    return first


@contextmanager
def adding_pictures(model: nn.Module, context: ForwardContext) -> Iterator[None]:
    """Let the layers of `model` give their hidden states with what the step's pictures add behind them, and the first
    one take them with what is added in front of it, while the block runs. Layers that are joined do so themselves.
    Blocks with experts for pictures get the numbers of those rows."""
    pictures, layers = context.pictures, layer_list(model)
    if pictures is None or layers is None:
        yield
        return
    with intercepted(*_adding(pictures, layers)), intercepted(*_routing(pictures, layers)):
        yield


def _adding(pictures: PictureRows, layers: nn.ModuleList) -> _Interception:
    alone = [
        (index, layer)
        for index, layer in enumerate(layers._modules.values(), _first_layer(layers))
        if layer is not None and pictures.by_layer and not isinstance(layer, NativeStack | LayerStack | Done)
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

    return alone, run


def _routing(pictures: PictureRows, layers: nn.ModuleList) -> _Interception:
    blocks = list[tuple[Hashable, nn.Module]]()
    routed = torch.empty(0, dtype=torch.int64) if pictures.routed is None else pictures.routed
    if len(routed):
        blocks = [(key, module) for key, module in layers.named_modules() if VISION_EXPERTS in module._modules]

    def run(key: Hashable, forward: Callable[..., object], /, hidden_states: torch.Tensor, *_: object) -> object:
        types = torch.zeros(hidden_states.shape[:-1], dtype=torch.int64, device=hidden_states.device)
        types[..., routed.to(types.device)] = 1
        return forward(hidden_states, types)

    return blocks, run
