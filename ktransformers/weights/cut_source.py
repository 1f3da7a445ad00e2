"""The part of a model's weights that one of several processes has: rows or columns of the matrices that are cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.types import (
    FP8_BLOCK,
    BlockType,
    ExpertWeights,
    Fp8Matrix,
    OwnType,
    QuantType,
    RawTensor,
    WeightType,
    block_size,
    fp8_nbytes,
    row_bytes,
    row_head,
)
from ktransformers.weights.source import ExpertsInfo, ExpertsLayout, MappedExperts, TensorInfo, WeightSource

__all__ = [
    "LEAST_COLUMNS",
    "CutSource",
    "TensorSlice",
    "column_unit",
    "cut_fp8",
    "cut_tensor",
    "share_of",
    "tensor_nbytes",
]

LEAST_COLUMNS = 32
"""Columns of a product that kernels of GPUs read at a time."""


def share_of(count: int, unit: int, rank: int, size: int) -> tuple[int, int] | None:
    """Return the first one and the number of a process's part of `count` columns, in whole units; None where one of
    the `size` processes would have none.

    The first processes have the larger parts: memory is planned by what the driver has, which is one of them.
    """
    units, rest = divmod(count, unit)
    if rest or units < size:
        return None
    first, end = (-(-units * one // size) for one in (rank, rank + 1))
    return first * unit, (end - first) * unit


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a tensor: `count` of its indices along dimension `dim`, from `first` on. dim: 0 or the last one."""

    dim: int
    first: int
    count: int

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part."""
        return tuple(self.count if i == self.dim else size for i, size in enumerate(whole))


def column_unit(qtype: WeightType) -> int:
    """Return the number of columns that cannot be cut apart."""
    return FP8_BLOCK if isinstance(qtype, OwnType) else block_size(qtype)


class CutSource(WeightSource):
    """A WeightSource with parts of some tensors. zeros: names that are all zeros here: another process has them.

    is_whole: whether all that is stored has to be read by somebody here; others leave tensors to the driver.
    """

    def __init__(
        self,
        source: WeightSource,
        parts: Mapping[str, TensorSlice],
        zeros: Collection[str] = (),
        *,
        is_whole: bool = True,
    ):
        self._source, self._parts, self._zeros = source, dict(parts), frozenset(zeros)
        self._is_whole = is_whole

    @override
    def describe(self) -> str:
        return self._source.describe()

    @override
    def stored_names(self) -> Sequence[str]:
        return self._source.stored_names()

    @override
    def ignorable(self, stored_name: str) -> bool:
        return not self._is_whole or self._source.ignorable(stored_name)

    @override
    def stored_bytes(self, stored_name: str) -> torch.Tensor | None:
        return self._source.stored_bytes(stored_name)

    @override
    def find(self, name: str) -> TensorInfo | None:
        info, part = self._source.find(name), self._parts.get(name)
        if info is None or part is None:
            return info
        is_fp8 = info.is_fp8 and _is_on_blocks(part, info.shape)
        shape = part.shape(info.shape)
        return replace(info, shape=shape, nbytes=tensor_nbytes(info.resident_type, shape), is_fp8=is_fp8)

    @override
    def tensor(self, name: str) -> RawTensor:
        whole, part = self._source.tensor(name), self._parts.get(name)
        if name in self._zeros:
            whole = RawTensor(torch.zeros_like(whole.data), whole.qtype, whole.shape)
        return whole if part is None else cut_tensor(whole, part, name)

    @override
    def fp8(self, name: str) -> Fp8Matrix:
        whole, part = self._source.fp8(name), self._parts.get(name)
        return whole if part is None else cut_fp8(whole, part, name)

    @override
    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        whole, part = self._source.dense(name, dtype), self._parts.get(name)
        if name in self._zeros:
            whole = torch.zeros_like(whole)
        return whole if part is None else whole.narrow(part.dim, part.first, part.count).contiguous()

    @override
    def find_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertsInfo | None:
        return self._source.find_experts(key, layout, quantize_to)

    @override
    def experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> ExpertWeights:
        return self._source.experts(key, layout, quantize_to)

    @override
    def mapped_experts(self, key: str, layout: ExpertsLayout, quantize_to: QuantType | None = None) -> MappedExperts:
        return self._source.mapped_experts(key, layout, quantize_to)


def _is_on_blocks(part: TensorSlice, whole: Sequence[int]) -> bool:
    """Whether a part of a matrix begins and ends where blocks of FP8 do."""
    ends = part.first + part.count
    return part.first % FP8_BLOCK == 0 and (ends % FP8_BLOCK == 0 or ends == whole[part.dim])


def tensor_nbytes(qtype: WeightType, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of this type, of two dimensions for FP8."""
    if isinstance(qtype, OwnType):
        return fp8_nbytes(shape[0], shape[1])
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows * row_bytes(qtype, shape[-1])


def cut_fp8(whole: Fp8Matrix, part: TensorSlice, name: str) -> Fp8Matrix:
    """Return a part of a matrix in FP8. Raises TensorMismatchError for one that cuts a block."""
    if not _is_on_blocks(part, whole.shape):
        raise TensorMismatchError(f"{name!r} is cut within blocks of FP8")
    scales = -(-part.count // FP8_BLOCK)
    values = whole.values.narrow(part.dim, part.first, part.count).contiguous()
    return Fp8Matrix(values, whole.scales.narrow(part.dim, part.first // FP8_BLOCK, scales).contiguous())


def cut_tensor(whole: RawTensor, part: TensorSlice, name: str) -> RawTensor:
    """Return a part of a tensor. Raises TensorMismatchError for one that cuts a block."""
    shape = part.shape(whole.shape)
    if part.dim < len(whole.shape) - 1:
        each = whole.rows // whole.shape[0]
        return whole.rows_slice(part.first * each, (part.first + part.count) * each).reshape(shape)
    qtype: BlockType = whole.qtype
    size = block_size(qtype)
    if part.first % size or part.count % size:
        raise TensorMismatchError(f"{name!r} is cut within blocks of {qtype.name}")
    head, first, last = row_head(qtype), row_bytes(qtype, part.first), row_bytes(qtype, part.first + part.count)
    rows = whole.data.view(whole.rows, whole.row_bytes)
    data = torch.cat([rows[:, :head], rows[:, first:last]], dim=1)
    return RawTensor(data.view(-1), qtype, shape)
