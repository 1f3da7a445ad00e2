"""Expert matrices on their way from a file to the kernels: as they are, converted, or quantized while loading.

Knows no file format: sources describe each expert's matrix as an `ExpertMatrix`, and get back one matrix per expert.
Conversion works on rows of about a megabyte, several experts at a time, straight into the final buffer, so that
nothing but the result and a few chunks is ever in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from typing_extensions import override

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import (
    FP8_BLOCK,
    BlockType,
    ExpertWeights,
    Fp8Matrix,
    OwnType,
    QuantType,
    RawTensor,
    WeightType,
    fp8_nbytes,
    row_bytes,
)
from ktransformers.system.cores import usable_cores
from ktransformers.weights.mapped_file import place_in_file, typed_view
from ktransformers.weights.quantize.write import QUANTIZABLE_TYPES, quantize, target_type
from ktransformers.weights.source import ExpertBiases, ExpertsInfo, MappedExperts, TensorInfo

__all__ = [
    "FLOAT_DTYPES",
    "BlockMatrix",
    "BlockScaledMatrix",
    "ExpertMatrix",
    "FloatMatrix",
    "RawMatrix",
    "StoredMatrices",
    "check_exact",
    "check_expert_shape",
    "expert_info",
    "load_matrices",
]

logger = logging.getLogger(__name__)

CHUNK_WEIGHTS = 1 << 16  # what one worker holds in fp32 at a time
_COPIED_COLS = 64

_MOST_EXACT = 1 << 24  # up to it F32 holds all whole numbers
FLOAT_DTYPES = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
_QUANTIZABLE_STORED = frozenset({"F32", "F16", "BF16", "F8_E4M3"})


class ExpertMatrix(Protocol):
    """Matrix [rows, cols] of one expert, not loaded yet."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def view(self) -> RawTensor | None:
        """Return the matrix without a copy, where the file holds it in a type and layout that the kernels read."""
        ...

    def rows_f32(self, start: int, stop: int) -> torch.Tensor:
        """Return rows start .. stop - 1 as a new fp32 tensor."""
        ...


@runtime_checkable
class BlockMatrix(ExpertMatrix, Protocol):
    """Expert matrix that has the numbers of a type of blocks and can write them."""

    @property
    def resident(self) -> BlockType: ...

    def write_blocks(self, out: RawTensor) -> None:
        """Write all rows to `out`, which is of the type `resident`, some at a time."""
        ...


@dataclass(frozen=True, slots=True)
class RawMatrix(ExpertMatrix):
    """A matrix that is already in a type the kernels read."""

    raw: RawTensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.raw.rows, self.raw.cols)

    @override
    def view(self) -> RawTensor | None:
        return self.raw

    @override
    def rows_f32(self, start: int, stop: int) -> torch.Tensor:
        rows = self.raw.rows_slice(start, stop)
        return typed_view(rows.data, FLOAT_DTYPES[rows.qtype]).reshape(rows.shape).float()


@dataclass(frozen=True, slots=True)
class FloatMatrix(ExpertMatrix):
    """A float matrix [rows, cols] with any strides (a transposed or interleaved part of a fused tensor)."""

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    @override
    def view(self) -> RawTensor | None:
        return RawTensor.from_tensor(self.values) if self.values.is_contiguous() else None

    @override
    def rows_f32(self, start: int, stop: int) -> torch.Tensor:
        return self.values[start:stop].float()


@dataclass(frozen=True, slots=True)
class BlockScaledMatrix(ExpertMatrix):
    """FP8 values [rows, cols] times one fp32 scale per `block` (rows, cols) of them: scales [ceil, ceil]."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    @override
    def view(self) -> RawTensor | None:
        return None

    @override
    def rows_f32(self, start: int, stop: int) -> torch.Tensor:
        row_blocks = torch.arange(start, stop) // self.block[0]
        scales = self.scales[row_blocks].repeat_interleave(self.block[1], dim=1)[:, : self.shape[1]]
        return self.values[start:stop].float().mul_(scales)

    def fp8(self) -> Fp8Matrix:
        """Return the matrix without a copy of its values, for blocks of 128 x 128 and for one scale."""
        scales = self.scales
        if self.block != (FP8_BLOCK, FP8_BLOCK):  # one scale for all
            grid = [-(-size // FP8_BLOCK) for size in self.shape]
            scales = scales.expand(grid)
        return Fp8Matrix(self.values.view(torch.uint8), scales.contiguous())


def check_exact(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return whole numbers `values`, of tensor `name`. Raises UnsupportedError for those that F32 does not hold."""
    if values.numel() and int(values.abs().max()) > _MOST_EXACT:
        raise UnsupportedError(f"tensor {name!r} holds numbers beyond {_MOST_EXACT}, which F32 does not hold")
    return values


def check_expert_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise TensorMismatchError when an expert tensor does not have the shape that the module needs."""
    if tuple(shape) != tuple(wanted):
        raise TensorMismatchError(f"expert tensor {name!r} has the shape {list(shape)}; the model needs {list(wanted)}")


@lru_cache
def _resident(natural: WeightType, cols: int, quantize_to: QuantType) -> WeightType:
    """The type that float rows of `cols` get when `quantize_to` is asked for. Cached, so that a change is said once."""
    if quantize_to not in QUANTIZABLE_TYPES:
        names = ", ".join(t.name.lower() for t in QUANTIZABLE_TYPES)
        raise UnsupportedError(f"experts cannot be quantized to {quantize_to.name}; possible types are {names}")
    target = target_type(quantize_to, cols)
    if target is not quantize_to:
        logger.warning(
            "expert rows of %d weights cannot be %s; they are held as %s",
            cols,
            quantize_to.name,
            (target or natural).name,
        )
    return target or natural


def expert_info(
    name: str,
    stored_type: str,
    natural: WeightType,
    shape: tuple[int, int, int],
    stored_names: tuple[str, ...],
    quantize_to: QuantType | None,
) -> TensorInfo:
    """Return facts about one projection of all experts. natural: the type it is held in when not quantized while
    loading.
    """
    resident = natural
    if quantize_to is not None and stored_type in _QUANTIZABLE_STORED:
        resident = _resident(natural, shape[-1], quantize_to)
    if isinstance(resident, OwnType):
        nbytes = shape[0] * fp8_nbytes(*shape[1:])
    else:
        nbytes = math.prod(shape[:-1]) * row_bytes(resident, shape[-1])
    return TensorInfo(name, shape, stored_type, resident, nbytes, stored_names)


def load_matrices(matrices: Sequence[ExpertMatrix], target: WeightType) -> Sequence[RawTensor | Fp8Matrix]:
    """Load each matrix as `target`: views where that is possible, else slices of one new buffer.

    target F8_E4M3 is for matrices that are stored so.
    """
    if isinstance(target, OwnType):
        return [matrix.fp8() for matrix in matrices if isinstance(matrix, BlockScaledMatrix)]
    if (found := _views(matrices, target)) is not None:
        return found
    rows, cols = matrices[0].shape
    size = rows * row_bytes(target, cols)
    buffer = torch.empty(len(matrices) * size, dtype=torch.uint8)
    out = [RawTensor(buffer[index * size : (index + 1) * size], target, (rows, cols)) for index in range(len(matrices))]
    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:  # numpy and torch let go of the GIL in long loops
        list(pool.map(_convert, matrices, out))
    return out


def _views(matrices: Sequence[ExpertMatrix], target: WeightType) -> list[RawTensor] | None:
    """All of them as they are, None where one is not of the type `target`, or in pieces."""
    found = list[RawTensor]()
    for matrix in matrices:
        raw = matrix.view()
        if raw is None or raw.qtype is not target:
            return None
        found.append(raw)
    return found


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """The experts of one layer as files have them. parts: the matrix of each expert, by "gate", "up", "down"."""

    info: ExpertsInfo
    parts: Mapping[str, Sequence[ExpertMatrix]]
    biases: ExpertBiases

    def _infos(self) -> list[tuple[str, TensorInfo]]:
        of = (("gate", self.info.gate), ("up", self.info.up), ("down", self.info.down))
        return [(name, info) for name, info in of if info is not None]

    def load(self) -> ExpertWeights:
        """Return the experts as kernels read them, or as `pack_experts` packs them."""
        loaded = {name: load_matrices(self.parts[name], info.resident_type) for name, info in self._infos()}
        return ExpertWeights(loaded.get("gate"), loaded["up"], loaded["down"], *self.biases)

    def mapped(self) -> MappedExperts:
        """Return the experts as views of the mapped files, or why there are none."""
        found: dict[str, Sequence[RawTensor]] = {}
        for name, info in self._infos():
            target = info.resident_type
            views = None if isinstance(target, OwnType) else _views(self.parts[name], target)
            if views is None:
                way = f"made {target.name}" if info.stored_type != target.name else "laid out anew, by rows"
                why_not = f"{info.name} is stored as {info.stored_type} and has to be {way}"
                return MappedExperts(None, None, None, self.biases, why_not)
            if any(place_in_file(raw.data) is None for raw in views):
                why_not = f"{info.name} does not lie in its file as {target.name} does in memory"
                return MappedExperts(None, None, None, self.biases, why_not)
            found[name] = views
        return MappedExperts(found.get("gate"), found["up"], found["down"], self.biases)


def _copy_strided(values: torch.Tensor, out: torch.Tensor) -> None:
    """values [rows, cols] of any strides into contiguous `out`, in columns that fill lines of a cache on both sides."""
    step = max(values.shape[1], 1) if values.stride(1) == 1 else _COPIED_COLS
    for start in range(0, values.shape[1], step):
        out[:, start : start + step] = values[:, start : start + step]


def _convert(matrix: ExpertMatrix, out: RawTensor) -> None:
    rows, cols = matrix.shape
    if isinstance(matrix, FloatMatrix) and FLOAT_DTYPES.get(out.qtype) is matrix.values.dtype:
        _copy_strided(matrix.values, out.data.view(matrix.values.dtype).view(rows, cols))
        return
    if isinstance(matrix, BlockMatrix) and out.qtype is matrix.resident:
        matrix.write_blocks(out)
        return
    step = max(1, CHUNK_WEIGHTS // max(cols, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        part = out.rows_slice(start, stop)
        values = matrix.rows_f32(start, stop)
        dtype = FLOAT_DTYPES.get(out.qtype)
        if dtype is not None:
            part.data.view(dtype).copy_(values.reshape(-1))
        else:
            part.data.copy_(torch.from_numpy(quantize(values.numpy(), out.qtype)).reshape(-1))
