"""The path of small steps of which some experts have a slot on the GPU: see experts/gpu_slots.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts
from ktransformers.kernels.triton.experts.router import Chosen
from ktransformers.operators.base import OperatorRuntime
from ktransformers.operators.device import to_input, use
from ktransformers.operators.experts.gpu_slots import HotLayer, HotParts
from ktransformers.operators.experts.paths.base import ExpertStep
from ktransformers.operators.experts.paths.stream_order import InOrderPath
from ktransformers.operators.usage import ExpertUsage

__all__ = ["HotIssued", "HotPath"]


@dataclass(frozen=True, slots=True)
class HotIssued:
    """A step that the GPU and the CPU share. parts: of the experts with a slot, which are added to the stream's."""

    stream: AsyncCpuExperts
    parts: HotParts


@dataclass(eq=False, repr=False)
class HotPath(InOrderPath[HotIssued]):
    """Computes the experts that have a slot on the layer's GPU there, the others on the CPU at the same time, in the
    order of the stream. hot: the layer's slots, where the runtime has a HotLayer; usage: counts what runs in them.

    Where a router on the GPU fills what `chosen` gives it, it has divided its choice already, in its own launch.
    """

    NAME: ClassVar[str] = "hot"
    hot: HotLayer | None = None
    usage: ExpertUsage | None = None
    _elsewhere: torch.Tensor | None = None  # of the step whose router is asked

    @override
    def bind(self, runtime: OperatorRuntime) -> bool:
        self.hot = runtime.find(HotLayer)
        if self.hot is None:
            return False
        self.usage = self.layer.usage_on(self.layer.layer_device)
        self.layer.config.expert_stats.watch_gpu(self.usage)
        return True

    @override
    def takes(self, step: ExpertStep) -> bool:
        return self.hot is not None and super().takes(step)

    @override
    def chosen(self, rows: torch.Tensor, top_k: int) -> Chosen | None:
        assert self.hot is not None
        assert self.usage is not None
        layer, slots = self.layer, self.layer.layer_device.slots_of(len(rows))
        if slots is None or layer.number < 0 or layer.layout.num_identities:
            return None
        memory = self.hot.chosen(layer.number, self.usage, slots, top_k)
        self._elsewhere = None if memory.split is None else memory.split.elsewhere
        return memory

    @override
    def submit(self, step: ExpertStep) -> HotIssued:
        assert self.hot is not None
        assert self.usage is not None
        stream, number = self.stream(step.topk_ids.shape[-1])
        rows, device = step.rows(), self.layer.layer_device
        use(device.torch_device)
        elsewhere, self._elsewhere = self._elsewhere, None
        if step.is_counted:
            assert elsewhere is not None, "the router filled another's memory"
            here, there = step.topk_ids, elsewhere
        else:
            here, there = self.hot.split(step.topk_ids, self.layer.number, self.usage, device.slots_of(len(rows)))
        stream.submit(number, rows, there, step.topk_weights)
        return HotIssued(stream, self.hot.launch(rows, here, step.topk_weights))

    @override
    def collect(self, issued: HotIssued, like: torch.Tensor) -> torch.Tensor:
        rows = like.reshape(-1, like.shape[-1])
        out = issued.parts.sum_onto(self.collect_rows(issued.stream, rows), rows)
        return to_input(out.view(like.shape), like)

    @override
    def warm_up(self, step: ExpertStep) -> None:
        assert self.hot is not None
        assert self.usage is not None
        self.hot.warm_up(step.rows(), step.topk_ids, step.topk_weights, self.layer.number, self.usage)
