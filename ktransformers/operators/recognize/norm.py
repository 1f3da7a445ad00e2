"""Recognizes RMSNorm (Zhang and Sennrich 2019) among norms. Some families add 1 to the weight, subtract the mean, or
have no weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import (
    NotRecognized,
    ProbeInputs,
    answer,
    matching,
    probe_module,
    recognizer,
)

__all__ = ["NormSpec", "recognize_norm", "recognize_weightless_norm", "rms_norm"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Numbers of an RMSNorm: x / sqrt(mean(x^2) + eps) * (offset + weight), over the last axis."""

    eps: float
    offset: float = 0.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [..., H] with weight [H] (RMSNorm), in plain torch."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@recognizer("RMSNorm")
def recognize_norm(module: nn.Module) -> NormSpec:
    """Return how `module` normalizes; None for another norm, or anything else."""
    weight = getattr(module, "weight", None)
    epsilons = [getattr(module, name, None) for name in ("variance_epsilon", "eps")]
    specs = [NormSpec(eps) for eps in epsilons if isinstance(eps, float)][:1]
    specs += [NormSpec(spec.eps, 1.0) for spec in specs]
    if not isinstance(weight, Tensor) or weight.dim() != 1 or any(p is not weight for p in module.parameters()):
        raise NotRecognized("it holds other things than one weight")
    probe_inputs = ProbeInputs()
    rows, scale = probe_inputs.normal(3, len(weight)), probe_inputs.positive(len(weight))
    got = answer(lambda: probe_module(module, parameters={"weight": scale})(rows))
    return matching(got, specs, lambda spec: rms_norm(rows, spec.offset + scale, spec.eps))


@recognizer("RMSNorm without a weight")
def recognize_weightless_norm(module: nn.Module) -> float:
    """Return the epsilon of x / sqrt(mean(x^2) + eps) over the last axis; None for anything else."""
    eps = getattr(module, "eps", None)
    if not isinstance(eps, float) or any(True for _ in module.parameters()):
        raise NotRecognized("it holds weights, or no epsilon")
    rows = ProbeInputs().normal(3, 32)
    return matching(answer(lambda: module(rows)), [eps], lambda found: rms_norm(rows, torch.ones(32), found))
