"""Layers on a GPU that were joined to stacks, compared with what they computed one by one.

A stack hands all its layers what the model hands to the first of them, and adds and norms in launches of its own. Pairs
of neighbours are compared, each given what its first layer was given before, so that rounding does not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ktransformers.engine.verify.checked_model import CheckedModel
from ktransformers.errors import UnsupportedError
from ktransformers.operators.comparison import Tolerance, difference
from ktransformers.operators.layers.gpu import LayerStack
from ktransformers.operators.layers.traced import decoder_layers
from ktransformers.operators.recorder import RecordedCall, recorded_calls, tensors_in

__all__ = ["StackCheck"]

_ROWS = 8
_MOST_PAIRS = 4
_FLOOR, _MARGIN = {torch.float32: 1e-4, torch.bfloat16: 3e-2}, 8.0
"""Of what two layers change, as in the self check: a wrong formula is off by more."""


@dataclass(slots=True)
class StackCheck:
    """The check of joined layers: `begin` before layers are joined, `compare` afterwards. num_tokens: in the
    vocabulary."""

    checked: CheckedModel
    num_tokens: int
    _alone: list[RecordedCall] = field(default_factory=list)

    def begin(self) -> None:
        """Keep what each layer is given and computes."""
        self._alone = self._recorded(decoder_layers(self.checked.model))

    @torch.inference_mode()
    def _recorded(self, modules: Sequence[nn.Module]) -> list[RecordedCall]:
        """The calls, in a step, of modules that run one after the other."""
        ids = torch.randint(0, self.num_tokens, (_ROWS,), generator=torch.Generator().manual_seed(13))
        with recorded_calls(enumerate(modules)) as calls:
            self.checked.step(ids, self.checked.cache(_ROWS), 0, torch.tensor([_ROWS - 1]))
        return calls

    @torch.inference_mode()
    def compare(self) -> None:
        """Raise UnsupportedError, which names the layers that a stack computes otherwise."""
        if not self._alone:
            return
        layers = decoder_layers(self.checked.model)
        stacks = [(first, layer) for first, layer in enumerate(layers) if isinstance(layer, LayerStack)]
        for (first, stack), call in zip(stacks, self._recorded([stack for _, stack in stacks]), strict=True):
            rest = {name: value for name, value in call.kwargs.items() if name != "hidden_states"}
            for start in _spread(max(len(stack.layers) - 1, 1), _MOST_PAIRS):
                part = stack.part(start, start + 2)
                alone = self._alone[first + start : first + start + len(part.layers)]
                given = alone[0].hidden_states
                got = part(given.clone(), *call.args[1:], **rest)
                off = _off(got, next(tensors_in(alone[-1].output)), given)
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
    """By how much, in words; None when it is near enough."""
    # Norms of some families widen what they are given, which a stack does not.
    coarse = max(got.dtype, want.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    tolerance = Tolerance(_FLOOR.get(coarse, 3e-2), torch.finfo(coarse).eps, _MARGIN)
    return difference(got, want, tolerance, given=given)
