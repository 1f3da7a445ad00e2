"""Hyper-connections (DeepSeek-V4, arXiv 2512.24880): several streams of hidden states become the input of a block.

    N streams of a token, each of H columns

Their weights are fp32 on every device: they are small, and transformers keeps them so in any precision of a model.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.kernels.triton.attention.hyper import HyperSpec, collapse
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.recognize.hyper import recognize_hyper
from ktransformers.operators.wrapper import DenseState, WrapperOperator

__all__ = ["KHyperConnection"]


class KHyperConnection(WrapperOperator):
    """Operator that collapses streams [1, T, N, H]: those that enter a block, or those behind the last layer."""

    OPS: ClassVar[dict[str, str]] = {
        "KHyperTriton": "two Triton kernels",
        "KHyperTorch": "the module's own forward, with weights in fp32",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        self.spec: HyperSpec | None = recognize_hyper(module) if self.device.is_gpu else None

    @override
    def op(self, phase: Phase) -> str:
        return "KHyperTorch" if self.spec is None else "KHyperTriton"

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)

    @override
    def forward(self, streams: torch.Tensor) -> Any:
        """Return what the module returns: how a block's result is mixed with the streams, and its input [1, T, H]."""
        x, inner = self.device.to_device(streams), self.inner
        if self.spec is None:
            return inner(x)
        weights: Any = inner
        made = collapse(x[0].contiguous(), weights.fn, weights.base, weights.scale, self.spec)
        return tuple(part[None] for part in made)
