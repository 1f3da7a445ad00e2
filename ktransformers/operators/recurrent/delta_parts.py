"""Gated DeltaNet (arXiv 2412.06464) whose queries, keys, values and gates come out of matrices of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.context import StateStep
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["KGatedDeltaParts"]

_PROJECTIONS = frozenset(f"{part}_proj" for part in "qkvabgo")


class KGatedDeltaParts(RecurrentOperator):
    """Gated DeltaNet of OLMo Hybrid. A state may be corrected beyond a key's value (allow_neg_eigval: twice as far)."""

    OPS: ClassVar[dict[str, str]] = {"KGatedDeltaParts": "gated delta rule over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv1d", "o_norm"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (_PROJECTIONS | OWNED_CHILDREN,)
    NUMBERS: ClassVar[tuple[str, ...]] = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.k_heads, self.v_heads = int(inner.num_k_heads), int(inner.num_v_heads)
        self.k_dim, self.v_dim = int(inner.head_k_dim), int(inner.head_v_dim)
        self.most = 2.0 if inner.allow_neg_eigval else 1.0
        gate = getattr(inner.o_norm, "activation", None)
        if inner.activation != "silu" or gate != "silu":
            raise UnsupportedError(f"{key}: a convolution and a gate of {inner.activation!r} and {gate!r}, not silu")

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"conv": self.conv_shape(), "recurrent": (self.v_heads, self.k_dim, self.v_dim)}

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        count, width = len(rows), self.k_heads * self.k_dim
        joined = torch.cat((inner.q_proj(rows), inner.k_proj(rows), inner.v_proj(rows)), dim=-1)
        mixed = self.convolve(joined, states, step, "silu")
        q, k, v = torch.split(mixed, [width, width, self.v_heads * self.v_dim], dim=-1)
        decay = self.a * functional.softplus(inner.a_proj(rows).float() + inner.dt_bias)
        heads = (
            q.reshape(count, self.k_heads, self.k_dim),
            k.reshape(count, self.k_heads, self.k_dim),
            v.reshape(count, self.v_heads, self.v_dim),
        )
        beta = self.most * torch.sigmoid(inner.b_proj(rows).float())
        out = self.scans.delta_scan(heads, decay, beta, states["recurrent"], step)
        normed = self.scans.gated_norm(
            out.reshape(-1, self.v_dim),
            inner.g_proj(rows).reshape(-1, self.v_dim),
            inner.o_norm.weight,
            float(inner.o_norm.variance_epsilon),
            group_size=self.v_dim,
            form=(False, "silu"),
        )
        result: Tensor = inner.o_proj(normed.view(count, -1).to(rows.dtype))
        return result
