"""Recurrent layers with little in them: a convolution between two gates, and linear attention with a fixed decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.kernels.triton.recurrent.launch import workspace_nbytes
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.context import StateStep
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["KLightningAttention", "KShortConv"]


class KShortConv(RecurrentOperator):
    """The short convolution of LFM2: C conv(B x), whose whole state is what the convolution looks back at."""

    OPS: ClassVar[dict[str, str]] = {"KShortConv": "convolution over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (frozenset({"conv", "in_proj", "out_proj"}),)
    CONV: ClassVar[str | None] = "conv"

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"conv": self.conv_shape()}

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        b, c, x = inner.in_proj(rows).chunk(3, dim=-1)
        mixed = self.convolve(b * x, states, step, "none")
        result: Tensor = inner.out_proj((c * mixed).to(rows.dtype))
        return result


class KLightningAttention(RecurrentOperator):
    """Lightning attention of MiniMax-01 (arXiv 2401.04658): linear attention, each head with a decay of its own."""

    OPS: ClassVar[dict[str, str]] = {"KLightningAttention": "linear attention over slots of states"}
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        frozenset({"act_fn", "norm", "qkv_proj", "out_proj", "output_gate"}),
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("head_dim",)
    CONV: ClassVar[str | None] = None

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.num_heads, self.head_dim = int(inner.slope_rate.numel()), int(inner.head_dim)

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"recurrent": (self.num_heads, self.head_dim, self.head_dim)}

    @override
    def scan_nbytes(self, num_rows: int) -> int:
        return workspace_nbytes(num_rows, self.num_heads, self.head_dim, self.head_dim, is_delta=False)

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        count = len(rows)
        qkv = inner.act_fn(inner.qkv_proj(rows)).float().view(count, self.num_heads, -1)
        q, k, v = (part.contiguous() for part in qkv.chunk(3, dim=-1))
        decay = -inner.slope_rate.float().view(1, -1).expand(count, -1).contiguous()
        out = self.scans.linear_scan((q, k, v), decay, states["recurrent"], step).reshape(count, -1)
        gated = torch.sigmoid(inner.output_gate(rows).float()) * inner.norm(out.to(rows.dtype)).float()
        result: Tensor = inner.out_proj(gated.to(rows.dtype))
        return result

    @override
    def answer(self, hidden_states: Tensor) -> Any:
        return hidden_states, None
