"""The path of experts that no kernel computes as a whole: products of the CPU's kernels, the rest on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from ktransformers.kernels import cpu
from ktransformers.kernels.types import ExpertWeight, ExpertWeights, Fp8Matrix
from ktransformers.operators.base import Requirements
from ktransformers.operators.experts.paths.base import LayerExperts
from ktransformers.operators.experts.paths.native import HostPath
from ktransformers.operators.wrapper import DenseState
from ktransformers.weights.source import WeightSource

__all__ = ["TorchPath"]


class TorchPath(HostPath):
    """Computes one expert after another on the CPU, of those that a step hits; slow."""

    NAME: ClassVar[str] = "torch"

    @classmethod
    @override
    def is_for(cls, layer: LayerExperts) -> bool:
        return not layer.device.is_gpu and layer.function.activation is None

    def _norm_state(self) -> DenseState | None:
        norm = self.layer.function.norm
        return None if norm is None else DenseState(norm, f"{self.layer.key}.post_expert_norm")

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs, norm = super().requirements(source), self._norm_state()
        if norm is not None:
            needs.stored_names |= norm.requirements(source).stored_names
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        norm = self._norm_state()
        if norm is not None:
            norm.load(source)
        super().load(source)

    @override
    def compute(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool
    ) -> torch.Tensor:
        layer, weights, norm = self.layer, self.layer.weights, self.layer.function.norm
        assert weights is not None, f"{layer.key} is not loaded"
        num_experts = layer.layout.num_experts
        layer.config.expert_stats.note(topk_ids, num_experts, layer.number)
        out = torch.zeros_like(rows)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            if expert == num_experts:  # the sentinel of expert parallelism
                continue
            token, slot = torch.where(topk_ids == expert)
            acted = self._expert(weights, expert, rows[token])
            if norm is not None:
                acted = norm(acted)
            out.index_add_(0, token, acted * topk_weights[token, slot, None])
        return out

    def _expert(self, weights: ExpertWeights, expert: int, rows: torch.Tensor) -> torch.Tensor:
        layer, pool = self.layer, self.layer.config.require_pool()

        def project(parts: Sequence[ExpertWeight], bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
            weight = parts[expert]
            assert not isinstance(weight, Fp8Matrix), "load packs it"
            return cpu.linear(x.contiguous(), weight, pool, bias=None if bias is None else bias[expert])

        up = project(weights.up, weights.up_bias, rows)
        if weights.gate is not None:
            up = layer.layout.joined(project(weights.gate, weights.gate_bias, rows), up, 1)
        return project(weights.down, weights.down_bias, layer.function.act(up))
