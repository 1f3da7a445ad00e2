"""The path of experts that lie on a GPU, in the types of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from ktransformers.kernels.triton.experts.router import Chosen
from ktransformers.operators.base import Requirements
from ktransformers.operators.experts.paths.base import ExpertStep, InlinePath, LayerExperts
from ktransformers.operators.experts.resident import GpuExperts, gpu_experts_nbytes
from ktransformers.weights.source import WeightSource

__all__ = ["ResidentPath"]


@dataclass(eq=False, repr=False)
class ResidentPath(InlinePath):
    """Computes experts on the GPU on which all of them lie, or this process's part of each. experts: None until they
    are loaded. is_divided: whether they are a part, whose results are not rounded before they are added up.
    """

    NAME: ClassVar[str] = "resident"
    experts: GpuExperts | None = None
    is_divided: bool = False

    @classmethod
    @override
    def is_for(cls, layer: LayerExperts) -> bool:
        return layer.device.is_gpu

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        info = self.layer.find_resident(source)
        return self.layer.requirements(info, gpu_experts_nbytes(self.layer.key, info))

    @override
    def divides(self, source: WeightSource) -> bool:
        return self.layer.columns(self.layer.find(source)) is not None

    @override
    def load(self, source: WeightSource) -> None:
        layer, activation = self.layer, self.layer.function.activation
        assert activation is not None, "the operator refuses such experts on a GPU"
        weights = source.experts(layer.key, layer.layout, layer.config.cpu_quant)
        columns = layer.columns(layer.find(source))
        if columns is not None:
            weights, self.is_divided = columns.weights(weights), True
        self.experts = GpuExperts.of(weights, activation, layer.device, layer.config.require_pool())
        layer.config.expert_stats.watch_gpu(layer.usage_on(layer.device))

    @override
    def chosen(self, rows: torch.Tensor, top_k: int) -> Chosen | None:
        slots = self._slots(len(rows))
        layer = self.layer
        return None if slots is None else layer.usage_on(layer.device).chosen(layer.number, slots, top_k)

    def _slots(self, num_rows: int) -> torch.Tensor | None:
        """Where the rows of a step go in the cache; None for one that is not counted."""
        is_counted = self.experts is not None and self.layer.number >= 0
        return self.layer.device.slots_of(num_rows) if is_counted else None

    @override
    def compute(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_counted: bool
    ) -> torch.Tensor:
        assert self.experts is not None, f"{self.layer.key} is not loaded"
        slots = None if is_counted else self._slots(len(topk_ids))
        if slots is not None:
            self.layer.usage_on(self.layer.device).note(self.layer.number, slots, topk_ids)
        return self.experts.forward(rows, topk_ids, topk_weights, torch.float32 if self.is_divided else rows.dtype)

    @override
    def collect(self, issued: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return issued.to(like.device) if self.is_divided else super().collect(issued, like)

    @override
    def warm_up(self, step: ExpertStep) -> None:
        self.compute(*self.inputs(step), is_counted=True)
