"""Routers: which experts a token goes to, and with which weight.

Families differ in how they score and choose (softmax or sigmoid, groups, correction bias). Which of these a router does
is found by asking it, once its weights are loaded; one that no kernel computes keeps its own forward, in which only the
matrix product and the sigmoid run on native kernels. Otherwise a token's experts could depend on who shares its step
(see `exact`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from ktransformers.core import Phase
from ktransformers.kernels import native
from ktransformers.kernels.quant import RawTensor
from ktransformers.kernels.routing import RouterSpec, route
from ktransformers.kernels.triton.router import topk_router
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import use
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.routing import recognize_routing
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["KMoEGate"]

logger = logging.getLogger(__name__)

_GROUPS = ("num_group", "n_group")
_TOPK_GROUPS = ("topk_group", "topk_groups")
_SCALINGS = ("routed_scaling_factor",)


def _number(module: nn.Module, names: Iterable[str], default: float) -> float:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, (int, float)) and value), default)


def _candidates(module: nn.Module, top_k: int) -> Iterator[RouterSpec]:
    """Every way to route that the module's numbers allow."""
    groups, kept = int(_number(module, _GROUPS, 1)), int(_number(module, _TOPK_GROUPS, 1))
    scalings = sorted({1.0, float(_number(module, _SCALINGS, 1.0))})
    for scoring, score, renormalize, scaling in itertools.product(
        ("softmax", "sigmoid"), ("top2", "max"), (True, False), scalings
    ):
        yield RouterSpec(top_k, scoring, groups, kept, score, renormalize, scaling)  # type: ignore[arg-type]
        if groups > 1:
            yield RouterSpec(top_k, scoring, 1, 1, score, renormalize, scaling)  # type: ignore[arg-type]


class KMoEGate(WrapperOperator):
    """Any router of `transformers`: [T, H] in, (router_logits, topk_weights [T, K], topk_ids [T, K]) out.

    Computes in fp32 on every device: a router is small, and a rounded score may choose another expert.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KMoEGateNative": "the family's own routing on native kernels",
        "KMoEGateTriton": "one kernel that routes as the module does",
        "KMoEGateTorch": "the family's own routing on the GPU",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        # How it routes, when a kernel does the same; on the CPU known once loaded.
        self.spec: RouterSpec | None = recognize_routing(module) if self.device.is_gpu else None

    def op(self, phase: Phase) -> str:
        if not self.device.is_gpu:
            return "KMoEGateNative"
        return "KMoEGateTorch" if self.spec is None else "KMoEGateTriton"

    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)

    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner,)

    def load(self, source: WeightSource) -> None:
        super().load(source)
        if self.device.is_gpu:
            return
        self.spec = self._recognize()
        if self.spec is None:
            logger.info("%s routes in a way that no kernel does: it keeps its own forward", type(self.inner).__name__)

    @property
    def weight(self) -> torch.Tensor:
        """fp32 [E, H]."""
        return self.inner.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        """What moves the choice of experts, fp32 [E], or None."""
        return getattr(self.inner, "e_score_correction_bias", None)

    def _own(self, rows: torch.Tensor) -> Any:
        with NativeMathMode(self.config.require_pool()):
            return self.inner(rows)

    def _recognize(self) -> RouterSpec | None:
        """The first candidate that gives the module's own answer on random rows with the real weights."""
        weight = getattr(self.inner, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype is not torch.float32:
            return None
        known = {"weight", "e_score_correction_bias"}
        if {name for name, _ in itertools.chain(self.inner.named_parameters(), self.inner.named_buffers())} - known:
            return None
        rows = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(0))
        try:
            logits, weights, ids = self._own(rows)
        except (RuntimeError, TypeError, ValueError):
            return None  # it wants more than rows, or returns something else
        if logits.shape != (16, weight.shape[0]) or ids.shape != weights.shape or ids.dim() != 2:
            return None
        want = torch.zeros_like(logits).scatter_(1, ids.long(), weights)
        for spec in _candidates(self.inner, ids.shape[1]):
            try:
                own_logits, got_weights, got_ids = self._route(rows, spec)
            except ValueError:
                continue  # numbers of groups that do not fit
            got = torch.zeros_like(logits).scatter_(1, got_ids, got_weights)
            if torch.allclose(logits, own_logits) and torch.allclose(got, want, rtol=1e-4, atol=1e-6):
                return spec
        return None

    def _route(self, rows: torch.Tensor, spec: RouterSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.device.is_gpu:
            logits = functional.linear(rows, self.weight)
            ids, weights = topk_router(logits, spec, self.bias)
            return logits, weights, ids
        pool = self.config.require_pool()
        logits = native.linear(rows.contiguous(), RawTensor.from_tensor(self.weight), pool)
        ids, weights = route(logits, spec, pool, self.bias)
        return logits, weights, ids

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        use(self.device.torch_device)
        x = hidden_states.to(self.device.torch_device, torch.float32)
        if self.spec is None or args or kwargs:
            with nullcontext() if self.device.is_gpu else NativeMathMode(self.config.require_pool()):
                routed = self.inner(x, *args, **kwargs)
            if isinstance(routed, torch.Tensor):
                return routed.to(hidden_states.device)
        else:
            routed = self._route(x.reshape(-1, x.shape[-1]), self.spec)
        return tuple(part.to(hidden_states.device) if isinstance(part, torch.Tensor) else part for part in routed)
