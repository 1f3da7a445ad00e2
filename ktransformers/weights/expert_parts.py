"""Parts of routed experts: some columns of what lies between their products, as one of several processes has them.

gate, up    rows of each expert's matrices
down        columns: results are summands, to which the first part alone adds the bias
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ktransformers.kernels.types import FP8_BLOCK, ExpertWeight, ExpertWeights, Fp8Matrix, OwnType, RawTensor
from ktransformers.weights.cut_source import (
    LEAST_COLUMNS,
    TensorSlice,
    column_unit,
    cut_fp8,
    cut_tensor,
    share_of,
    tensor_nbytes,
)
from ktransformers.weights.source import ExpertsInfo, TensorInfo

__all__ = ["ExpertColumns"]


@dataclass(frozen=True, slots=True)
class ExpertColumns:
    """`count` of the columns between the products of every expert, from `first` on."""

    first: int
    count: int

    @classmethod
    def of(cls, info: ExpertsInfo, rank: int, size: int) -> ExpertColumns | None:
        """Return the columns of one of `size` processes, whole blocks of the down projection's type; None where they
        cannot be divided.
        """
        inputs = [part.resident_type for part in (info.gate, info.up) if part is not None]
        rows = FP8_BLOCK if any(isinstance(one, OwnType) for one in inputs) else 1
        unit = math.lcm(column_unit(info.down.resident_type), rows, LEAST_COLUMNS)
        share = None if size == 1 else share_of(info.down.shape[2], unit, rank, size)
        return None if share is None else cls(*share)

    def info(self, whole: ExpertsInfo) -> ExpertsInfo:
        """Return the facts of the part; biases are counted whole."""
        gate = None if whole.gate is None else _info(whole.gate, TensorSlice(1, self.first, self.count))
        up = _info(whole.up, TensorSlice(1, self.first, self.count))
        down = _info(whole.down, TensorSlice(2, self.first, self.count))
        pairs = [(whole.gate, gate), (whole.up, up), (whole.down, down)]
        less = sum(old.nbytes - new.nbytes for old, new in pairs if old is not None and new is not None)
        return ExpertsInfo(gate, up, down, whole.stored_names, whole.nbytes - less)

    def weights(self, whole: ExpertWeights) -> ExpertWeights:
        """Return the part of weights as files have them, not packed."""
        gate = None if whole.gate is None else self._cut(whole.gate, 0)
        gate_bias, up_bias = (
            None if bias is None else bias.narrow(1, self.first, self.count).contiguous()
            for bias in (whole.gate_bias, whole.up_bias)
        )
        down_bias = whole.down_bias
        if down_bias is not None and self.first:
            down_bias = torch.zeros_like(down_bias)
        return ExpertWeights(gate, self._cut(whole.up, 0), self._cut(whole.down, 1), gate_bias, up_bias, down_bias)

    def _cut(self, weights: Sequence[ExpertWeight], dim: int) -> list[ExpertWeight]:
        """Return the part of each expert's matrix, rows (dim 0) or columns."""
        part = TensorSlice(dim, self.first, self.count)
        cut: list[ExpertWeight] = []
        for number, weight in enumerate(weights):
            assert isinstance(weight, RawTensor | Fp8Matrix), "experts in rows as their file has them"
            name = f"expert {number}"
            cut.append(cut_fp8(weight, part, name) if isinstance(weight, Fp8Matrix) else cut_tensor(weight, part, name))
        return cut


def _info(whole: TensorInfo, part: TensorSlice) -> TensorInfo:
    shape = part.shape(whole.shape)
    return replace(whole, shape=shape, nbytes=shape[0] * tensor_nbytes(whole.resident_type, shape[1:]))
