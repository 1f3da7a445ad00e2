"""Base of operators of recurrent layers: which modules they are for, their state, their small parameters in fp32.

A recurrent layer's module is a mixer: it brings positions together, through a state instead of keys and values. The
operator computes what the module of `transformers` does, over slots of states (kernels.types.StateStep); projections
stay children of that module, and are planned for themselves. Knows one layer, not who owns which slot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.cache.state import StateShape
from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.operators.base import OperatorConfig, Placement, Requirements, layer_number
from ktransformers.operators.context import ForwardContext, StateStep
from ktransformers.operators.device import to_input
from ktransformers.operators.exact import exact_math
from ktransformers.operators.recurrent.scans import Scans
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["RecurrentOperator"]


class RecurrentOperator(WrapperOperator):
    """Base of operators of recurrent layers. Hidden states [1, T, H] in and out, of the layer device's type; the
    states' part of the step in the context.

    CHILDREN: names of the module's children, a set for each arrangement that is known. CONV: the convolution among
    them, which the operator reads itself as it does OWNED_CHILDREN. NUMBERS: attributes that have to be there.
    NEEDS_EXACT_MODE: `mix` computes in torch what must not depend on where in a tensor a value stands, throughout.
    """

    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = ()
    NUMBERS: ClassVar[tuple[str, ...]] = ()
    CONV: ClassVar[str | None] = "conv1d"
    NEEDS_EXACT_MODE: ClassVar[bool] = True

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if not self.is_for(module):
            raise UnsupportedError(f"{type(self).__name__} cannot replace {key} ({type(module).__name__})")
        self.layer_idx: int = int(module.layer_idx)  # type: ignore[arg-type]
        self.layer = layer_number(module)
        self.scans = Scans(self.device, config.pool)

    @classmethod
    @override
    def is_for(cls, module: nn.Module) -> bool:
        names = {name for name, child in module.named_children() if child is not None}
        has_numbers = all(isinstance(getattr(module, name, None), int) for name in ("layer_idx", *cls.NUMBERS))
        return has_numbers and names in cls.CHILDREN

    @override
    def op(self, phase: Phase) -> str:
        return next(iter(self.OPS))

    # What it holds.

    @abstractmethod
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each part of a sequence's state, see StateShape."""

    def state_shape(self) -> StateShape:
        """Return the shape of a sequence's state, on the operator's device."""
        return StateShape(dict(self.state_parts()), self.device.name, self.device.torch_device)

    def _states(self) -> list[DenseState]:
        """Its own parameters and those of children without an operator, fp32 wherever they are."""
        names = [name for name in sorted(self.OWNED_CHILDREN) if getattr(self.inner, name, None) is not None]
        modules = [(self.inner, self.key), *((self.inner.get_submodule(n), f"{self.key}.{n}") for n in names)]
        return [DenseState(module, key, self.device, torch.float32) for module, key in modules]

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs = Requirements()
        for state in self._states():
            needs.include(state.requirements(source))
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        for state in self._states():
            state.load(source)
        self.prepare()

    def prepare(self) -> None:
        """Make what `mix` reads of what was loaded: `a`, the rates of decays, where the module has their logarithms."""
        logs = getattr(self.inner, "A_log", None)
        if isinstance(logs, Tensor):
            self.a = -logs.float().exp()

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner, *(child for name, child in self.inner.named_children() if name in self.OWNED_CHILDREN))

    def scan_nbytes(self, num_rows: int) -> int:
        """Return the bytes that the scan of a step of so many rows works in on a GPU, beside rows in and out."""
        return 0

    # A step.

    @override
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context: ForwardContext | None = kwargs.get("forward_context")
        if context is None or context.cache.states is None:
            raise UnsupportedError(
                f"{self.key} is given no states: it runs outside of the engine, or its model does not hand keyword "
                "arguments down to it"
            )
        rows = self.device.to_device(hidden_states.reshape(-1, hidden_states.shape[-1]))
        step = context.on(rows.device).states
        assert step is not None, "the cache has states, and the step names none"
        self.device.time_part("linear", self.layer)
        with exact_math(self) if self.NEEDS_EXACT_MODE else nullcontext():
            out = self.mix(rows, context.cache.states.layer(self.layer_idx), step)
        return self.answer(to_input(out, hidden_states).view(*hidden_states.shape[:-1], -1))

    def answer(self, hidden_states: Tensor) -> Any:
        """Return a result in the form in which the module returns it."""
        return hidden_states

    @abstractmethod
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        """Compute the layer: rows [T, H] on the device -> [T, H], or what `answer` takes. states: by part, of all
        slots.
        """

    # The convolution.

    @property
    def conv(self) -> Any:
        assert self.CONV is not None, "a layer without convolution"
        return self.inner.get_submodule(self.CONV)

    def conv_shape(self) -> tuple[int, int]:
        """Return the shape of the convolution's part of a state: [width - 1, channels]."""
        return int(self.conv.kernel_size[0]) - 1, int(self.conv.in_channels)

    def convolve(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep, activation: str) -> Tensor:
        """Run the convolution over rows [T, channels] -> the same, fp32."""
        conv = self.conv
        return self.scans.causal_conv(rows, conv.weight[:, 0], conv.bias, states["conv"], step, activation)
