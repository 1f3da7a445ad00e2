"""Decoder layers on a GPU one after another, each addition in the launch of the norm that follows it.

A layer of Llama's arrangement (norm, attention, add, norm, feed-forward, add) ends with an addition, the next one
begins with a norm: a run of such layers on one GPU is one module, `LayerStack`, which hands the addends over. Whether
a layer is arranged so is found by asking it, with stand-ins in the places of its parts. Knows modules; not what they
compute.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktransformers.kernels.triton.elementwise import add_rms_norm, rms_norm
from ktransformers.operators.device import Device, use
from ktransformers.operators.experts.block import Addends, KMoEBlock
from ktransformers.operators.norm import KRMSNorm

__all__ = ["LayerStack", "stack_gpu_layers"]

logger = logging.getLogger(__name__)

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The modules of one layer."""

    norms: tuple[KRMSNorm, KRMSNorm]
    attention: nn.Module
    feed_forward: nn.Module


class _StandIn(nn.Module):
    """A part that computes something simple of its own, and keeps what keywords it was given.

    in_tuple: it returns its result and something else.
    """

    def __init__(self, factor: float, *, in_tuple: bool = False):
        super().__init__()
        self.factor, self.in_tuple = factor, in_tuple
        self.seen: dict[str, Any] = {}

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.factor * x)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        self.seen = kwargs
        result = self.apply_to(hidden_states)
        return (result, None) if self.in_tuple else result


def _feed_forward_name(layer: nn.Module) -> str | None:
    """The name of a layer's feed-forward part, if the layer has the usual parts and no state of its own."""
    names = {name for name, child in layer.named_children() if child is not None}
    others = names - {"self_attn", *_NORMS}
    is_usual = len(others) == 1 and len(names) == 4 and not any(True for _ in layer.parameters(recurse=False))
    return others.pop() if is_usual else None


def _is_plain(layer: nn.Module, feed_forward: str, *, in_tuple: bool) -> bool:
    """Whether the layer computes h = x + attention(norm(x)), h + feed_forward(norm(h)) and passes its keywords on.

    in_tuple: if its feed-forward part returns its result and something else.
    """
    first, second, third = _StandIn(0.7), _StandIn(1.3, in_tuple=True), _StandIn(0.9)
    fourth = _StandIn(1.7, in_tuple=in_tuple)
    twin = copy.copy(layer)
    twin.__dict__["_modules"] = {_NORMS[0]: first, "self_attn": second, _NORMS[1]: third, feed_forward: fourth}
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    given = {"attention_mask": None, "position_ids": object(), "position_embeddings": object(), "probe": object()}
    try:
        got = twin(x.clone(), past_key_values=None, use_cache=False, **given)
    except Exception:  # noqa: BLE001 - any layer of any family may be asked, and may refuse in any way
        return False
    middle = x + second.apply_to(first.apply_to(x))
    want = middle + fourth.apply_to(third.apply_to(middle))
    passes_on = all(second.seen.get(name) is value for name, value in given.items() if name != "position_ids")
    return isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want) and passes_on


def _recognize(layer: nn.Module, device: Device) -> _Parts | None:
    name = _feed_forward_name(layer)
    if name is None or not any(_is_plain(layer, name, in_tuple=in_tuple) for in_tuple in (False, True)):
        return None
    norms = [getattr(layer, norm) for norm in _NORMS]
    if not all(isinstance(norm, KRMSNorm) and norm.is_native and norm.device.name == device.name for norm in norms):
        return None
    return _Parts((norms[0], norms[1]), layer.get_submodule("self_attn"), layer.get_submodule(name))


class LayerStack(nn.Module):
    """Stands in for the first of some neighbouring decoder layers and computes them all: [1, T, H] in and out.

    What the model hands to the first layer is what it hands to each of them.
    """

    def __init__(self, layers: list[nn.Module], parts: list[_Parts], device: Device):
        super().__init__()
        self.layers, self.device = nn.ModuleList(layers), device
        self._parts = parts
        _keep_attention_type(self, layers[0])

    def part(self, first: int, last: int) -> LayerStack:
        """The layers from `first` to before `last` as a stack of their own."""
        return LayerStack(list(self.layers[first:last]), self._parts[first:last], self.device)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        use(self.device.torch_device)
        shape = hidden_states.shape
        total, added = hidden_states.reshape(-1, shape[-1]), None
        for parts in self._parts:
            normed, total = _add_norm(added, total, parts.norms[0])
            attended = parts.attention(*args, hidden_states=normed[None], **kwargs)
            attended = attended[0] if isinstance(attended, tuple) else attended
            normed, total = _add_norm(Addends(attended.reshape(total.shape)), total, parts.norms[1])
            added = _feed_forward(parts.feed_forward, normed)
        if added is not None:
            total = total + _summed(added)
        return total.view(shape)


class _Done(nn.Module):
    """In the place of a layer that a LayerStack before it has computed."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        _keep_attention_type(self, layer)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def _keep_attention_type(module: Any, layer: Any) -> None:
    if hasattr(layer, "attention_type"):  # some models choose a mask by it
        module.attention_type = layer.attention_type


def _add_norm(added: Addends | None, total: torch.Tensor, norm: KRMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, sum) of rows [T, H] and what is to be added to them."""
    if added is None:
        return rms_norm(total, norm.weight, norm.eps), total
    return add_rms_norm(added.routed, total, norm.weight, norm.eps, more=added.shared, gate=added.score)


def _summed(added: Addends) -> torch.Tensor:
    if added.shared is None:
        return added.routed
    return added.routed + (added.shared if added.score is None else added.shared * torch.sigmoid(added.score))


def _feed_forward(module: nn.Module, rows: torch.Tensor) -> Addends:
    if isinstance(module, KMoEBlock) and module.device.torch_device == rows.device:
        return module.addends(rows)
    output = module(rows[None])
    routed: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return Addends(routed.reshape(rows.shape))


def stack_gpu_layers(model: Any, homes: Mapping[str, Device], watch: Callable[[nn.Module, Device], None]) -> int:
    """Put LayerStacks in the places of a loaded model's decoder layers on GPUs; returns how many layers they compute.

    homes: devices of the layers by name, in order. watch: what else has to be done to a module that takes a layer's
    place on a device (hidden states are brought there).
    """
    base = getattr(model.model, "inner", model.model)  # an operator may stand in for the layer loop
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != len(homes):
        return 0
    devices = list(homes.values())
    parts = [_recognize(layer, d) if d.is_gpu else None for layer, d in zip(layers, devices, strict=True)]
    first, count = 0, 0
    while first < len(layers):
        last = first
        while last < len(layers) and parts[last] is not None and devices[last].name == devices[first].name:
            last += 1
        run = [part for part in parts[first:last] if part is not None]
        if run:
            originals = list(layers[first:last])
            stack = LayerStack(originals, run, devices[first])
            watch(stack, devices[first])
            layers[first] = stack
            for index in range(first + 1, last):
                layers[index] = _Done(originals[index - first])
            count += len(run)
        first = max(last, first + 1)
    logger.debug("%d of %d decoder layers hand their sums to the next norm", count, len(layers))
    return count
