"""Checks what a model's config asks for by the files that it comes with, before anything is sized by it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ktransformers.errors import ConfigError, KTransformersError, TensorMismatchError
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.source import TensorInfo, WeightSource

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_config_values", "check_layers", "check_parameters"]

MAX_NUMBER = 1 << 53  # more is no count, and no float
MAX_COUNT = 1 << 16
MAX_DEPTH = 64
SMALL = 1 << 20  # elements of a tensor that may be wrong here: the plan names all such tensors together
SOME_LAYERS = 100  # that may be missing: the plan names what is
PACKED = 8  # weights in an element: safetensors may hold blocks as bytes
_COUNTED = re.compile(r"(layers?|labels|experts|heads|blocks|interval|depth|streams|codebooks|groups?)$")


def check_config_values(values: Mapping[str, Any], where: str) -> None:
    """Refuse numbers in a config.json that no model has, before a config class makes lists of that length of them.

    Raises ConfigError, which begins with `where`.
    """
    waiting: list[tuple[str, object, int]] = [("", values, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where} is nested deeper than {MAX_DEPTH}; it is not a model's config")
        if isinstance(value, dict):
            waiting.extend((str(name), item, depth + 1) for name, item in value.items())
        elif isinstance(value, list):
            waiting.extend((key, item, depth + 1) for item in value)
        elif isinstance(value, int):
            most = MAX_COUNT if _COUNTED.search(key) else MAX_NUMBER
            if abs(value) > most:
                shown = str(value) if abs(value) < 1 << 64 else f"a number of {value.bit_length()} bits"
                raise ConfigError(f"{where} says {key!a:.60} {shown}, which no model has")


def check_layers(facts: ModelFacts, shapes: Sequence[Sequence[int]]) -> None:
    """Refuse more layers than the files have tensors. shapes: of all tensors. Raises TensorMismatchError."""
    if facts.num_layers > max(len(shapes), SOME_LAYERS):
        raise TensorMismatchError(
            f"the model's config says {facts.num_layers} layers, but the files hold {len(shapes)} tensors"
        )


def check_parameters(model: nn.Module, source: WeightSource, shapes: Sequence[Sequence[int]]) -> None:
    """Refuse a skeleton with a parameter that is larger than what the files hold for it. Raises TensorMismatchError.

    Small ones pass: what is wrong with them is said together with all others by the plan. shapes: of all tensors.
    """
    most = PACKED * sum(math.prod(shape) for shape in shapes)
    for name, parameter in model.named_parameters():
        if parameter.numel() <= SMALL:
            continue
        if parameter.numel() > most:
            raise TensorMismatchError(
                f"the model's config needs {name} of shape {tuple(parameter.shape)}, more than the files hold in all; "
                "they do not belong together, or a file is missing"
            )
        info = _find(source, name)
        if info is not None and math.prod(info.shape) != parameter.numel():
            raise TensorMismatchError(
                f"tensor {name} has shape {tuple(info.shape)}, the model's config needs {tuple(parameter.shape)}; "
                "the weights and the model's config do not belong together, or a file is missing"
            )


def _find(source: WeightSource, name: str) -> TensorInfo | None:
    try:
        return source.find(name)
    except KTransformersError:  # the plan says so, with everything else
        return None
