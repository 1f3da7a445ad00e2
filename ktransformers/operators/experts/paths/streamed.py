"""The path of large steps, whose experts are copied to the GPU in part: see experts/streamed.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from ktransformers.operators.base import OperatorRuntime
from ktransformers.operators.experts.gpu_slots import HotLayer
from ktransformers.operators.experts.paths.base import ExpertPath, ExpertStep, LayerExperts
from ktransformers.operators.experts.streamed import PrefillLayer, PrefillTicket
from ktransformers.operators.usage import ExpertUsage

__all__ = ["StreamedPath"]


@dataclass(eq=False, repr=False)
class StreamedPath(ExpertPath[PrefillTicket]):
    """Computes large steps by GPU and CPU together, where the runtime has a PrefillLayer.

    usage: counts experts of smaller steps on the GPU, where some have a slot there; its ids are cleared in a large one.
    """

    NAME: ClassVar[str] = "streamed"
    prefill: PrefillLayer | None = None
    usage: ExpertUsage | None = None

    @classmethod
    @override
    def is_for(cls, layer: LayerExperts) -> bool:
        return layer.is_beside_gpu and layer.function.activation is not None

    @override
    def bind(self, runtime: OperatorRuntime) -> bool:
        hot = runtime.find(HotLayer)
        self.prefill = runtime.find(PrefillLayer) if hot is None else hot.prefill
        self.usage = None if hot is None else self.layer.usage_on(self.layer.layer_device)
        return self.prefill is not None

    @override
    def takes(self, step: ExpertStep) -> bool:
        return self.prefill is not None and self.prefill.takes(step.hidden_states)

    @override
    def submit(self, step: ExpertStep) -> PrefillTicket:
        assert self.prefill is not None
        issued = self.prefill.submit(step.hidden_states, step.topk_ids, step.topk_weights)
        if self.usage is not None:
            self.usage.forget(self.layer.number, step.topk_ids.shape[0])
        return issued

    @override
    def collect(self, issued: PrefillTicket, like: torch.Tensor) -> torch.Tensor:
        assert self.prefill is not None
        return self.prefill.collect(issued, like)

    @override
    def warm_up(self, step: ExpertStep) -> None:
        assert self.prefill is not None
        self.prefill.warm_up(step.rows(), step.topk_ids)
