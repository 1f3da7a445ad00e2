"""The path of experts that rest in the CPU's memory and run on its kernels while the host waits.

It loads what the other paths over the CPU's memory read: streamed, hot and in the order of a stream.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from ktransformers.kernels.cpu import MoeKernel
from ktransformers.kernels.types import ExpertWeights
from ktransformers.operators.base import Requirements
from ktransformers.operators.experts.paths.base import InlinePath, LayerExperts
from ktransformers.operators.experts.resident import bias_nbytes
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
    """Computes experts on the CPU's SIMD units, on the file's own blocks: in RAM, or in the slots of a store that reads
    them from files."""

    NAME: ClassVar[str] = "native"

    @classmethod
    @override
    def is_for(cls, layer: LayerExperts) -> bool:
        return not layer.device.is_gpu and layer.function.activation is not None

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        if self.layer.config.expert_files is None:
            return super().requirements(source)
        info = self.layer.find(source)
        needs = self.layer.requirements(info, bias_nbytes(info))
        needs.stored_experts = self.layer.records(source).nbytes
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        layer, activation, store = self.layer, self.layer.function.activation, None
        assert activation is not None
        files = layer.config.expert_files
        if files is None:
            super().load(source)
        else:
            store = files.add(layer.number, layer.records(source))
            biases = source.mapped_experts(layer.key, layer.layout, layer.config.cpu_quant).biases
            layer.weights = ExpertWeights(None, (), (), *biases)
        assert layer.weights is not None
        layer.kernel = MoeKernel(layer.weights, activation, layer.config.require_pool(), layer.number, store)
        layer.config.expert_stats.watch(layer.kernel)

    @override
    def compute(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool
    ) -> torch.Tensor:
        assert self.layer.kernel is not None, f"{self.layer.key} is not loaded"
        return self.layer.kernel.forward(rows, topk_ids.contiguous(), topk_weights)
