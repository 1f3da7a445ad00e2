"""Routers: which experts a token goes to, and with which weight.

Families differ in how they score and choose (softmax or sigmoid, groups, correction bias), so the Hugging Face router
keeps its own forward; only the matrix product and the sigmoid inside it run on native kernels. Otherwise a token's
experts could depend on who shares its step (see `exact`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from ktransformers.core import Phase
from ktransformers.kernels.triton.router import topk_router
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.device import use
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.routing import BIAS, recognize_routing
from ktransformers.operators.wrapper import DenseState, WrapperOperator

__all__ = ["KMoEGate"]


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
        self.spec = recognize_routing(module) if self.device.is_gpu else None

    def op(self, phase: Phase) -> str:
        if self.spec is not None:
            return "KMoEGateTriton"
        return "KMoEGateTorch" if self.device.is_gpu else "KMoEGateNative"

    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)

    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner,)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        use(self.device.torch_device)
        x = hidden_states.to(self.device.torch_device, torch.float32)
        if self.spec is not None and not args and not kwargs:
            logits = functional.linear(x.reshape(-1, x.shape[-1]), self.inner.weight)  # type: ignore[arg-type]
            ids, weights = topk_router(logits, self.spec, self.inner._buffers.get(BIAS))
            return tuple(part.to(hidden_states.device) for part in (logits, weights, ids))
        with nullcontext() if self.device.is_gpu else NativeMathMode(self.config.require_pool()):
            routed = self.inner(x, *args, **kwargs)
        if isinstance(routed, torch.Tensor):
            return routed.to(hidden_states.device)
        return tuple(part.to(hidden_states.device) if isinstance(part, torch.Tensor) else part for part in routed)
