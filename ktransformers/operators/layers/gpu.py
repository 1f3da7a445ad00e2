"""Decoder layers on a GPU one after another, each addition in the launch of the norm that follows it.

A layer of Llama's arrangement (norm, attention, add, norm, feed-forward, add) ends with an addition, the next one
begins with a norm: a run of such layers on one GPU is one module, `LayerStack`, which hands the addends over. In the
place of attention there may be a layer with a state: what else layers are handed is nothing to it. Layers of one part
(Nemotron-H's) are such layers too. A step whose context has blocks goes through attention, and what else is not made
for so many rows, block by block; experts that are streamed get all its rows at once, so that they are copied once.
Whether a layer is arranged so is found by asking it (`recognize/layer.py`). Knows modules; not what they compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.kernels.triton.common.elementwise import add_rms_norm, rms_norm
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import Device, use
from ktransformers.operators.experts.block import Addends, KMoEBlock
from ktransformers.operators.layers.joined import Done, handed
from ktransformers.operators.layers.traced import LayerCall, keep_attention_type, layer_list
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recognize.layer import PartKind, recognize_layer
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["LayerStack", "stack_gpu_layers", "takes_blocks"]

logger = logging.getLogger(__name__)


_BY_ROW = {"position_ids": -1, "cache_position": -1, "position_embeddings": -2}
"""Tensors that layers are handed, and their dimension of rows."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What mixers are handed beside some rows of a step."""

    rows: slice
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @classmethod
    def all_of(cls, num_rows: int, args: tuple[object, ...], kwargs: dict[str, object]) -> list[_Call]:
        """Make one for each block of the step's context; for a step without blocks one."""
        context = kwargs.get("forward_context")
        blocks = context.blocks if isinstance(context, ForwardContext) else ()
        if not blocks:
            return [cls(slice(0, num_rows), args, kwargs)]
        made, first = list[_Call](), 0
        for block in blocks:
            rows = slice(first, first + len(block.slot_mapping))
            cut = {name: _cut(kwargs[name], dim, rows) for name, dim in _BY_ROW.items() if name in kwargs}
            made.append(cls(rows, args, {**kwargs, **cut, "forward_context": block}))
            first = rows.stop
        return made


def _cut(value: object, dim: int, rows: slice) -> object:
    if isinstance(value, torch.Tensor):
        return value.narrow(dim, rows.start, rows.stop - rows.start)
    return tuple(_cut(part, dim, rows) for part in value) if isinstance(value, tuple) else value


def takes_blocks(model: nn.Module, calls: Sequence[LayerCall]) -> bool:
    """Whether all layers are computed by stacks, and are handed nothing with rows that these cannot cut. calls: as for
    `stack_gpu_layers`, which has been called.
    """
    layers = layer_list(model) or ()
    handed_on = [value for call in calls for value in (*call.args, *_others(call.kwargs))]
    is_known = not any(isinstance(value, torch.Tensor | tuple | list | dict) for value in handed_on)
    return len(layers) > 0 and is_known and all(isinstance(layer, LayerStack | Done) for layer in layers)


def _others(kwargs: Mapping[str, object]) -> list[object]:
    return [value for name, value in kwargs.items() if name not in _BY_ROW or isinstance(value, dict | list)]


@dataclass(frozen=True, slots=True)
class _Part:
    """rows become rows + module(norm(rows))."""

    norm: KRMSNorm
    module: nn.Module
    kind: PartKind

    @property
    def is_mixer(self) -> bool:
        """Whether it is handed what its layer is: attention, or a layer with a state."""
        return self.kind in (PartKind.ATTENTION, PartKind.RECURRENT)

    @property
    def name(self) -> str:
        """How profiles name what comes first in it, with its norm: that is a launch of some microseconds."""
        return "linear" if self.is_mixer else "router" if isinstance(self.module, KMoEBlock) else "mlp"


def _parts(layer: nn.Module, device: Device) -> list[_Part] | None:
    """Of a layer of the usual arrangement whose norms run in kernels on the device; None for others."""
    spec = recognize_layer(layer)
    if spec is None:
        return None
    parts: list[_Part] = []
    for part in spec.parts:
        norm, module = layer.get_submodule(part.norm), layer.get_submodule(part.name)
        if not isinstance(norm, KRMSNorm) or norm.spec is None or norm.device.name != device.name:
            return None
        if isinstance(module, KMLAAttention) and module.spec.hands_selection:
            return None  # what it chose goes to the next layer through the model's own loop
        if part.kind is PartKind.RECURRENT and not isinstance(module, RecurrentOperator):
            return None  # it may look at keywords that its layer keeps from it
        parts.append(_Part(norm, module, part.kind))
    return parts


class LayerStack(nn.Module):
    """Stands in for the first of some neighbouring decoder layers and computes them all: [1, T, H] in and out.

    What the model hands to the first layer is what it hands to each of them.
    """

    def __init__(self, layers: list[nn.Module], parts: list[list[_Part]], first: int, device: Device):
        """parts: of each layer. first: the number in the model of the first layer."""
        super().__init__()
        self.layers, self.first, self.device = nn.ModuleList(layers), first, device
        self._parts = parts
        keep_attention_type(self, layers[0])

    def part(self, first: int, last: int) -> LayerStack:
        """Return the layers from `first` to before `last` as a stack of their own."""
        return LayerStack(list(self.layers[first:last]), self._parts[first:last], self.first + first, self.device)

    def picked(self, numbers: Sequence[int]) -> LayerStack:
        """Return layers of the stack, by their places in it, as one that is not timed: at least one."""
        parts = [self._parts[i] for i in numbers]
        return LayerStack([self.layers[i] for i in numbers], parts, self.first, self.device)

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        use(self.device.torch_device)
        shape = hidden_states.shape
        total, added = hidden_states.reshape(-1, shape[-1]), None
        calls = _Call.all_of(len(total), args, kwargs)
        context = kwargs.get("forward_context")
        pictures = context.pictures if isinstance(context, ForwardContext) else None
        if pictures is not None and not self.first:
            total = pictures.add_behind(-1, total)
        for layer, parts in enumerate(self._parts, self.first):
            for part in parts:
                self.device.time_part(part.name, layer)
                normed, total = _add_norm(added, total, part.norm)
                added = _mix(part, normed, calls) if part.is_mixer else _feed_forward(part, normed, calls)
            if pictures is not None and layer in pictures.by_layer:
                _, total = _add_norm(added, total, parts[-1].norm)
                added, total = None, pictures.add_behind(layer, total)
        if added is not None:  # in the bits that the sum has where a norm follows, wherever a stack ends
            _, total = _add_norm(added, total, self._parts[-1][-1].norm)
        self.device.time_part("lm_head", -1)  # or whatever else follows
        return total.view(shape)


def _add_norm(added: Addends | None, total: torch.Tensor, norm: KRMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, sum) of rows [T, H] and what is to be added to them."""
    assert norm.spec is not None
    if added is None:
        return rms_norm(total, norm.weight, norm.spec.eps), total
    return add_rms_norm(added.routed, total, norm.weight, norm.spec.eps, more=added.shared, gate=added.score)


def _mix(part: _Part, rows: torch.Tensor, calls: Sequence[_Call]) -> Addends:
    for call in calls:
        given = rows[call.rows]
        output = part.module(*call.args, hidden_states=given[None], **call.kwargs)
        mixed: torch.Tensor = output[0] if isinstance(output, tuple) else output
        if len(calls) == 1:
            return Addends(mixed.reshape(rows.shape))
        given.copy_(mixed.reshape(given.shape))  # nobody else reads the norm's result
    return Addends(rows)


def _feed_forward(part: _Part, rows: torch.Tensor, calls: Sequence[_Call]) -> Addends:
    module = part.module
    if len(calls) == 1 or (isinstance(module, KMoEBlock) and module.streams(rows)):
        return _feed_block(module, rows)
    return Addends.joined([_feed_block(module, rows[call.rows]) for call in calls])


def _feed_block(module: nn.Module, rows: torch.Tensor) -> Addends:
    if isinstance(module, KMoEBlock) and module.device.torch_device == rows.device:
        return module.addends(rows)
    output = module(rows[None])
    routed: torch.Tensor = output[0] if isinstance(output, tuple) else output  # some blocks give router logits, too
    return Addends(routed.reshape(rows.shape))


def stack_gpu_layers(
    model: nn.Module,
    layer_devices: Mapping[str, Device],
    watch: Callable[[nn.Module, Device], None],
    calls: Sequence[LayerCall],
) -> int:
    """Put LayerStacks in the places of a loaded model's decoder layers on GPUs; returns how many layers they compute.

    layer_devices: devices of the layers by name, in order. calls: of the layers in one step; neighbours that are handed
    different things, the angles of their kind of attention say, are not joined. watch: what else has to be done to a
    module that takes a layer's place on a device (hidden states are brought there).
    """
    layers = layer_list(model)
    if layers is None or len(layers) != len(layer_devices):
        return 0
    devices, count = list(layer_devices.values()), 0
    before = getattr(layers, "first", 0)  # layers that other stages of a pipeline have
    parts = [_parts(layer, device) if device.is_gpu else None for layer, device in zip(layers, devices, strict=True)]
    same = handed(calls)
    for _, run in groupby(range(len(layers)), key=lambda i: (parts[i] is None, devices[i].name, same[i])):
        first, *others = run
        usual = [part for i in (first, *others) if (part := parts[i]) is not None]
        if not usual:
            continue
        stack = LayerStack([layers[i] for i in (first, *others)], usual, before + first, devices[first])
        watch(stack, devices[first])
        layers[first] = stack
        for i in others:
            layers[i] = Done(layers[i])
        count += len(usual)
    logger.debug("%d of %d decoder layers hand their sums to the next norm", count, len(layers))
    return count
