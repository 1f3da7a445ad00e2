"""Hyper-connections (DeepSeek-V4, arXiv 2512.24880): how several streams of hidden states become the input of a block.

    N streams of a token, each of H columns

Their weights are fp32 on every device: they are small, and transformers keeps them so in any precision of a model.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from ktransformers.operators.wrapper import DenseState, WrapperOperator

__all__ = ["KHyperConnection"]


class KHyperConnection(WrapperOperator):
    """What collapses streams [1, T, N, H]: one of a block, or that behind the last layer. The module's own forward."""

    OPS: ClassVar[dict[str, str]] = {"KHyperTorch": "the module's own forward, with weights in fp32"}

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)
