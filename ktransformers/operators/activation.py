"""Activation functions on native kernels, recognized by asking the module rather than by family or name.

Torch computes the last elements of a tensor, and the ends of each thread's share, with other code than the rest; the
last bit of silu(x) then depends on where x stands, that is on how many rows a step has. The native kernels do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from ktransformers.core import Phase
from ktransformers.kernels import cpu
from ktransformers.kernels.triton import elementwise
from ktransformers.kernels.types import Activation, ActivationSpec
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import Device, give_back, use
from ktransformers.operators.wrapper import WrapperOperator

__all__ = [
    "PLAIN_ACTIVATIONS",
    "KActivation",
    "activate",
    "first_equal",
    "gated_reference",
    "recognize_activation",
    "sigmoid",
]

_REFERENCES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.RELU2: lambda x: functional.relu(x).square(),
    Activation.SIGMOID: torch.sigmoid,
}

PLAIN_ACTIVATIONS = tuple(ActivationSpec(kind) for kind in _REFERENCES)
"""Every activation of one argument that a native kernel computes."""


def gated_reference(spec: ActivationSpec, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """act(gate) * up in plain torch, or act(gate) without up; what probes compare a module with."""
    if spec.kind is Activation.SWIGLU_OAI:
        if up is None:
            return gate.new_empty(0)  # equals nothing: this activation has no form without a second argument
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return gate * torch.sigmoid(spec.alpha * gate) * (up + 1)
    acted = _REFERENCES[spec.kind](gate)
    return acted if up is None else acted * up


def probe_rows(cols: int) -> torch.Tensor:
    """Fixed random rows [64, cols] that reach beyond +-20, to tell clamped activations from unclamped ones."""
    return torch.randn(64, cols, generator=torch.Generator().manual_seed(0)) * 8


def first_equal(
    candidates: Iterable[ActivationSpec], want: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None
) -> ActivationSpec | None:
    """The first candidate whose act(gate) * up is `want`, up to rounding."""
    for spec in candidates:
        got = gated_reference(spec, gate, up)
        if got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5):
            return spec
    return None


def sigmoid(x: torch.Tensor, pool: cpu.WorkerPool) -> torch.Tensor:
    """Logistic function of fp32 x of any shape, independent of an element's place."""
    return cpu.activate(ActivationSpec(Activation.SIGMOID), None, x.contiguous(), pool)


def activate(
    spec: ActivationSpec,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    device: Device,
    pool: cpu.WorkerPool | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(gate) * up, or act(up), of any shape [..., I], on `device`; `out` may be gate. The pool is for the CPU."""
    if not device.is_gpu:
        assert pool is not None, "built for planning only"
        return cpu.activate(spec, None if gate is None else gate.contiguous(), up.contiguous(), pool, out=out)
    use(device.torch_device)
    width = up.shape[-1]
    rows = None if gate is None else gate.reshape(-1, width)
    return elementwise.activate(spec, rows, up.reshape(-1, width)).view(up.shape)


def recognize_activation(module: nn.Module) -> ActivationSpec | None:
    """The native activation that equals `module` on random rows, or None when none does."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()) or type(module) is nn.Identity:
        return None
    rows = probe_rows(32)
    try:
        want: Any = module(rows)
    except Exception:  # noqa: BLE001 - any module of any family may be asked, and may refuse in any way
        return None
    return first_equal(PLAIN_ACTIVATIONS, want, rows, None) if isinstance(want, torch.Tensor) else None


class KActivation(WrapperOperator):
    """An activation module (`act_fn`): fp32 [...] in and out. Kinds that no kernel knows keep their own forward."""

    OPS: ClassVar[dict[str, str]] = {
        "KActivationNative": "native kernel",
        "KActivationTriton": "Triton kernel",
        "KActivationTorch": "the module's own forward (no kernel computes it)",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.spec = recognize_activation(module)

    def op(self, phase: Phase) -> str:
        if self.spec is None:
            return "KActivationTorch"
        return "KActivationTriton" if self.device.is_gpu else "KActivationNative"

    def bypassed(self) -> Iterable[nn.Module]:
        return () if self.spec is None else (self.inner,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.device.take(x)
        if self.spec is None:
            return give_back(self.inner(rows), x)
        return give_back(activate(self.spec, None, rows, self.device, self.config.pool), x)
