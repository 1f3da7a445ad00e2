"""Checks whether a stage gets all that its layers need from the one before, and gives all that the next one's need.

Hidden states are what goes from stage to stage. Models that hand more from layer to layer, or to all layers what they
made of embeddings, or compute something of hidden states before or behind their layers, show it in two steps of a
loaded stage that other hidden states come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ktransformers.engine.parallel.pipeline.link import Incoming, Outgoing
from ktransformers.errors import UnsupportedError
from ktransformers.operators.layers.traced import layer_list

__all__ = ["check_stage_io"]


def check_stage_io(model: nn.Module, kind: str, step: Callable[[], object]) -> None:
    """Run `step`, twice in a stage behind others. kind: of the model.

    Raises UnsupportedError where a stage would lack what other layers have made.
    """
    layers = layer_list(model)
    borders = _StageIo(model, kind)
    if layers is None or not borders:
        return
    hooks = [
        layer.register_forward_pre_hook(partial(borders.entered, i), with_kwargs=True) for i, layer in enumerate(layers)
    ]
    hooks.append(layers[len(layers) - 1].register_forward_hook(borders.left))
    if borders.outgoing is not None:
        hooks.append(borders.outgoing.register_forward_pre_hook(borders.goes_out))
    try:
        step()
        if borders.incoming is not None:
            first, link = borders.take(), borders.incoming.link
            link.seed += 1
            step()
            link.seed -= 1
            borders.compare(first, borders.take())
    finally:
        for hook in hooks:
            hook.remove()


class _StageIo:
    """What is seen in a step at the ends of a stage, if it has any."""

    def __init__(self, model: nn.Module, kind: str):
        self.incoming = next((module for module in model.modules() if isinstance(module, Incoming)), None)
        self.outgoing = next((module for module in model.modules() if isinstance(module, Outgoing)), None)
        self._kind = kind
        self._given: torch.Tensor | None = None
        self._beside: dict[int, list[torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return self.incoming is not None or self.outgoing is not None

    def take(self) -> dict[int, list[torch.Tensor]]:
        """Return what layers were handed beside hidden states since the last call."""
        taken, self._beside = self._beside, {}
        return taken

    def entered(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if index == 0 and self.incoming is not None:
            seen = self.incoming.seen.to(hidden.dtype)  # as layers on a GPU take it
            self._check_same(seen, hidden, "before its first layer")
        rest = list(_tensors([args[1:], {name: value for name, value in kwargs.items() if value is not hidden}]))
        self._beside[index] = [tensor.detach().clone() for tensor in rest]

    def left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._given, *more = _tensors(output)
        if more and self.outgoing is not None:
            self._refuse("hands more than hidden states from layer to layer")

    def goes_out(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert self._given is not None
        self._check_same(self._given, args[0], "behind its last layer")

    def compare(self, one: dict[int, list[torch.Tensor]], other: dict[int, list[torch.Tensor]]) -> None:
        """Compare what layers are handed in two steps, which has to be the same but for hidden states."""
        for index, tensors in one.items():
            others = other[index]
            if len(tensors) != len(others) or not all(map(_is_same, tensors, others)):
                self._refuse("hands its layers what it makes of embeddings or of other layers")

    def _check_same(self, one: torch.Tensor, other: torch.Tensor, where: str) -> None:
        if not _is_same(one, other):
            self._refuse(f"{where}, computes what cannot be cut from it")

    def _refuse(self, what: str) -> None:
        raise UnsupportedError(f"--pipeline: model type {self._kind}, {what}")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bits alike, those of numbers that are none, too; however many axes they are on."""
    bits = [rows.float().cpu().contiguous().view(torch.int32).flatten() for rows in (one, other)]
    return torch.equal(*bits)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """All that there are in `values`."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
