"""Operators that keep the Hugging Face module's own forward and only own its direct parameters.

The wrapped module stays the parent of its children, so children that rules replace are replaced inside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.operators.base import Operator, OperatorConfig, Placement, Requirements, expect_shape
from ktransformers.operators.device import CPU, Device
from ktransformers.weights.source import WeightSource

__all__ = ["DenseState", "WrapperOperator"]

_SHOWN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class DenseState:
    """The direct parameters and persistent buffers of one module, dense: fp32 on the CPU, the device's type on a GPU.

    dtype: another type, for modules that compute in it.
    """

    def __init__(self, module: nn.Module, key: str, device: Device = CPU, dtype: torch.dtype | None = None):
        self.module, self.key, self.device, self.dtype = module, key, device, dtype or device.dtype

    def names(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return (name, shape) of everything that a checkpoint holds for the module itself."""
        transient = self.module._non_persistent_buffers_set
        state: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in self.module._parameters.items() if p is not None]
        state += [(n, b) for n, b in self.module._buffers.items() if b is not None and n not in transient]
        return [(name, tuple(tensor.shape)) for name, tensor in state]

    def requirements(self, source: WeightSource) -> Requirements:
        """Return what loading these tensors takes, see Operator.requirements."""
        needs, device = Requirements(), self.device.name
        shown = _SHOWN[self.dtype]
        for name, shape in self.names():
            info = expect_shape(source.find(f"{self.key}.{name}"), f"{self.key}.{name}", shape)
            needs.stored_names.update(info.stored_names)
            needs.nbytes[device] = needs.nbytes.get(device, 0) + self.dtype.itemsize * torch.Size(shape).numel()
            if shown not in needs.quant_types:
                needs.quant_types.append(shown)
        return needs

    def load(self, source: WeightSource) -> None:
        """Load the tensors, see Operator.load."""
        for name, shape in self.names():
            full = f"{self.key}.{name}"
            expect_shape(source.find(full), full, shape)
            tensor = source.dense(full).to(self.device.torch_device, self.dtype)
            if name in self.module._parameters:
                self.module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                self.module._buffers[name] = tensor


class WrapperOperator(Operator):
    """Base of operators that run the wrapped module's own forward and change only how it is run."""

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.inner = module

    def state(self) -> DenseState:
        """Return the module's own tensors, and their type."""
        return DenseState(self.inner, self.key, self.device)

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        return self.state().requirements(source)

    @override
    def load(self, source: WeightSource) -> None:
        self.state().load(source)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)
