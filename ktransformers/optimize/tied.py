"""Parameters that a model shares between modules (lm_head.weight = model.embed_tokens.weight)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from typing_extensions import override

from ktransformers.kernels.types import ExpertWeights, Fp8Matrix, QuantType, RawTensor
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout, MappedExperts, TensorInfo, WeightSource

__all__ = ["TiedSource", "tied_names"]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return {name that need not be stored: name whose tensor it is}, as `transformers` worked it out for this
    config.
    """
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


class TiedSource(WeightSource):
    """A WeightSource in which a tied name that is not stored means the tensor it is tied to."""

    def __init__(self, source: WeightSource, tied: Mapping[str, str]):
        self._source, self._tied = source, tied

    def _resolve(self, name: str) -> str:
        if name in self._tied and self._source.find(name) is None:
            return self._tied[name]
        return name

    @override
    def describe(self) -> str:
        return self._source.describe()

    @override
    def stored_names(self) -> Sequence[str]:
        return self._source.stored_names()

    @override
    def ignorable(self, stored_name: str) -> bool:
        return self._source.ignorable(stored_name)

    @override
    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        return self._source.stored_bytes(stored_name)

    @override
    def find(self, name: str) -> TensorInfo | None:
        return self._source.find(self._resolve(name))

    @override
    def tensor(self, name: str) -> RawTensor:
        return self._source.tensor(self._resolve(name))

    @override
    def fp8(self, name: str) -> Fp8Matrix:
        return self._source.fp8(self._resolve(name))

    @override
    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._source.dense(self._resolve(name), dtype)

    @override
    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        return self._source.find_experts(key, layout, quantize_to)

    @override
    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        return self._source.experts(key, layout, quantize_to)

    @override
    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        return self._source.mapped_experts(key, layout, quantize_to)
