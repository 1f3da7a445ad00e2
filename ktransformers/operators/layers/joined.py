"""Finds the neighbouring layers that one module may compute, and fills the places of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.operators.layers.traced import LayerCall, keep_attention_type

__all__ = ["Done", "handed"]


class Done(nn.Module):
    """Placeholder for a layer that a stack before it has computed."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        keep_attention_type(self, layer)

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def handed(calls: Sequence[LayerCall]) -> list[int]:
    """Return, for each layer, the first layer that was given the same arguments."""
    return [next(first for first in range(i + 1) if _is_same(calls[first], calls[i])) for i in range(len(calls))]


def _is_same(one: LayerCall, other: LayerCall) -> bool:
    if one.kwargs.keys() != other.kwargs.keys():
        return False
    return all(_is_alike(value, other.kwargs[name]) for name, value in one.kwargs.items()) and _is_alike(
        one.args, other.args
    )


def _is_alike(one: object, other: object) -> bool:
    """Models hand on the same tensors, or parts of the same one."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.data_ptr() == other.data_ptr()
    return one is other or (isinstance(one, int | float | str) and one == other)
