"""Finds the decoder layers in a module tree of `transformers`, and in them what brings positions together.

Attention modules say `layer_idx` and `scaling`, recurrent ones `layer_idx`; some layers have neither: they work row by
row. Knows modules, not what they compute.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

__all__ = ["attention_modules", "find_layers", "mixers", "named_cache", "number_mixers"]


def attention_modules(model: nn.Module) -> dict[int, str]:
    """Return {layer: name of its attention module}."""
    return {
        int(module.layer_idx): key
        for key, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "scaling")
    }


def named_cache(module: nn.Module, cache: object) -> dict[str, Any]:
    """Return `cache` under the name that the module's forward has for it: `past_key_values` until transformers 5.24,
    which calls it `cache` and warns of the other name. An operator around a module takes what the module takes.
    """
    while isinstance(inner := getattr(module, "inner", None), nn.Module):
        module = inner
    return {"cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values": cache}


def number_mixers(model: nn.Module) -> None:
    """Give modules that bring positions together their layer's number, in families that leave it out.

    Attention of a block whose weights layers share (Zamba) has number -1 or none; some recurrent blocks say nothing.
    """
    found = find_layers(model)
    for index, layer in enumerate(() if found is None else found[1]):
        for module in layer.modules():
            if hasattr(module, "scaling") and getattr(module, "layer_idx", 0) in (-1, None):
                module.layer_idx = index  # type: ignore[assignment]
        if not any(hasattr(module, "layer_idx") for module in layer.modules()):
            for child in layer.children():
                if any(isinstance(part, nn.Conv1d) for part in child.children()):
                    child.layer_idx = index  # type: ignore[assignment]


def mixers(model: nn.Module) -> dict[int, str]:
    """Return {layer: name of the child that brings positions together}; of its first part where none does.

    A layer with attention and something recurrent counts as one with attention.
    """
    found = attention_modules(model)
    layers = find_layers(model)
    if layers is not None:
        key, modules = layers
        named = enumerate(modules.named_children())  # by other numbers in a stage of a pipeline
        found |= {i: f"{key}.{name}.{_mixer(layer, i)}" for i, (name, layer) in named if i not in found}
    return dict(sorted(found.items()))


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the list of decoder layers, wherever a family keeps it, and its name; None where layers are in no list."""
    config = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    inside = [name for name in attention_modules(model).values() if name.count(".") > 1]
    for key, module in model.named_modules():
        is_theirs = not inside or any(name.startswith(f"{key}.") for name in inside)
        if isinstance(module, nn.ModuleList) and len(module) == count and is_theirs:
            return key, module
    return None


def _mixer(layer: nn.Module, index: int) -> str:
    children = [(name, child) for name, child in layer.named_children() if child is not None]
    for name, child in children:
        if getattr(child, "layer_idx", None) == index:
            return name
    names = [name for name, child in children if any(isinstance(part, nn.Linear) for part in child.modules())]
    return next((name for name in ("mixer", *names) if hasattr(layer, name)), children[0][0] if children else "")
