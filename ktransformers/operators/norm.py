"""RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight, or 1 + weight in some families."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.kernels import cpu
from ktransformers.kernels.triton.common import elementwise
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import to_input
from ktransformers.operators.recognize.norm import NormSpec, recognize_norm
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["KRMSNorm"]


class KRMSNorm(WrapperOperator):
    """Operator of RMSNorm over the last axis of [..., H], weights from 0 or from 1; other norms keep the module's own
    forward.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KRMSNormNative": "native kernel",
        "KRMSNormTriton": "Triton kernel",
        "KNormTorch": "the module's own forward (not RMSNorm)",
    }

    @classmethod
    @override
    def is_for(cls, module: nn.Module) -> bool:
        """Whether a module is a norm: blocks of norms and other parts may be called norms too (DBRX), and what scales
        keys and queries (ZAYA).
        """
        own = {name for name, _ in module.named_parameters(recurse=False)}
        is_block = any(True for child in module.children() for _ in child.parameters())
        return not is_block and (not own or "weight" in own)

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.spec: NormSpec | None = recognize_norm(module)

    @override
    def op(self, phase: Phase) -> str:
        if self.spec is None:
            return "KNormTorch"
        return "KRMSNormTriton" if self.device.is_gpu else "KRMSNormNative"

    @override
    def state(self) -> DenseState:
        # The kernel takes a weight of any type; a module's own forward would widen its result to the weight's.
        return DenseState(self.inner, self.key, self.device, torch.float32 if self.spec is not None else None)

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        if self.spec is not None and self.spec.offset:  # added here, once, so that kernels know one formula
            self.inner._parameters["weight"] = nn.Parameter(self.weight + self.spec.offset, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """Weight that kernels multiply with: fp32 [H] where one does."""
        return self.inner.weight  # type: ignore[return-value]

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.device.to_device(hidden_states)
        rows = x.reshape(-1, x.shape[-1])
        if self.spec is None:
            normed = self.inner(x)
        elif self.device.is_gpu:
            normed = elementwise.rms_norm(rows, self.weight, self.spec.eps).view(x.shape)
        else:
            normed = cpu.rms_norm(rows.contiguous(), self.weight, self.spec.eps, self.config.require_pool()).view(
                x.shape
            )
        return to_input(normed, hidden_states)
