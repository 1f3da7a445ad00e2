"""Blocks of types with grids for files of tests: scales and signs of the values given, entries of the grid drawn.

Finding the entries that are nearest takes longer than tests may, and what a model computes with matters to none. What
blocks hold is what the `gguf` package decodes; the same rows always give the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.types import QuantType
from ktransformers.weights.quantize.grid_layouts import GRID_LAYOUTS

__all__ = ["GRID_TYPES", "grid_blocks"]

_Float = npt.NDArray[np.float32]
_Int = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Format:
    grid: type
    sub: int  # columns of a scale
    factor: float  # a weight is d times this times (2 s + 1) times a value of the grid, or times 8 g +- 1
    max_scale: int = 15
    is_even: bool = False  # the number of minus signs of 8 columns


_FORMATS = {
    QuantType.IQ2_XXS: _Format(quants.IQ2_XXS, 32, 1 / 8, is_even=True),
    QuantType.IQ2_XS: _Format(quants.IQ2_XS, 16, 1 / 8, is_even=True),
    QuantType.IQ2_S: _Format(quants.IQ2_S, 16, 1 / 8),
    QuantType.IQ3_XXS: _Format(quants.IQ3_XXS, 32, 1 / 4, is_even=True),
    QuantType.IQ3_S: _Format(quants.IQ3_S, 32, 1),
    QuantType.IQ1_S: _Format(quants.IQ1_S, 32, 1 / 8, max_scale=7),
    QuantType.IQ1_M: _Format(quants.IQ1_M, 16, 1 / 8, max_scale=7),
}
GRID_TYPES = tuple(_FORMATS)
_IQ1 = (QuantType.IQ1_S, QuantType.IQ1_M)


def grid_blocks(values: _Float, qtype: QuantType) -> _Bytes:
    """[rows, cols] as blocks of `qtype`, uint8 [rows, bytes of a row]. cols: a multiple of 256."""
    form, x = _FORMATS[qtype], values.reshape(-1, 256)
    form.grid.init_grid()
    grid = form.grid.grid.reshape(-1, form.grid.grid.shape[-1])
    largest = 8 * grid.max() + 1 if qtype in _IQ1 else grid.max()
    wanted = np.abs(x).reshape(len(x), -1, form.sub).max(-1) / (form.factor * largest)
    d = (wanted.max(1) / (2 * form.max_scale + 1)).astype(np.float16)
    unit = d.astype(np.float32)[:, None] + np.float32(1e-30)
    scales = np.clip(np.rint((wanted / unit - 1) / 2), 0, form.max_scale).astype(np.int64)
    scaled = x / np.repeat(unit * (2 * scales + 1) * np.float32(form.factor), form.sub, axis=1)
    codes = _drawn(scaled.reshape(-1, grid.shape[1]), len(grid)).reshape(len(x), -1)
    if qtype in _IQ1:
        deltas = codes & 1 if qtype is QuantType.IQ1_M else np.repeat(codes[:, ::4] & 1, 4, axis=1)
        return GRID_LAYOUTS[qtype](d, codes, deltas, scales).reshape(len(values), -1)
    signs = (scaled < 0).reshape(-1, 8)
    if form.is_even:
        odd = np.flatnonzero(signs.sum(1) % 2)
        signs[odd, np.abs(scaled).reshape(-1, 8)[odd].argmin(1)] ^= True
    packed = np.packbits(signs, axis=1, bitorder="little").reshape(len(x), 32).astype(np.int64)
    return GRID_LAYOUTS[qtype](d, codes, packed, scales).reshape(len(values), -1)


def _drawn(points: _Float, size: int) -> _Int:
    """A number below `size` for every point [n, c], which depends on all its bits and looks random."""
    bits = np.ascontiguousarray(points, dtype=np.float32).view(np.uint32).astype(np.uint64)
    factors = np.random.default_rng(1).integers(1, 2**62, bits.shape[1]).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    return ((bits * factors).sum(1) >> np.uint64(40)).astype(np.int64) % size
