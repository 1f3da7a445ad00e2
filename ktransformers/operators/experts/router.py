"""Routers: the experts that a token goes to, and their weights.

Families differ in how they score and choose (softmax or sigmoid, groups, correction bias). Which of these a router does
is found by asking it (`recognize/router.py`); one that no kernel computes keeps its own forward, in which only the
matrix product and the sigmoid run on native kernels. Otherwise a token's experts could depend on who shares its step
(see `exact`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu.router import RouterSpec, route
from ktransformers.kernels.triton.experts.router import MAX_ROUTED_ROWS, Chosen, route_rows, topk_router
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.base import OperatorConfig, Placement, Requirements
from ktransformers.operators.device import use
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.recognize.router import CHOICE_BIAS, ROUTER_CHILD, recognize_router
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["KRouter"]

# Of modules that were asked: one plan tries many placements of the same model, and asking takes milliseconds.
_specs = WeakKeyDictionary[nn.Module, RouterSpec | None]()


class KRouter(WrapperOperator):
    """Operator of any router of `transformers`: [T, H] in, (router_logits, topk_weights [T, K], topk_ids [T, K]) out.

    Computes in fp32 on every device: a router is small, and a rounded score may choose another expert.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KRouterNative": "the family's own router on native kernels",
        "KRouterTriton": "one kernel that routes as the module does",
        "KRouterTorch": "the family's own router on the GPU",
    }

    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({ROUTER_CHILD})

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        if module not in _specs:
            _specs[module] = recognize_router(module)
        self.spec: RouterSpec | None = _specs[module]

    @override
    def op(self, phase: Phase) -> str:
        if not self.device.is_gpu:
            return "KRouterNative"
        return "KRouterTorch" if self.spec is None else "KRouterTriton"

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)

    def _matrix_state(self) -> DenseState | None:
        """Of the child that some routers keep their matrix in."""
        child = self.inner._modules.get(ROUTER_CHILD)
        return None if child is None else DenseState(child, f"{self.key}.{ROUTER_CHILD}", self.device, torch.float32)

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs, matrix = super().requirements(source), self._matrix_state()
        if matrix is not None:
            needs.include(matrix.requirements(source))
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        matrix = self._matrix_state()
        if matrix is not None:
            matrix.load(source)

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner,)

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the router, fp32 [E, H]."""
        holder: Any = self.inner._modules.get(ROUTER_CHILD) or self.inner
        weight: torch.Tensor = holder.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias that moves the choice of experts, fp32 [E], or None."""
        return getattr(self.inner, CHOICE_BIAS, None)

    @property
    def logit_bias(self) -> torch.Tensor | None:
        """Bias that is added to the logits, fp32 [E], or None."""
        return getattr(self.inner, "bias", None)

    def route(
        self, rows: torch.Tensor, chosen: Chosen | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return (logits [T, E], weights [T, K], ids [T, K]) of rows [T, H] on the router's GPU, ids int32; None where
        no kernel does.

        The rows may be of any float type: they are widened in registers. chosen: who wants to know of the choice.
        """
        if self.spec is None or not self.device.is_gpu or rows.device != self.device.torch_device:
            return None
        use(self.device.torch_device)
        if rows.shape[0] <= MAX_ROUTED_ROWS:
            counters = self.device.counters()
            biases = self.bias, self.logit_bias
            logits, ids, weights = route_rows(rows, self.weight, self.spec, counters, *biases, chosen)
            return logits, weights, ids
        logits = functional.linear(rows.float(), self.weight, self.logit_bias)
        memory = None if chosen is None else chosen.ids
        if memory is None:
            memory = torch.empty(len(rows), self.spec.top_k, dtype=torch.int32, device=rows.device)
        ids, weights = topk_router(logits, self.spec, self.bias, memory, chosen=chosen)
        return logits, weights, ids

    def _route(self, rows: torch.Tensor, spec: RouterSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routed = self.route(rows)
        if routed is not None:
            return routed[0], routed[1], routed[2].to(torch.int64)  # modules of transformers index with them
        pool = self.config.require_pool()
        logits = cpu.linear(rows.contiguous(), RawTensor.from_tensor(self.weight), pool)
        if self.logit_bias is not None:
            logits += self.logit_bias
        ids, weights = route(logits, spec, pool, self.bias)
        return logits, weights, ids

    @override
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
