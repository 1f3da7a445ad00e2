"""Shapes for --synthetic that are no published model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from transformers import PretrainedConfig

from ktransformers.models.synthetic_shapes import PublishedShape

__all__ = ["made_shape"]


def made_shape(name: str, num_layers: int, make: Callable[[int], PretrainedConfig]) -> PublishedShape:
    """One whose config for so many layers is what `make` returns."""

    def kind(*, num_hidden_layers: int, **_: object) -> PretrainedConfig:
        return make(num_hidden_layers)

    return PublishedShape(name, num_layers, cast(type[PretrainedConfig], kind), "", lambda num_layers: {})
