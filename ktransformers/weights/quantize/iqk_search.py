"""Quantizes to types of ik_llama.cpp: IQ2_K, IQ3_K, IQ4_K, IQ4_KS, IQ5_K. Knows no file, no model and no kernel.

Per sub-block both tables, the values of codes and the same plus a number, are fitted as `quantize/write.py` fits one,
and the one that errs less is kept; then whole scales and their step are searched with that choice. The step is an fp16
number of 256 weights, of IQ4_KS an fp32 one of a whole row. Layouts: kernels/iqk_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktransformers.kernels.iqk_blocks import IQK_VALUES
from ktransformers.kernels.types import QuantType
from ktransformers.weights.quantize.quant_search import (
    F32Array,
    Grid,
    TableGrid,
    U8Array,
    WholeScales,
    fit_scale,
    inverse,
    round_scales,
    sums,
)

__all__ = ["IQK_WRITABLE", "encode_iqk"]


class ShiftedGrid(Grid):
    """Grid of a table's values plus a number of each sub-block, shifts [sub-blocks]."""

    def __init__(self, table: TableGrid, shifts: F32Array):
        self.table, self.shifts, self.tries = table, shifts, table.tries

    def snap(self, r: F32Array, out: F32Array) -> F32Array:
        """Return the value of the grid nearest to each of r, in `out`, which may be r."""
        np.subtract(r, self.shifts, out=out)
        self.table.snap(out, out)
        return np.add(out, self.shifts, out=out)

    def codes(self, r: F32Array) -> U8Array:
        """Return the number in the table of the value nearest to each of r."""
        return self.table.codes(r - self.shifts)


@dataclass(frozen=True, slots=True)
class _Found:
    """Of n blocks or rows their steps' bytes, and of their sub-blocks whole scales, bits [sub-blocks] and codes
    [sub-blocks, values].
    """

    step_bytes: U8Array
    scales: npt.NDArray[np.int32]
    bits: U8Array
    codes: U8Array


@dataclass(frozen=True, slots=True)
class _Search:
    """What a type needs. tries: see `Grid`. scales: which whole scales there are. has_row_step: of one fp32 step."""

    tries: tuple[float, ...]
    scales: WholeScales
    has_row_step: bool = False


# What the largest magnitude is tried on, found greedily on normal and Laplace distributed weights, for both tables.
_SEARCHES: Mapping[QuantType, _Search] = {
    QuantType.IQ2_K: _Search((34.5, 27.4, 38.4, -20.8, 30.6, 20.9, 23.5, 32.5), WholeScales(-8, 7)),
    QuantType.IQ3_K: _Search((63.5, -56.4, 57.0, 70.1, -49.4, 42.5, 75.3, 50.4), WholeScales(-16, 15, is_odd=True)),
    QuantType.IQ4_K: _Search((125.4, -118.7, 104.2, 133.3, 120.1, -113.0, -93.2, -124.3, 83.1), WholeScales(-32, 31)),
    QuantType.IQ4_KS: _Search(
        (128.1, -121.5, 122.8, 133.3, -113.0, 106.9, 117.5, -127.1), WholeScales(-64, 63, is_odd=True), True
    ),
    QuantType.IQ5_K: _Search((124.4, -124.0, 113.9, -111.9, -121.0, 127.1), WholeScales(-32, 31)),
}

IQK_WRITABLE = tuple(_SEARCHES)
"""Types that `encode_iqk` writes."""


def encode_iqk(values: F32Array, weights: F32Array | None, qtype: QuantType) -> U8Array:
    """Quantize fp32 [rows, cols], with weights of the same shape or None, to bytes [rows, bytes of a row]."""
    search, known = _SEARCHES[qtype], IQK_VALUES[qtype]
    size = 256 // known.subs
    x = np.ascontiguousarray(values.reshape(-1, size).T)
    w = None if weights is None else np.ascontiguousarray(weights.reshape(-1, size).T)
    grid, scale = _chosen_grid(x, w, TableGrid(known.values, search.tries), known.shift)
    per_step = values.shape[1] // size if search.has_row_step else known.subs
    dtype = np.float32 if search.has_row_step else np.float16
    step_bytes, whole, scale = round_scales(x, w, scale, grid, (per_step, search.scales), np.dtype(dtype))
    codes = grid.codes(x * inverse(scale)).T.astype(np.uint8, order="C")
    bits = (grid.shifts > 0).astype(np.uint8)
    packed = _PACKERS[qtype](_Found(step_bytes, whole.astype(np.int32), bits, codes))
    if search.has_row_step:
        return np.concatenate([step_bytes, packed.reshape(len(values), -1)], axis=1)
    return packed.reshape(len(values), -1)


def _chosen_grid(x: F32Array, w: F32Array | None, table: TableGrid, shift: int) -> tuple[ShiftedGrid, F32Array]:
    """The table or the shifted one for each sub-block, and the scale that fits it best."""
    wx = x if w is None else w * x
    values = np.empty_like(x)
    found = []
    for number in (0, shift):
        grid = ShiftedGrid(table, np.full(x.shape[1], number, dtype=np.float32))
        scale = fit_scale(x, grid, w)
        grid.snap(np.multiply(x, inverse(scale), out=values), values)
        gain = scale * (2 * sums(wx, values) - scale * sums(values if w is None else w * values, values))
        found.append((scale, gain))
    is_shifted = found[1][1] > found[0][1]
    shifts = np.where(is_shifted, np.float32(shift), np.float32(0)).astype(np.float32)
    return ShiftedGrid(table, shifts), np.where(is_shifted, found[1][0], found[0][0])


# -- bytes


def _flags(bits: U8Array, count: int) -> U8Array:
    """[blocks * count] bits to [blocks, count / 8] bytes, from the lowest up."""
    return np.packbits(bits.reshape(-1, count), axis=1, bitorder="little")


def _pairs(nibbles: npt.NDArray[np.int32]) -> U8Array:
    """[blocks, n] nibbles to [blocks, n / 2] bytes, the first one low."""
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)


def _in_runs(codes: U8Array, run: int, bits: int) -> U8Array:
    """[blocks, 256] fields to bytes: a run of bytes has their lowest fields one after the other, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = codes.reshape(len(codes), -1, 8 // bits, run)
    packed: U8Array = np.bitwise_or.reduce(fields << shifts, axis=2)
    return packed.reshape(len(codes), -1)


def _pack_iq2_k(found: _Found) -> U8Array:
    scales = _pairs(found.scales.reshape(-1, 16) + 8)
    return np.concatenate(
        [found.step_bytes, _flags(found.bits, 16), scales, _in_runs(found.codes.reshape(-1, 256), 32, 2)], axis=1
    )


def _pack_iq3_k(found: _Found) -> U8Array:
    codes, scales = found.codes.reshape(-1, 256), found.scales.reshape(-1, 16)
    signs, sizes = _flags((scales < 0).astype(np.uint8), 16), _pairs((np.abs(scales) - 1) // 2)
    low, third = _in_runs(codes & np.uint8(3), 32, 2), _in_runs(codes >> np.uint8(2), 32, 1)
    return np.concatenate([found.step_bytes, _flags(found.bits, 16), signs, sizes, low, third], axis=1)


def _six_bit_header(found: _Found) -> U8Array:
    scales = found.scales.reshape(-1, 16) + 32
    upper = _in_runs((scales >> 4).astype(np.uint8), 1, 2)
    return np.concatenate([found.step_bytes, _flags(found.bits, 16), upper, _pairs(scales & 15)], axis=1)


def _pack_iq4_k(found: _Found) -> U8Array:
    return np.concatenate([_six_bit_header(found), _in_runs(found.codes.reshape(-1, 256), 16, 4)], axis=1)


def _pack_iq5_k(found: _Found) -> U8Array:
    codes = found.codes.reshape(-1, 256)
    low, fifth = _in_runs(codes & np.uint8(15), 32, 4), _in_runs(codes >> np.uint8(4), 32, 1)
    return np.concatenate([_six_bit_header(found), low, fifth], axis=1)


def _pack_iq4_ks(found: _Found) -> U8Array:
    stored = (found.scales + 127).astype(np.uint8) | found.bits
    return np.concatenate([stored.reshape(-1, 8), _in_runs(found.codes.reshape(-1, 256), 16, 4)], axis=1)


_PACKERS: Mapping[QuantType, Callable[[_Found], U8Array]] = {
    QuantType.IQ2_K: _pack_iq2_k,
    QuantType.IQ3_K: _pack_iq3_k,
    QuantType.IQ4_K: _pack_iq4_k,
    QuantType.IQ4_KS: _pack_iq4_ks,
    QuantType.IQ5_K: _pack_iq5_k,
}
"""What makes bytes [blocks, bytes] of what was found; of IQ4_KS without the row's step."""
