"""Projections of attention that look back: Compressed Convolutional Attention (arXiv 2510.04476) of ZAYA.

    T rows, G heads of queries and keys, D columns of one

    u[t]     = sum_w a[w] qk[t - W + 1 + w]            queries and keys side by side, a column by itself
    y[t, g]  = sum_w A[g, w] u[t - W' + 1 + w, g]      all columns of a head, biases beside
    q, k     = y and what is shared by queries and keys of a group; v: half of this row, half of the one before

What it looks back at is a state; queries, keys and values go to attention, which has its pages beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.kernels import cpu
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.context import StateStep
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["KConvolvedProjection"]

_CONVOLUTIONS = frozenset({"conv_qk_depthwise", "conv_qk_grouped"})


class KConvolvedProjection(RecurrentOperator):
    """Operator of the projections of ZAYA's attention: hidden states [1, T, H] -> queries, keys and values [1, T,
    heads, D].
    """

    OPS: ClassVar[dict[str, str]] = {"KConvolvedProjection": "convolutions over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = _CONVOLUTIONS
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        _CONVOLUTIONS | {"q_proj", "k_proj", "v_proj_current", "v_proj_delayed"},
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("head_dim",)
    CONV: ClassVar[str | None] = "conv_qk_depthwise"

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.head_dim = int(inner.head_dim)
        self.num_heads = int(inner.q_proj.out_features) // self.head_dim
        self.num_kv_heads = int(inner.k_proj.out_features) // self.head_dim
        self.num_groups = self.num_heads + self.num_kv_heads
        self.num_lags = int(inner.conv_qk_grouped.kernel_size[0]) - 1
        self.num_delayed = int(inner.v_proj_delayed.out_features)
        self._delayed_bias = inner.v_proj_delayed.bias is not None
        self._weight: Tensor | None = None  # fp32 [G, D, W' D], of the second convolution
        self._shift = torch.empty(0)  # taps that give the row before
        self._constant = torch.empty(0)  # [G, D]: what both biases give

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        width, channels = self.conv_shape()
        lags = {f"lag{lag}": (1, channels) for lag in range(1, self.num_lags + 1)}
        return {"conv": (width, channels), **lags, "values": (1, self.num_delayed)}

    @override
    def prepare(self) -> None:
        grouped: Any = self.inner.get_submodule("conv_qk_grouped")
        taps = grouped.weight.view(self.num_groups, self.head_dim, self.head_dim, -1)
        self._weight = taps.transpose(2, 3).flatten(2).contiguous()
        first = self.conv.bias.view(self.num_groups, self.head_dim, 1)
        self._constant = (taps.sum(-1) @ first)[..., 0] + grouped.bias.view(self.num_groups, -1)
        columns = max(self.conv_shape()[1], self.num_delayed)
        self._shift = torch.tensor([[1.0, 0.0]], device=taps.device).repeat(columns, 1)

    def _before(self, x: Tensor, state: Tensor, step: StateStep) -> Tensor:
        """[T, C] -> the row before each in its sequence, zeros before the first."""
        return self.scans.causal_conv(x, self._shift[: x.shape[1]].contiguous(), None, state, step, "none")

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        q, k = inner.q_proj(rows).float(), inner.k_proj(rows).float()
        qk = torch.cat((q, k), dim=-1)
        lagged = [self.scans.causal_conv(qk, self.conv.weight[:, 0], None, states["conv"], step, "none")]
        for lag in range(1, self.num_lags + 1):
            lagged.append(self._before(lagged[-1], states[f"lag{lag}"], step))
        mixed = self._grouped(torch.cat([x.view(-1, self.num_groups, self.head_dim) for x in lagged[::-1]], dim=-1))
        q_heads, k_heads = q.view(-1, self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim), k
        shared = (q_heads + k_heads.view(-1, self.num_kv_heads, 1, self.head_dim)) * 0.5
        residual = torch.cat((shared.flatten(1, 2), shared.mean(dim=2)), dim=1)
        values = torch.cat((inner.v_proj_current(rows).float(), self._delayed(rows, states, step)), dim=-1)
        return torch.cat(((mixed + residual).flatten(1), values), dim=-1).to(rows.dtype)

    def _delayed(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        """What rows before gave; before the first was one of zeros."""
        inner: Any = self.inner
        values: Tensor = inner.v_proj_delayed(rows).float()
        if not self._delayed_bias:
            return self._before(values, states["values"], step)
        nothing: Tensor = inner.v_proj_delayed(torch.zeros_like(rows[:1])).float()
        before = self._before(values - nothing, states["values"], step)
        return before + nothing

    def _grouped(self, x: Tensor) -> Tensor:
        """The second convolution: [T, G, W' D], oldest rows first -> [T, G, D]."""
        weight = self._weight
        assert weight is not None, f"{self.key} is not loaded"
        if self.device.is_gpu:
            product = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        else:
            raw = RawTensor.from_tensor(weight)
            product = cpu.batched_linear(x.contiguous(), raw, self.config.require_pool())
        return product + self._constant

    @override
    def answer(self, hidden_states: Tensor) -> Any:
        heads = hidden_states.view(*hidden_states.shape[:-1], -1, self.head_dim)
        return torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=-2)
