"""Layers on a GPU that were joined to stacks, compared with what they computed one by one.

A stack hands all its layers what the model hands to the first of them, and adds and norms in launches of its own. Pairs
of neighbours are compared, each given what its first layer was given before, so that rounding does not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ktransformers.cache.paged import LayerShape
from ktransformers.cache.static import StaticCache
from ktransformers.engine.step.context import static_context
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.layout import StepLayout
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.layers.gpu import LayerStack
from ktransformers.operators.layers.traced import decoder_layers

__all__ = ["StackCheck"]

_ROWS = 8
_MOST_PAIRS = 4
_FLOOR, _MARGIN = {torch.float32: 1e-4, torch.bfloat16: 3e-2}, 8.0
"""Of what two layers change, as in the self check: a wrong formula is off by more."""


@dataclass(slots=True)
class _Call:
    """Of a layer or a stack: what it was given and computed."""

    hidden: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


@dataclass(slots=True)
class StackCheck:
    """The check of joined layers: `begin` before layers are joined, `compare` afterwards. num_tokens: in the
    vocabulary."""

    model: Any
    shapes: list[LayerShape]
    pool: WorkerPool
    layout: StepLayout
    num_tokens: int
    _alone: list[_Call] = field(default_factory=list)

    def begin(self) -> None:
        """Keep what each layer is given and computes."""
        layers = decoder_layers(self.model)
        self._alone = self._watched(layers) if layers else []

    @torch.inference_mode()
    def _watched(self, modules: Sequence[nn.Module]) -> list[_Call]:
        """A step, and what modules that run one after the other did in it."""
        calls: list[_Call] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            hidden = args[0] if args else kwargs["hidden_states"]
            output = output[0] if isinstance(output, tuple) else output
            calls.append(_Call(hidden.clone(), args[1:], rest, output.clone()))

        ids = torch.randint(0, self.num_tokens, (_ROWS,), generator=torch.Generator().manual_seed(13))
        runner = ModelRunner(ForwardPass(self.model, self.pool, self.layout, announce=False))
        context = static_context(StaticCache([shape.unrounded() for shape in self.shapes], _ROWS), self.pool, 0, _ROWS)
        handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
        try:
            runner.step(ids, torch.arange(_ROWS), context, torch.tensor([_ROWS - 1]))
        finally:
            for handle in handles:
                handle.remove()
        return calls

    @torch.inference_mode()
    def compare(self) -> None:
        """Raise UnsupportedError, which names the layers that a stack computes otherwise."""
        if not self._alone:
            return
        layers = decoder_layers(self.model)
        stacks = [(first, layer) for first, layer in enumerate(layers) if isinstance(layer, LayerStack)]
        for (first, stack), call in zip(stacks, self._watched([stack for _, stack in stacks]), strict=True):
            for start in _spread(max(len(stack.layers) - 1, 1), _MOST_PAIRS):
                part = stack.part(start, start + 2)
                alone = self._alone[first + start : first + start + len(part.layers)]
                got = part(alone[0].hidden.clone(), *call.args, **call.kwargs)
                off = _off(got, alone[-1].output, alone[0].hidden)
                if off is not None:
                    raise UnsupportedError(
                        f"layers {first + start} to {first + start + len(part.layers) - 1} differ, joined, from what "
                        f"they compute one by one: {off}, so its answers would be wrong; no test covers this family. "
                        "Please report it; --no_self_check runs it anyway"
                    )


def _spread(count: int, most: int) -> list[int]:
    """Numbers below `count`, the first and the last among them, at most `most`."""
    return sorted({round(nth * (count - 1) / (most - 1)) for nth in range(most)})


def _off(got: torch.Tensor, want: torch.Tensor, given: torch.Tensor) -> str | None:
    """By how much, in words; None when it is near enough. Rows that are sent to other experts are few."""
    # Norms of some families widen what they are given, which a stack does not.
    coarse = max(got.dtype, want.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    floor, bits = _FLOOR.get(coarse, 3e-2), torch.finfo(coarse).eps
    got, want, given = got.float(), want.float(), given.float()
    size: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows.norm(dim=-1)  # noqa: E731
    change = size(want - given).clamp_min(torch.finfo(torch.float32).tiny)
    off, allowed = size(got - want) / change, floor + _MARGIN * bits * size(want) / change
    value, most = float(off.median()), float(allowed.median())
    return None if value <= most else f"off by {value:.2g}, of which rounding explains {most:.2g}"
