"""The path of experts that rest in the CPU's memory and run on its kernels while the host waits.

It loads what the other paths over the CPU's memory read: streamed, hot and in the order of a stream.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from ktransformers.kernels.cpu import MoeKernel
from ktransformers.operators.base import Requirements
from ktransformers.operators.experts.paths.base import InlinePath, LayerExperts
from ktransformers.operators.linear.packed import pack_experts
from ktransformers.weights.source import WeightSource

__all__ = ["HostPath", "NativePath"]


class HostPath(InlinePath):
    """Base of the paths that bring a layer's experts into the CPU's memory, as its kernels take them."""

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        info = self.layer.find(source)
        return self.layer.requirements(info, self.layer.host_nbytes(info))

    @override
    def load(self, source: WeightSource) -> None:
        layer, pool = self.layer, self.layer.config.require_pool()
        weights = source.experts(layer.key, layer.layout, layer.config.cpu_quant)
        is_streamed = layer.is_beside_gpu and layer.placement.prefill_device == layer.layer_device.name
        is_pinned = is_streamed and layer.copied_nbytes(source) is not None
        layer.weights = pack_experts(weights, pool, layer.products, is_pinned=is_pinned)


class NativePath(HostPath):
    """Computes experts on the CPU's SIMD units, on the file's own blocks."""

    NAME: ClassVar[str] = "native"

    @classmethod
    @override
    def is_for(cls, layer: LayerExperts) -> bool:
        return not layer.device.is_gpu and layer.function.activation is not None

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        layer, activation = self.layer, self.layer.function.activation
        assert layer.weights is not None
        assert activation is not None
        layer.kernel = MoeKernel(layer.weights, activation, layer.config.require_pool(), layer.number)
        layer.config.expert_stats.watch(layer.kernel)

    @override
    def compute(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool
    ) -> torch.Tensor:
        assert self.layer.kernel is not None, f"{self.layer.key} is not loaded"
        return self.layer.kernel.forward(rows, topk_ids.contiguous(), topk_weights)
