"""Runs some decoder layers of a model in one pass, and keeps what goes into them and what comes out.

Knows how models of transformers hand hidden states from layer to layer, and nothing of what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktransformers.models.layers import find_layers
from ktransformers.operators.recorder import RecordedCall, fp32_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LayerPass", "Trace", "model_layers"]


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
class LayerPass:
    """Runs the layers of a model for one pass, by `operators.recorder.intercepted`: the selected ones run, the others
    hand on.

    given: what goes into a selected layer, and out of it to the next one, in place of what came; rows: of it.
    """

    selected: frozenset[int]
    given: Trace | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    trace: Trace = field(default_factory=Trace)
    rest: tuple[Any, ...] | None = None  # what layers return besides hidden states

    def run(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run or skip layer `index`, whose own forward is given, and return what it hands to the next layer."""
        hidden = RecordedCall(index, args, kwargs).hidden_states
        if index in self.selected:
            self.trace.inputs[index] = fp32_copy(hidden)
            hidden = self._replaced("inputs", index, hidden).clone()
            output = forward(hidden, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": hidden})
            hidden, self.rest = (output[0], tuple(output[1:])) if isinstance(output, tuple) else (output, None)
            self.trace.outputs[index] = fp32_copy(hidden)
            hidden = self._replaced("outputs", index, hidden)
        return hidden if self.rest is None else (hidden, *self.rest)

    def _replaced(self, side: str, index: int, hidden: torch.Tensor) -> torch.Tensor:
        if self.given is None:
            return hidden
        given: torch.Tensor = getattr(self.given, side)[index]
        return given[(*[slice(None)] * _row_axis(hidden), self.rows)].to(hidden)


def model_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a causal LM, wherever its family keeps them. Raises LookupError."""
    found = find_layers(model)
    if found is None:
        raise LookupError("its layers are in no list")
    return list(found[1])
