"""The path of small steps whose experts the CPU computes in the order of the GPU's stream.

Nothing waits on the host, so that a CUDA graph can capture it: see kernels/transfer/async_cpu_experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from typing_extensions import override

from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts
from ktransformers.operators.device import STREAM_ROWS, to_input
from ktransformers.operators.experts.paths.base import ExpertPath, ExpertStep, LayerExperts

__all__ = ["InOrderPath", "StreamOrderPath"]

IssuedT = TypeVar("IssuedT")


@dataclass(eq=False, repr=False)
class InOrderPath(ExpertPath[IssuedT]):
    """Base of paths that give the CPU its experts in the order of the current stream of the layer's GPU.

    numbers: of the layer in each stream that it has used.
    """

    numbers: dict[AsyncCpuExperts, int] = field(default_factory=dict)

    @classmethod
    @override
    def is_for(cls, layer: LayerExperts) -> bool:
        return layer.is_beside_gpu and layer.function.activation is not None

    @override
    def takes(self, step: ExpertStep) -> bool:
        hidden, most = step.hidden_states, STREAM_ROWS * self.layer.layout.hidden_size
        is_there = hidden.device == self.layer.layer_device.torch_device
        return self.layer.kernel is not None and is_there and hidden.numel() <= most

    def stream(self, top_k: int) -> tuple[AsyncCpuExperts, int]:
        """Begin the layer's experts on its device; return the stream's CPU experts and the layer's number there."""
        layer, kernel = self.layer, self.layer.kernel
        assert kernel is not None, f"{layer.key} is not loaded"
        layer.layer_device.time_part("experts", layer.number)
        stream = layer.layer_device.async_cpu_expert_stream(top_k, layer.layout.hidden_size, kernel.pool)
        if stream not in self.numbers:
            self.numbers[stream] = stream.add_layer(kernel)
        return stream, self.numbers[stream]

    def collect_rows(self, stream: AsyncCpuExperts, rows: torch.Tensor) -> torch.Tensor:
        """Let the stream wait for the CPU: [T, H] of the stream's type. rows: the step's hidden states [T, H]."""
        self.layer.layer_device.time_part("wait_cpu")
        return stream.collect(torch.empty(rows.shape, dtype=stream.shape.dtype, device=rows.device))


class StreamOrderPath(InOrderPath[AsyncCpuExperts]):
    """Computes all experts of a small step on the CPU, in the order of the stream of the layer's GPU."""

    NAME: ClassVar[str] = "stream order"

    @override
    def submit(self, step: ExpertStep) -> AsyncCpuExperts:
        stream, number = self.stream(step.topk_ids.shape[-1])
        stream.submit(number, step.rows(), step.topk_ids, step.topk_weights)
        return stream

    @override
    def collect(self, issued: AsyncCpuExperts, like: torch.Tensor) -> torch.Tensor:
        rows = like.reshape(-1, like.shape[-1])
        return to_input(self.collect_rows(issued, rows).view(like.shape), like)
