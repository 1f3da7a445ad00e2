"""Dense feed-forward block: down(act(gate(x)) * up(x)). Its three linears are operators of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from ktransformers.core import Phase
from ktransformers.kernels import native
from ktransformers.kernels.native import ActivationSpec
from ktransformers.operators.activation import recognize_activation
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KMLP"]


class KMLP(WrapperOperator):
    """A dense MLP of any family: fp32 [..., H] in and out. Blocks of another make keep their own forward."""

    OPS: ClassVar[dict[str, str]] = {
        "KMLPNative": "activation and product fused in one native kernel",
        "KMLPTorch": "the module's own forward (not gate, up and down)",
    }
    PARTS: ClassVar[frozenset[str]] = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.spec: ActivationSpec | None = None
        children = dict(module.named_children())
        if children.keys() == self.PARTS:
            self.spec = recognize_activation(children["act_fn"])

    def op(self, phase: Phase) -> str:
        return "KMLPTorch" if self.spec is None else "KMLPNative"

    def bypassed(self) -> Iterable[nn.Module]:
        return () if self.spec is None else (self.inner.get_submodule("act_fn"),)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        block = self.inner
        if self.spec is None:
            return block(hidden_states)  # type: ignore[no-any-return]
        gate = block.gate_proj(hidden_states)  # type: ignore[operator]
        up = block.up_proj(hidden_states)  # type: ignore[operator]
        acted = native.activate(self.spec, gate.contiguous(), up.contiguous(), self.config.require_pool(), out=gate)
        return block.down_proj(acted)  # type: ignore[operator,no-any-return]
