"""Weights as a GPU's kernels read them: a source whose types without such a kernel are transcoded.

The CPU's kernels read more block formats than the GPU's. What these lack becomes a type that they have, with the same
values (`transcode.gpu_type`), where there is one; what is left is dense on a GPU, or stays on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ktransformers.kernels.types import ExpertWeight, ExpertWeights, Fp8Matrix, QuantType, RawTensor, row_bytes
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout, TensorInfo, WeightSource
from ktransformers.weights.transcode import Transcoded, gpu_type, transcode

__all__ = ["ForGpu"]


class ForGpu:
    """A WeightSource over another one. Facts and tensors of it agree, as those of the other do."""

    def __init__(self, source: WeightSource):
        self._source = source

    def describe(self) -> str:
        """As the source itself."""
        return self._source.describe()

    def stored_names(self) -> Sequence[str]:
        """As the source itself."""
        return self._source.stored_names()

    def ignorable(self, stored_name: str) -> bool:
        """As the source itself."""
        return self._source.ignorable(stored_name)

    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        """As the source itself."""
        return self._source.stored_bytes(stored_name)

    def find(self, name: str) -> TensorInfo | None:
        """Facts about the tensor as `tensor` gives it."""
        info = self._source.find(name)
        return None if info is None else _on_gpu(info)

    def tensor(self, name: str) -> RawTensor:
        """The tensor in a type that a GPU's kernels read, or that is dense there."""
        raw = self._source.tensor(name)
        return transcode(raw, name, gpu_type(raw.qtype))

    def fp8(self, name: str) -> Fp8Matrix:
        """As the source itself."""
        return self._source.fp8(name)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As the source itself."""
        return self._source.dense(name, dtype)

    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        """Facts about the experts as `experts` gives them."""
        info = self._source.find_experts(key, layout, quantize_to)
        if info is None:
            return None
        gate = None if info.gate is None else _on_gpu(info.gate)
        up, down = _on_gpu(info.up), _on_gpu(info.down)
        before = sum(part.nbytes for part in (info.gate, info.up, info.down) if part is not None)
        after = sum(part.nbytes for part in (gate, up, down) if part is not None)
        return ExpertsInfo(gate, up, down, info.stored_names, info.nbytes - before + after)

    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        """The experts in types that a GPU's kernels read, where there are such."""
        weights = self._source.experts(key, layout, quantize_to)
        gate = None if weights.gate is None else _transcoded(weights.gate)
        up, down = _transcoded(weights.up), _transcoded(weights.down)
        return replace(weights, gate=gate, up=up, down=down)


def _on_gpu(info: TensorInfo) -> TensorInfo:
    resident = info.resident_type
    if not isinstance(resident, QuantType) or gpu_type(resident) is resident:
        return info
    target = gpu_type(resident)
    nbytes = math.prod(info.shape[:-1]) * row_bytes(target, info.shape[-1])
    return replace(info, resident_type=target, nbytes=nbytes)


def _transcoded(weights: Sequence[ExpertWeight]) -> Sequence[ExpertWeight]:
    first = weights[0]
    if not isinstance(first, RawTensor) or gpu_type(first.qtype) is first.qtype:
        return weights
    stored = [weight for weight in weights if isinstance(weight, RawTensor)]  # experts of a projection share one type
    return Transcoded(stored, gpu_type(first.qtype))
