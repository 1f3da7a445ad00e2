"""Finds which decoder layers launch the same kernels, so that a warm-up runs one of each kind.

Layers are of one kind when the plan says the same of all that is in them, their caches have the same shape, and their
modules are of the same classes with the same numbers: heads, windows, whether they rotate. What a layer is handed
follows from the layer before it, whose kind counts therefore too. Knows plans, modules and shapes; no kernels.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ktransformers.cache.paged import LayerShape
from ktransformers.operators.layers.gpu import LayerStack
from ktransformers.operators.layers.traced import layer_list
from ktransformers.operators.recorder import replaced_forwards
from ktransformers.optimize.plan import Plan

__all__ = ["layer_kinds", "made_of", "one_of_each"]

logger = logging.getLogger(__name__)

_PLACES = frozenset({"layer", "layer_idx", "layer_number", "layer_id", "_layer", "number", "key", "config"})
"""Attributes by which a layer's modules know which one they are, and the model's own."""
_PLAIN = (bool, int, float, str, enum.Enum, torch.dtype, torch.device, type(None))
_DEPTH = 5  # of an operator's attribute: to the matrices of experts, in one of its paths
_FIRST = -1  # stands before the first layer of all, or of a stack

_Numbers: TypeAlias = object  # of a module, nested tuples


def layer_kinds(model: nn.Module, plan: Plan, shapes: Sequence[LayerShape]) -> list[int]:
    """Return the kind of each decoder layer, numbered by first use; empty, with a line in the log, when they cannot be
    told.

    model: with its operators loaded, its layers joined or not. shapes: of the layers' caches.
    """
    layers = _layers(model)
    if not len(layers) == len(plan.layer_devices) == len(shapes):
        logger.info("a warm-up runs all layers: %d are in a list, %d in the plan", len(layers), len(plan.layer_devices))
        return []
    known: dict[Any, int] = {}
    return [
        known.setdefault((_planned(plan, layer_device.key), _kept(shape), made_of(layer)), len(known))
        for layer_device, shape, layer in zip(plan.layer_devices, shapes, layers, strict=True)
    ]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers themselves, those of stacks too."""
    found: list[nn.Module] = []
    for index, layer in enumerate(layer_list(model) or ()):
        if index == len(found):  # others were found in a stack
            found += layer.layers if isinstance(layer, LayerStack) else [layer]
    return found


def _planned(plan: Plan, key: str) -> tuple[object, ...]:
    """What the plan says of the layer `key`."""
    return tuple(
        (
            entry.key.removeprefix(key),
            entry.hf_class,
            entry.operator,
            entry.placement,
            entry.generate_op,
            entry.prefill_op,
            entry.quant_types,
            tuple(sorted(entry.nbytes.items())),
        )
        for entry in plan.entries
        if entry.key == key or entry.key.startswith(f"{key}.")
    )


def _kept(shape: LayerShape) -> str:
    """What a cache keeps for a layer. Whose keys and values are shared does not matter, but whether."""
    return repr(shape if shape.shares is None else replace(shape, shares=0))


def made_of(layer: nn.Module) -> tuple[_Numbers, ...]:
    """Return what layers that compute the same, of whatever weights, have in common: modules, shapes and settings."""
    return tuple((name, _name_of(type(module)), _numbers(module)) for name, module in layer.named_modules())


def _name_of(kind: type) -> str:
    """Adapters of experts are classes made anew for each module, which are the same by name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _numbers(module: nn.Module) -> _Numbers:
    own = {name: value for name, value in vars(module).items() if name not in _PLACES}
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return tuple(sorted((name, repr(_plain(value))) for name, value in (*own.items(), *tensors)))


def _plain(value: object, depth: int = _DEPTH) -> object:
    """`value` as far as it is numbers and words, in tuples; of anything else its type."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device
    if depth and isinstance(value, tuple | list):
        return tuple(_plain(part, depth - 1) for part in value)
    if depth and is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name, None)) for field in fields(value))
        return type(value).__name__, *(_plain(part, depth - 1) for name, part in named if name not in _PLACES)
    return type(value).__name__


@contextmanager
def one_of_each(model: nn.Module, kinds: Sequence[int]) -> Iterator[list[int]]:
    """Run, in forwards inside the block, one layer for each kind and kind before it; the others give what that layer
    gave.

    kinds: of the layers, as `layer_kinds` has them; all layers run when there are none. Yields the layers that run.
    """
    layers = layer_list(model)
    if layers is None or not kinds:
        yield list(range(0 if layers is None else len(layers)))
        return
    chooser = _Chooser(kinds)
    # A stack of layers stands where the first of them stood, and nothing that runs where the others did.
    stand_ins = [(layer, chooser.stand_in(layer)) for index, layer in enumerate(layers) if index >= chooser.done]
    logger.debug("a warm-up runs layers %s of %d", ", ".join(map(str, chooser.run)), len(kinds))
    with replaced_forwards(stand_ins):
        yield chooser.run


class _Chooser:
    """Goes through the layers. done: those that it has seen; run: of these, the ones that run."""

    def __init__(self, kinds: Sequence[int]):
        self.kinds, self.done, self.run = kinds, 0, list[int]()
        self._joined, self._alone = set[tuple[int, int]](), set[tuple[int, int]]()
        self._outputs: dict[int, Any] = {}  # of layers that are in no stack, by kind, in this step

    def stand_in(self, layer: nn.Module) -> Callable[..., Any]:
        """Return what takes the place of the next layer's forward, or of the stack's."""
        first = self.done
        if isinstance(layer, LayerStack):
            self.done += len(layer.layers)
            chosen = _chosen(self.kinds[first : self.done], self._joined)
            self.run += [first + one for one in chosen]
            return layer.picked(chosen).forward if chosen else _handing_on
        self.done += 1
        pair = self.kinds[first - 1] if first else _FIRST, self.kinds[first]
        if pair in self._alone:
            return _repeating(self._outputs, pair[1])
        self._alone.add(pair)
        self.run.append(first)
        return _noting(layer.forward, self._outputs, pair[1])


def _handing_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A stack of which no layer runs."""
    return hidden_states


def _noting(forward: Callable[..., Any], outputs: dict[int, Any], kind: int) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        outputs[kind] = forward(*args, **kwargs)
        return outputs[kind]

    return noting


def _repeating(outputs: dict[int, Any], kind: int) -> Callable[..., Any]:
    return lambda *args, **kwargs: outputs[kind]


def _chosen(kinds: Sequence[int], seen: set[tuple[int, int]]) -> list[int]:
    """Layers of a stack among which is each pair of neighbours that is not in `seen`, where it is put.

    Only kinds that are neighbours in the stack follow each other.
    """
    chosen, before = list[int](), _FIRST
    for index, kind in enumerate(kinds):
        if (before, kind) not in seen:
            seen.add((before, kind))
            last = chosen[-1] if chosen else -1
            chosen += [*_between(kinds, last, index), index]
        before = kind
    return chosen


def _between(kinds: Sequence[int], last: int, index: int) -> range:
    """Layers to be run behind `last`, so that what `index` is handed is of the kind that is before it."""
    if last < 0:
        return range(index)  # from the beginning: what a stack begins with has no layer before it
    same = max(i for i in range(last, index) if kinds[i] == kinds[last])
    return range(same + 1, index)
