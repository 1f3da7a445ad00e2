"""Tensors that a file will get, wherever they come from, as matrices whose rows are read when they are wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.kernels.types import FP8_BLOCK, Fp8Matrix, QuantType, RawTensor
from ktransformers.weights.experts import BlockScaledMatrix
from ktransformers.weights.gguf.file import GGUFModel
from ktransformers.weights.quantize.transcode import dequantize

__all__ = ["Matrix", "OutTensor", "gguf_tensors", "rows_as", "rows_f32"]

Matrix = torch.Tensor | RawTensor | Fp8Matrix
"""[rows, cols] as it is stored, most often a view of a mapped file."""


@dataclass(frozen=True, slots=True)
class OutTensor:
    """Tensor that a file will get. shape: in torch order; stored: its type's name where it comes from.

    matrices: opens it, as one matrix for each of the leading dimensions' entries; a vector is one row.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    matrices: Callable[[], Sequence[Matrix]]

    @property
    def num_matrices(self) -> int:
        """Number of matrices that `matrices` gives."""
        return math.prod(self.shape[:-2])

    @property
    def rows(self) -> int:
        """Number of rows of one matrix."""
        return self.shape[-2] if len(self.shape) > 1 else 1


def rows_f32(matrix: Matrix, start: int, stop: int, name: str) -> npt.NDArray[np.float32]:
    """Return rows start .. stop - 1 of a matrix in fp32."""
    if isinstance(matrix, Fp8Matrix):
        codes = matrix.values.view(torch.float8_e4m3fn)
        return BlockScaledMatrix(codes, matrix.scales, (FP8_BLOCK, FP8_BLOCK)).rows_f32(start, stop).numpy()
    if isinstance(matrix, RawTensor):
        return dequantize(matrix.rows_slice(start, stop), name).numpy()
    return matrix[start:stop].float().numpy()


def rows_as(matrix: Matrix, start: int, stop: int, qtype: QuantType) -> npt.NDArray[np.uint8] | None:
    """Return the bytes of rows that are stored as `qtype` already; None for others."""
    if isinstance(matrix, RawTensor) and matrix.qtype is qtype:
        return matrix.rows_slice(start, stop).data.numpy()
    return None


def gguf_tensors(model: GGUFModel) -> list[OutTensor]:
    """Return the tensors of a GGUF model, in the order of its files."""

    def opener(name: str) -> Callable[[], Sequence[Matrix]]:
        def matrices() -> Sequence[Matrix]:
            raw = model.raw(name)
            shape = raw.shape if len(raw.shape) > 1 else (1, *raw.shape)
            count, size = math.prod(shape[:-2]), raw.nbytes // math.prod(shape[:-2])
            parts = (raw.data[index * size : (index + 1) * size] for index in range(count))
            return [RawTensor(part, raw.qtype, shape[-2:]) for part in parts]

        return matrices

    return [OutTensor(name, one.shape, one.qtype.name, opener(name)) for name, one in model.tensors.items()]
