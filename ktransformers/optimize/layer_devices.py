"""Chooses the device of each decoder layer: where its hidden states and its cache are.

A layer's device is the device of its attention, or of what stands in its place. `cuda` without a number means the
device that the layer loop's transfer_map names for the layer, else the first one; modules that no rule places go where
their layer is. `spread_layers` makes a transfer_map where no rule file of the user's has one. Knows rules and the
module tree; reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ktransformers.models.layers import mixers
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.rules import Rules

__all__ = ["LayerDevice", "LayerDevices", "spread_layers"]


@dataclass(frozen=True, slots=True)
class LayerDevice:
    """Device of a decoder layer. key: its dotted name. device: where it lives, as placements spell it."""

    key: str
    device: str


class LayerDevices:
    """The devices of a model's layers under some rules, on a machine. transfer: used where no rule has a
    transfer_map.
    """

    def __init__(
        self,
        model: nn.Module,
        model_type: str,
        rules: Rules,
        machine: Machine,
        transfer: Mapping[int, str] | None = None,
    ):
        self._machine = machine
        attention = mixers(model)
        self._transfer = _transfer_map(model, rules, model_type) or transfer or {}
        self._layer_of = {_layer_key(key): layer for layer, key in attention.items()}
        self.layers: dict[int, LayerDevice] = {}
        for layer, key in sorted(attention.items()):
            rule = rules.first_match(key, model.get_submodule(key), model_type)
            named = {} if rule is None else rule.devices
            wanted = named.get("generate_device", named.get("prefill_device", self.default_device(key)))
            self.layers[layer] = LayerDevice(_layer_key(key), self.resolve(wanted, key))

    def _layer(self, key: str) -> int | None:
        while key:
            if key in self._layer_of:
                return self._layer_of[key]
            key = key.rpartition(".")[0]
        return None

    def resolve(self, named: str, key: str) -> str:
        """Return the device that a rule's `named` means for module `key`; the CPU on a machine with nothing else."""
        if named == "cpu" or all(there == "cpu" for there in self._machine.devices):
            return "cpu"
        number = named.partition(":")[2]
        if number:
            return f"cuda:{int(number)}"
        layer = self._layer(key)
        before = [] if layer is None else [first for first in self._transfer if first <= layer]
        device = self._transfer[max(before)] if before else self._machine.default_device
        return device if ":" in device or device == "cpu" else self._machine.default_device

    def of(self, key: str) -> str | None:
        """Return the device of the decoder layer that module `key` is in; None outside of all layers."""
        layer = self._layer(key)
        return None if layer is None else self.layers[layer].device

    def default_device(self, key: str) -> str:
        """Return where module `key` goes when no rule says: to its layer, or to the machine's first device."""
        layer = self._layer(key)
        if layer is not None and layer in self.layers:
            return self.layers[layer].device
        return self._machine.default_device if layer is None else self.resolve(self._machine.default_device[:4], key)


def _layer_key(attention: str) -> str:
    """The decoder layer of an attention module, one of several in a layer perhaps: "a.layers.0.self_attn.1"."""
    layer = attention.rpartition(".")[0]
    while layer.rpartition(".")[0] and not layer.rpartition(".")[2].isdecimal():
        layer = layer.rpartition(".")[0]
    return layer if layer.rpartition(".")[2].isdecimal() else attention.rpartition(".")[0]


def _transfer_map(model: nn.Module, rules: Rules, model_type: str) -> Mapping[int, str]:
    """{first layer: device} of the first module whose rule gives one; "cuda:1" in its full form."""
    if not any(rule.kwargs.get("transfer_map") for rule in rules.rules):
        return {}
    for key, module in model.named_modules():
        rule = rules.first_match(key, module, model_type)
        if rule is not None and rule.kwargs.get("transfer_map"):
            found: Mapping[int, str] = rule.kwargs["transfer_map"]
            return found
    return {}


def spread_layers(num_layers: int, free: Mapping[str, int]) -> dict[int, str]:
    """Return {first layer: device}, as a transfer_map has it: each device gets consecutive layers, so that hidden
    states cross as often as there are GPUs, in proportion to its free bytes.

    free: in the order in which layers pass through the devices. Those too small for a layer get none.
    """
    total, before, starts = sum(free.values()), 0, dict[int, str]()
    for device, nbytes in free.items():
        first = round(num_layers * before / max(total, 1))
        before += nbytes
        if round(num_layers * before / max(total, 1)) > first:
            starts[first] = device
    return starts
