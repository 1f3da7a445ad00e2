"""The real-gated linear recurrent unit (RG-LRU) of Griffin (arXiv 2402.19427): gates make a decay for each channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.context import StateStep
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["KGatedLinearUnit"]

_MOST_DECAY = -8.0  # of the logarithm, per unit of softplus
_LEAST = 1e-30  # of a logarithm by which inputs are divided and multiplied again


class KGatedLinearUnit(RecurrentOperator):
    """The recurrent block of RecurrentGemma: a convolution, the unit behind it, a branch that multiplies its result.

    The scan is Mamba's with one element for each channel, a step of log(a) and inputs divided by it.
    """

    OPS: ClassVar[dict[str, str]] = {"KGatedLinearUnit": "gated linear recurrence by channel, over slots of states"}
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"conv_1d", "rg_lru"})
    CHILDREN: ClassVar[tuple[frozenset[str], ...]] = (
        frozenset({"linear_x", "linear_y", "linear_out", "act_fn"}) | OWNED_CHILDREN,
    )
    NUMBERS: ClassVar[tuple[str, ...]] = ("lru_width",)
    CONV: ClassVar[str | None] = "conv_1d"

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        inner: Any = module
        self.width, self.num_blocks = int(inner.lru_width), int(inner.rg_lru.input_gate_weight.shape[0])

    @override
    def state_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"conv": self.conv_shape(), "recurrent": (self.width, 1)}

    @override
    def prepare(self) -> None:
        unit: Any = self.inner.rg_lru
        weights = unit.input_gate_weight, unit.recurrent_gate_weight
        biases = unit.input_gate_bias, unit.recurrent_gate_bias
        # [2 gates, blocks, out, in] and [2, blocks, out]
        self._weights = torch.stack([weight.detach().transpose(1, 2) for weight in weights]).contiguous()
        self._biases = torch.stack([bias.detach() for bias in biases]).contiguous()
        self._rate = _MOST_DECAY * functional.softplus(unit.recurrent_param)
        self._ones = torch.ones(self.width, 1, device=self._rate.device)
        self._zeros = torch.zeros(self.width, device=self._rate.device)

    def _gate(self, x: Tensor, which: int) -> Tensor:
        """x [T, width] -> the same, by blocks of channels."""
        blocks = x.chunk(self.num_blocks, dim=-1)
        parts = [
            functional.linear(block.contiguous(), self._weights[which, i], self._biases[which, i])
            for i, block in enumerate(blocks)
        ]
        return torch.sigmoid(torch.cat(parts, dim=-1))

    @override
    def mix(self, rows: Tensor, states: Mapping[str, Tensor], step: StateStep) -> Tensor:
        inner: Any = self.inner
        branch = inner.act_fn(inner.linear_y(rows))
        x = self.convolve(inner.linear_x(rows), states, step, "none")
        log_a = (self._rate * self._gate(x, 1)).clamp(max=-_LEAST)
        grown = torch.sqrt(1 - torch.exp(2 * log_a))
        grown = torch.where((step.kv_lens == 1).unsqueeze(-1), 1.0, grown)  # a sequence's first input counts whole
        inputs = x * self._gate(x, 0) * grown / log_a
        ones = self._ones[:1].expand(len(rows), 1)
        out = self.scans.selective_scan((inputs, log_a, ones, ones), self._ones, self._zeros, states["recurrent"], step)
        result: Tensor = inner.linear_out((out * branch.float()).to(rows.dtype))
        return result

    @override
    def answer(self, hidden_states: Tensor) -> Any:
        return hidden_states, None
