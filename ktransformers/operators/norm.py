"""RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

import copy
import logging
from typing import Any, ClassVar

import torch
from torch import nn

from ktransformers.core import Phase
from ktransformers.kernels import cpu
from ktransformers.kernels.triton import elementwise
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import give_back
from ktransformers.operators.wrapper import DenseState, WrapperOperator

__all__ = ["KRMSNorm", "computes_rms_norm", "norm_epsilon"]

logger = logging.getLogger(__name__)

_refused: set[type[nn.Module]] = set()  # kinds that the log has named


def norm_epsilon(module: nn.Module) -> float | None:
    """What an RMSNorm module adds to the mean square; None for a module that does not say."""
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def computes_rms_norm(module: nn.Module) -> bool:
    """Whether `module` computes plain RMSNorm, found by running a copy of it on random rows.

    Asking the module is what keeps this free of family names: some families add 1 to the weight, subtract the mean,
    or have no weight, and their class names do not tell. Modules of one class may differ, so each is asked.
    """
    is_plain, kind = _probe(module), type(module)
    if not is_plain and kind not in _refused:
        _refused.add(kind)
        logger.info("%s is not plain RMSNorm: it keeps its own forward", kind.__name__)
    return is_plain


def _probe(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), norm_epsilon(module)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None:
        return False
    if any(p is not weight for p in module.parameters()):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, weight.shape[0], generator=generator)
    twin: Any = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        scale = torch.rand(weight.shape, generator=generator) + 0.5
        twin.weight.copy_(scale)
        try:
            got = twin(rows)
        except (RuntimeError, TypeError, ValueError):
            return False  # not a norm over the last axis of one tensor
    want = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * scale
    return isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want, atol=1e-5)


class KRMSNorm(WrapperOperator):
    """RMSNorm over the last axis of [..., H]; other norms keep the module's own forward."""

    OPS: ClassVar[dict[str, str]] = {
        "KRMSNormNative": "native kernel",
        "KRMSNormTriton": "Triton kernel",
        "KNormTorch": "the module's own forward (not plain RMSNorm)",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.is_native = computes_rms_norm(module)
        self.eps = norm_epsilon(module) or 0.0

    def op(self, phase: Phase) -> str:
        if not self.is_native:
            return "KNormTorch"
        return "KRMSNormTriton" if self.device.is_gpu else "KRMSNormNative"

    def state(self) -> DenseState:
        # The kernel takes a weight of any type; a module's own forward would widen its result to the weight's.
        return DenseState(self.inner, self.key, self.device, torch.float32 if self.is_native else None)

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight  # type: ignore[return-value]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.device.take(hidden_states)
        rows = x.reshape(-1, x.shape[-1])
        if not self.is_native:
            normed = self.inner(x)
        elif self.device.is_gpu:
            normed = elementwise.rms_norm(rows, self.weight, self.eps).view(x.shape)
        else:
            normed = cpu.rms_norm(rows.contiguous(), self.weight, self.eps, self.config.require_pool()).view(x.shape)
        return give_back(normed, hidden_states)
