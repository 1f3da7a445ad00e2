"""Routers: which experts a token goes to, and with which weight.

Families differ in how they score and choose (softmax or sigmoid, groups, correction bias), so the Hugging Face router
keeps its own forward; only the matrix product and the sigmoid inside it run on native kernels. Otherwise a token's
experts could depend on who shares its step (see `exact`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from ktransformers.core import Phase
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KMoEGate"]


class KMoEGate(WrapperOperator):
    """Any router of `transformers`: [T, H] in, (router_logits, topk_weights [T, K], topk_ids [T, K]) out."""

    OPS: ClassVar[dict[str, str]] = {"KMoEGateNative": "the family's own routing on native kernels"}

    def op(self, phase: Phase) -> str:
        return "KMoEGateNative"

    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with NativeMathMode(self.config.require_pool()):
            return self.inner(*args, **kwargs)
