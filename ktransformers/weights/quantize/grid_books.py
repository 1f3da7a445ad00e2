"""The grids of IQ1, IQ2 and IQ3 as codebooks in which the entries near a point are found by its cell.

A point of 4 or 8 coordinates lies in the cell of the levels nearest to its coordinates: 4096 or 6561 cells. For each
the entries nearest to its middle are listed once, nearest first; a search then looks at so many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import gguf.quants
import numpy as np
import numpy.typing as npt

from ktransformers.kernels.types import QuantType
from ktransformers.weights.quantize.quant_search import F32Array, sums

__all__ = ["Book", "books_of"]

_NEAR = 24  # entries listed for a cell
_SLAB = 256  # cells whose distances to all entries are in memory at once

_GRIDS = {
    QuantType.IQ2_XXS: gguf.quants.IQ2_XXS,
    QuantType.IQ2_XS: gguf.quants.IQ2_XS,
    QuantType.IQ2_S: gguf.quants.IQ2_S,
    QuantType.IQ3_XXS: gguf.quants.IQ3_XXS,
    QuantType.IQ3_S: gguf.quants.IQ3_S,
    QuantType.IQ1_S: gguf.quants.IQ1_S,
    QuantType.IQ1_M: gguf.quants.IQ1_S,
}
_DELTAS = {QuantType.IQ1_S: (0.125, -0.125), QuantType.IQ1_M: (0.125, -0.125)}


@dataclass(frozen=True, slots=True)
class Book:
    """Codebook of entries [D, n] of D coordinates, and by cell those near it.

    low, step, levels: the first level of a coordinate, the distance of two, and how many there are. near: values
    [k, D, cells] of the k-th nearest entry of each cell; norms [k, cells]: its sum of squares; codes [k, cells]: its
    number.
    """

    values: F32Array
    low: float
    step: float
    levels: int
    near: F32Array
    norms: F32Array
    codes: npt.NDArray[np.intp]

    def cells(self, points: F32Array) -> npt.NDArray[np.intp]:
        """Return the cell of each point; points [D, n]."""
        level = points - np.float32(self.low)
        level *= np.float32(1 / self.step)
        np.rint(level, out=level)
        np.clip(level, 0, self.levels - 1, out=level)
        number = level[0].copy()
        for one in level[1:]:
            number *= np.float32(self.levels)
            number += one
        cells: npt.NDArray[np.intp] = number.astype(np.intp)
        return cells

    def nearest(self, points: F32Array, weights: F32Array | None, count: int) -> tuple[npt.NDArray[np.intp], F32Array]:
        """Return the entry that errs least of the `count` listed ones, and by how much less than zeros do, in squares.

        points [D, n], weights: of the squared error in each coordinate. Both results are [n].
        """
        cells = self.cells(points)
        twice = points + points
        if weights is not None:
            twice *= weights
        best = np.full(cells.shape, -np.inf, dtype=np.float32)
        rank = np.zeros(cells.shape, dtype=np.intp)
        entry, part = np.empty_like(points), np.empty_like(points)
        for k in range(min(count, len(self.codes))):
            np.take(self.near[k], cells, axis=1, out=entry, mode="clip")  # clip: the mode without a buffer
            if weights is None:
                gain = sums(entry, twice) - np.take(self.norms[k], cells)
            else:
                np.subtract(twice, np.multiply(weights, entry, out=part), out=part)
                gain = sums(entry, part)
            better = gain > best
            np.copyto(best, gain, where=better)
            np.copyto(rank, k, where=better)
        return self.codes[rank, cells], best


@cache
def books_of(qtype: QuantType) -> tuple[Book, ...]:
    """Return the book of a type; of IQ1 one with 1/8 added to all values, and one with it taken off."""
    grid = _GRIDS[qtype]
    grid.init_grid()
    entries = np.asarray(grid.grid, dtype=np.float64)
    entries = entries.reshape(-1, entries.shape[-1])
    return tuple(_made(entries + delta) for delta in _DELTAS.get(qtype, (0.0,)))


def _made(entries: npt.NDArray[np.float64]) -> Book:
    """entries [n, D]. Their coordinates are (nearly) evenly spaced levels."""
    count, dims = entries.shape
    levels = np.unique(entries)
    corners = np.stack(np.meshgrid(*[levels] * dims, indexing="ij"), axis=-1).reshape(-1, dims)
    codes = np.empty((min(_NEAR, count), len(corners)), dtype=np.intp)
    for start in range(0, len(corners), _SLAB):
        slab = corners[start : start + _SLAB]
        # Values are multiples of 1/8: 64 times a squared distance is a whole number, and a unique key with the code.
        squares = (slab**2).sum(1)[:, None] + (entries**2).sum(1) - 2 * slab @ entries.T
        keys = np.rint(squares * 64).astype(np.int64) * count + np.arange(count)
        keys = np.sort(np.partition(keys, len(codes) - 1, axis=1)[:, : len(codes)], axis=1)
        codes[:, start : start + _SLAB] = (keys % count).T
    values = entries.astype(np.float32)
    near = np.ascontiguousarray(values[codes].transpose(0, 2, 1))
    step = float(levels[-1] - levels[0]) / (len(levels) - 1)
    return Book(
        np.ascontiguousarray(values.T), float(levels[0]), step, len(levels), near, np.square(near).sum(axis=1), codes
    )
