"""Experts that are one matrix each, on rows that come sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.base import (
    Operator,
    OperatorConfig,
    Placement,
    Requirements,
    empty_parameter,
    expect_shape,
)
from ktransformers.operators.device import to_input
from ktransformers.operators.linear.matrix import dense_tensor
from ktransformers.weights.source import WeightSource

__all__ = ["KExpertLinear"]


class KExpertLinear(Operator):
    """Products with one matrix [N, K] for each expert, in a tensor [E, N, K]: forward(rows [T, K], counts) -> [T, N].

    counts: rows of each expert, one expert's behind another's. Weights stay as they are in the file on the CPU, and are
    dense on a GPU.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KExpertLinearNative": "native kernel on the file's own numbers",
        "KExpertLinearTorch": "dense weights on the GPU",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 3 or len(list(module.parameters())) != 1:
            raise UnsupportedError(
                f"KExpertLinear cannot replace {key} ({type(module).__name__}): it holds other things than one weight "
                "[experts, rows, columns]"
            )
        self.shape = (int(weight.shape[0]), int(weight.shape[1]), int(weight.shape[2]))
        self.weight = empty_parameter(self.shape)
        self._matrices: list[RawTensor] = []
        self._dense: torch.Tensor | None = None  # on a GPU

    @override
    def op(self, phase: Phase) -> str:
        return "KExpertLinearTorch" if self.device.is_gpu else "KExpertLinearNative"

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs, name = Requirements(), f"{self.key}.weight"
        info = expect_shape(source.find(name), name, self.shape)
        size = self.device.dtype.itemsize * torch.Size(self.shape).numel()
        needs.add(self.device.name, info, size if self.device.is_gpu else info.nbytes)
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        self.requirements(source)
        weight, (count, rows, _) = source.tensor(f"{self.key}.weight"), self.shape
        if self.device.is_gpu:
            self._dense = dense_tensor(weight, self.device, self.config.require_pool())
            return
        weight = self.kept(weight)
        self._matrices = [weight.rows_slice(rows * index, rows * (index + 1)) for index in range(count)]

    @override
    def forward(self, inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
        parts = torch.split(self.device.to_device(inputs), list(expert_size))
        given = [(index, part) for index, part in enumerate(parts) if len(part)]
        out = torch.cat([self._product(index, part) for index, part in given])
        return to_input(out, inputs)

    def _product(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        if self._dense is not None:
            return functional.linear(rows, self._dense[index])
        return cpu.linear(rows.contiguous(), self._matrices[index], self.config.require_pool())
