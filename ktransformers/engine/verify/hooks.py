"""Hooks in front of a model's decoder layers: what goes in and comes out, and which of them run.

Knows how models of transformers hand hidden states from layer to layer, and nothing of what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LayerHooks", "ModuleCall", "Trace", "hooked", "model_layers", "recorded_calls"]


@dataclass(slots=True)
class Trace:
    """The trace of one pass of a model. inputs, outputs: of the layers that were computed, fp32 [..., T, H] or [1, T,
    streams, H].

    logits [N, vocab].
    """

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None

    def followed_by(self, other: Trace) -> Trace:
        """Join two passes over neighbouring rows to one, with the logits of the second."""
        return Trace(_joined(self.inputs, other.inputs), _joined(self.outputs, other.outputs), other.logits)


def _joined(first: dict[int, torch.Tensor], second: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {index: torch.cat((first[index], second[index]), dim=_row_axis(first[index])) for index in first}


def _row_axis(hidden: torch.Tensor) -> int:
    """Where the rows are: before the last axis, or before that of several streams (hyper-connections)."""
    return 1 if hidden.dim() == 4 and hidden.shape[0] == 1 else hidden.dim() - 2


@dataclass(slots=True)
class LayerHooks:
    """Stands in front of the layers of a model for one pass: the selected ones run, the others hand on.

    given: what goes into a selected layer, and out of it to the next one, in place of what came; rows: of it.
    """

    selected: frozenset[int]
    given: Trace | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    trace: Trace = field(default_factory=Trace)
    rest: tuple[Any, ...] | None = None  # what layers return besides hidden states

    def call(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip layer `index`, whose own forward is given, and return what it hands to the next layer."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if index in self.selected:
            self.trace.inputs[index] = _kept(hidden)
            if self.given is not None:
                hidden = self._from(self.given.inputs[index], hidden)
            new = {"hidden_states": hidden.clone()} if not args else {}
            output = forward(*((hidden.clone(), *args[1:]) if args else ()), **{**kwargs, **new})
            hidden, self.rest = (output[0], tuple(output[1:])) if isinstance(output, tuple) else (output, None)
            self.trace.outputs[index] = _kept(hidden)
            if self.given is not None:
                hidden = self._from(self.given.outputs[index], hidden)
        return hidden if self.rest is None else (hidden, *self.rest)

    def _from(self, given: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        axis = _row_axis(like)
        return given[(*[slice(None)] * axis, self.rows)].to(like)


def _kept(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.detach().to("cpu", torch.float32, copy=True)


@contextmanager
def hooked(layers: Sequence[nn.Module], hooks: LayerHooks) -> Iterator[None]:
    """Put `hooks` in front of the layers, while the block runs."""

    def standing_in(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: hooks.call(index, forward, args, kwargs)

    for index, layer in enumerate(layers):
        layer.forward = standing_in(index, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def model_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a causal LM, wherever its family keeps them. Raises LookupError."""
    count = int(model.config.num_hidden_layers)
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != count:
            continue
        if all(any(hasattr(part, "layer_idx") for part in layer.modules()) for layer in module):
            return list(module)
    raise LookupError("its layers are in no list")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module: what went in and came out, the first tensors of either, fp32 [rows, ...]."""

    taken: torch.Tensor
    given: torch.Tensor


@contextmanager
def recorded_calls(layer: nn.Module) -> Iterator[dict[str, ModuleCall]]:
    """Record the calls of the modules inside `layer` by name, in the order in which they end.

    An operator that stands in for a module has the module's name.
    """
    calls: dict[str, ModuleCall] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        taken, given = _first_floats(*args, *kwargs.values()), _first_floats(output)
        if taken is not None and given is not None:
            calls.pop(name, None)
            calls[name] = ModuleCall(_kept(taken), _kept(given))

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs, output: note(name, args, kwargs, output)

    handles = [
        module.register_forward_hook(hook(_plain_name(name)), with_kwargs=True)
        for name, module in layer.named_modules()
        if _plain_name(name)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "inner")


def _first_floats(*values: Any) -> torch.Tensor | None:
    flat = [part for value in values for part in (value if isinstance(value, tuple | list) else (value,))]
    return next((part for part in flat if isinstance(part, torch.Tensor) and part.is_floating_point()), None)
