"""Activation functions on native kernels.

Torch computes the last elements of a tensor, and the ends of each thread's share, with other code than the rest; the
last bit of silu(x) then depends on where x stands, that is on how many rows a step has. The native kernels do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.kernels import cpu
from ktransformers.kernels.triton.common import elementwise
from ktransformers.kernels.types import Activation, ActivationSpec
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import Device, to_input, use
from ktransformers.operators.recognize.activation import recognize_activation
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KActivation", "activate", "sigmoid"]


def sigmoid(x: torch.Tensor, pool: cpu.WorkerPool) -> torch.Tensor:
    """Compute the logistic function of fp32 x of any shape, independent of an element's place."""
    return cpu.activate(ActivationSpec(Activation.SIGMOID), None, x.contiguous(), pool)


def activate(
    spec: ActivationSpec,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    device: Device,
    pool: cpu.WorkerPool | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute act(gate) * up, or act(up), of any shape [..., I], on `device`; `out` may be gate. The pool is for the
    CPU.
    """
    if not device.is_gpu:
        assert pool is not None, "built for planning only"
        return cpu.activate(spec, None if gate is None else gate.contiguous(), up.contiguous(), pool, out=out)
    use(device.torch_device)
    width = up.shape[-1]
    rows = None if gate is None else gate.reshape(-1, width)
    return elementwise.activate(spec, rows, up.reshape(-1, width)).view(up.shape)


class KActivation(WrapperOperator):
    """Operator of an activation module (`act_fn`): fp32 [...] in and out. Kinds that no kernel knows keep their own
    forward.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KActivationNative": "native kernel",
        "KActivationTriton": "Triton kernel",
        "KActivationTorch": "the module's own forward (no kernel computes it)",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.spec = recognize_activation(module)

    @override
    def op(self, phase: Phase) -> str:
        if self.spec is None:
            return "KActivationTorch"
        return "KActivationTriton" if self.device.is_gpu else "KActivationNative"

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return () if self.spec is None else (self.inner,)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.device.to_device(x)
        if self.spec is None:
            return to_input(self.inner(rows), x)
        return to_input(activate(self.spec, None, rows, self.device, self.config.pool), x)
