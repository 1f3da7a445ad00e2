"""Dense feed-forward block: down(act(gate(x)) * up(x)). Its three linears are operators of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.kernels.types import ActivationSpec
from ktransformers.operators.activation import activate
from ktransformers.operators.base import OperatorConfig, OperatorRuntime, Placement
from ktransformers.operators.device import to_input
from ktransformers.operators.linear.joined import GatedLinears
from ktransformers.operators.recognize.activation import recognize_gated_mlp
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KMLP"]


class KMLP(WrapperOperator):
    """Operator of a dense MLP of any family: fp32 [..., H] in and out. Blocks of another make keep their own
    forward.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KMLPNative": "activation and product fused in one native kernel",
        "KMLPTriton": "gate, up, activation and product in one Triton kernel or two",
        "KMLPTorch": "the module's own forward (not gate, up and down)",
    }
    PARTS: ClassVar[frozenset[str]] = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})

    @classmethod
    @override
    def is_for(cls, module: nn.Module) -> bool:
        """Whether a module is a dense MLP: blocks of routed experts are called so too, and return more than
        their rows.
        """
        return {name for name, _ in module.named_children()} >= cls.PARTS - {"act_fn"}

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.spec: ActivationSpec | None = recognize_gated_mlp(module)
        self._gated: GatedLinears | None = None

    @override
    def op(self, phase: Phase) -> str:
        if self.spec is None:
            return "KMLPTorch"
        return "KMLPTriton" if self.device.is_gpu else "KMLPNative"

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return () if self.spec is None else (self.inner.get_submodule("act_fn"),)

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        if self.spec is not None and self.device.is_gpu:
            gate, up = (self.inner.get_submodule(name) for name in ("gate_proj", "up_proj"))
            self._gated = GatedLinears(gate, up, self.spec)

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        block, x = self.inner, self.device.to_device(hidden_states)
        if self.spec is None:
            return to_input(block(x), hidden_states)
        if self._gated is not None:
            rows = self._gated(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            return to_input(block.down_proj(rows), hidden_states)  # type: ignore[operator]
        gate = block.gate_proj(x)  # type: ignore[operator]
        up = block.up_proj(x)  # type: ignore[operator]
        acted = activate(self.spec, gate, up, self.device, self.config.pool, out=gate)
        return to_input(block.down_proj(acted), hidden_states)  # type: ignore[operator]
