"""Quantizes fp32 matrices to GGML block formats. Knows no file, no model and no kernel.

Q8_0, TQ1_0 and TQ2_0 are the `gguf` package's own. The others, whose layouts are those that `gguf.quants` dequantizes,
are searched for the least squared error:

1. Per sub-block of 32 (16 for Q2_K, Q3_K, Q6_K), several trial scales around the one that spans the values give codes;
   for fixed codes the best scale (and offset) has a closed form, and the trial with the least error wins.
2. The sub-block scales (and offsets) of a super-block of 256 are rounded to 4, 6 or 8 bits of a common fp16 step. Of
   types with few bits the neighbours of the nearest whole number are tried as well, and the step is fitted again.
3. The codes are taken again for the rounded scales, and the offsets of Q4_K and Q5_K once more for those codes.

With the importance of each column the squared error is weighted by it. quant_search.py has the arithmetic; types whose
codes name entries of a grid (IQ1, IQ2, IQ3) are those of grid_search.py, ik_llama.cpp's those of iqk_search.py.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf.quants
import numpy as np
import numpy.typing as npt

from ktransformers.errors import UnsupportedError, WeightError
from ktransformers.kernels.types import QuantType, block_size, row_bytes
from ktransformers.weights.quantize.grid_search import GRID_TYPES, encode_grid
from ktransformers.weights.quantize.iqk_search import IQK_WRITABLE, encode_iqk
from ktransformers.weights.quantize.quant_search import (
    F32Array,
    IntGrid,
    TableGrid,
    U8Array,
    WholeScales,
    fit_affine,
    fit_scale,
    inverse,
    round_affine,
    round_codes,
    round_scales,
    sums,
    to_f16,
)

__all__ = ["QUANTIZABLE_TYPES", "WRITABLE_TYPES", "quantize", "target_type"]

SUPER_BLOCK = 256
CHUNK_WEIGHTS = 1 << 16  # the ten or so temporaries of one chunk stay in a core's L2 and L3 cache
MAX_MAGNITUDE = 65504.0  # of fp16; anything larger is no trained weight, and its scale might overflow

_WIDE_TYPES = (QuantType.F32, QuantType.BF16)

# What the largest magnitude is tried on, found greedily on normal and Laplace distributed weights.
_Q6_GRID = IntGrid(-32, 31, tuple(range(25, 33)))
_Q3_GRID = IntGrid(-4, 3, (4.4, 4.0, 3.7, 3.4, 3.1, 2.8, 2.5, 2.2, 1.8, -3.6, -3.3, -3.0, -2.7, -2.4, -2.0))
_Q4_GRID = IntGrid(-8, 7, (8.4, 7.9, 7.4, 6.9, 6.4, 5.9, 5.3, -7.4, -6.9, -6.4, -5.9))
_Q5_GRID = IntGrid(-16, 15, (16.2, 15.6, 15.0, 14.4, 13.8, 13.0, -15.0, -14.4, -13.8))
_IQ4_GRID = TableGrid(gguf.quants.IQ4_NL.kvalues, (127, 119, 111, 103, 95, -113, -105, -97, -89))
_FP4_GRID = TableGrid(gguf.quants.MXFP4.kvalues, ())
_SIX_BITS = WholeScales(-32, 31)


def quantize(
    values: npt.NDArray[np.floating], qtype: QuantType, importance: npt.NDArray[np.float32] | None = None
) -> U8Array:
    """Quantize [rows, cols] of any float dtype to uint8 [rows, row_bytes].

    cols must be a multiple of the type's block size (32 or 256). importance: fp32 [cols], what a squared error in each
    column weighs; not negative. Raises UnsupportedError for a type that is not in WRITABLE_TYPES, WeightError for
    values that are not finite or exceed fp16's range, ValueError for a bad shape.
    """
    encode = _ENCODERS.get(qtype)
    if encode is None:
        names = ", ".join(t.name.lower() for t in WRITABLE_TYPES)
        raise UnsupportedError(f"cannot quantize to {qtype.name}; possible types are {names}")
    block = block_size(qtype)
    if values.ndim != 2 or values.shape[1] % block:
        raise ValueError(f"{qtype.name} needs [rows, multiple of {block}], got {list(values.shape)}")
    rows, cols = values.shape
    limit = float(np.finfo(np.float32).max) if qtype in _WIDE_TYPES else MAX_MAGNITUDE
    weighted = None if importance is None else _usable(importance, cols)
    out = np.empty((rows, row_bytes(qtype, cols)), dtype=np.uint8)
    step = max(1, CHUNK_WEIGHTS // max(cols, 1))
    for start in range(0, rows, step):
        chunk = np.ascontiguousarray(values[start : start + step], dtype=np.float32)
        # One pass that also catches NaN, which fails every comparison.
        if not (chunk.size == 0 or (chunk.max() <= limit and chunk.min() >= -limit)):
            raise WeightError(f"cannot quantize to {qtype.name}: a weight is not finite or exceeds {limit:g}")
        weights = None if weighted is None else np.broadcast_to(weighted, chunk.shape)
        out[start : start + step] = encode(chunk, weights).reshape(chunk.shape[0], -1)
    return out


def _usable(importance: npt.NDArray[np.float32], cols: int) -> F32Array | None:
    """Importances around 1, none of them nearly 0: columns that a text never used still count a little."""
    if importance.shape != (cols,):
        raise ValueError(f"importance needs the shape [{cols}], got {list(importance.shape)}")
    mean = float(importance.astype(np.float64).mean()) if cols else 0.0
    if not np.isfinite(mean) or mean <= 0:
        return None
    return np.maximum((importance / mean).astype(np.float32), np.float32(1e-4))


_SHORT_ROW_TYPES = {QuantType.Q4_K: QuantType.Q4_0, QuantType.Q5_K: QuantType.Q8_0, QuantType.Q6_K: QuantType.Q8_0}


def target_type(qtype: QuantType, cols: int) -> QuantType | None:
    """Return the type that rows of `cols` weights get when `qtype` is asked for, or None when they must stay as they
    are.

    K-quants need rows in multiples of 256. Other rows get the 32-block type that is no coarser in bits per weight
    of its codes: Q8_0 for Q5_K and Q6_K, Q4_0 for Q4_K.
    """
    if cols % block_size(qtype) == 0:
        return qtype
    if cols % 32 == 0:
        return _SHORT_ROW_TYPES.get(qtype)
    return None


def _blocks(values: F32Array, weights: F32Array | None, size: int) -> tuple[F32Array, F32Array | None]:
    """x and w as [values of one sub-block, sub-blocks] of `size` values."""
    x = np.ascontiguousarray(values.reshape(-1, size).T)
    return x, None if weights is None else np.ascontiguousarray(weights.reshape(-1, size).T)


# -- K-quants with offsets


def _encode_affine(values: F32Array, weights: F32Array | None, max_code: int) -> tuple[U8Array, U8Array]:
    """Header bytes [n, 16] (d, dmin, packed 6-bit scales and offsets) and codes [n, 8, 32] of Q4_K and Q5_K."""
    n = values.size // SUPER_BLOCK
    x, w = _blocks(values, weights, 32)
    scale, offset = fit_affine(x, max_code, w)
    if w is not None:  # here the nearest whole scale is seldom the best one
        found = round_affine(x, w, scale, offset, (8, 63, max_code))
        packed = _pack_scales(*(part.astype(np.uint8).reshape(n, 8) for part in (found.scales, found.offsets)))
        header = np.concatenate([found.d_bytes, found.dmin_bytes, packed], axis=1)
        return header, found.codes.T.astype(np.uint8, order="C").reshape(n, 8, 32)
    d_bytes, d = to_f16(scale.reshape(n, 8).max(axis=1) / 63)
    dmin_bytes, dmin = to_f16(offset.reshape(n, 8).max(axis=1) / 63)
    d, dmin = np.repeat(d, 8), np.repeat(dmin, 8)
    inverse_dmin = inverse(dmin)
    scale6 = np.clip(np.rint(scale * inverse(d)), 0, 63)
    offset6 = np.clip(np.rint(offset * inverse_dmin), 0, 63)
    scale = d * scale6
    inverse_scale = inverse(scale)
    codes = np.empty_like(x)
    round_codes(x, inverse_scale, dmin * offset6 * inverse_scale, 0, max_code, codes)
    offset = (scale * codes.sum(axis=0) - x.sum(axis=0)) / 32
    offset6 = np.clip(np.rint(offset * inverse_dmin), 0, 63)
    round_codes(x, inverse_scale, dmin * offset6 * inverse_scale, 0, max_code, codes)
    packed = _pack_scales(scale6.astype(np.uint8).reshape(n, 8), offset6.astype(np.uint8).reshape(n, 8))
    header = np.concatenate([d_bytes, dmin_bytes, packed], axis=1)
    return header, codes.T.astype(np.uint8, order="C").reshape(n, 8, 32)


def _pack_scales(scale6: U8Array, offset6: U8Array) -> U8Array:
    """Sixteen 6-bit numbers in 12 bytes, in the order that `gguf.quants.Q4_K.get_scale_min` undoes."""
    packed = np.empty((len(scale6), 12), dtype=np.uint8)
    packed[:, :4] = scale6[:, :4] | (scale6[:, 4:] >> 4) << 6
    packed[:, 4:8] = offset6[:, :4] | (offset6[:, 4:] >> 4) << 6
    packed[:, 8:] = (scale6[:, 4:] & 15) | (offset6[:, 4:] & 15) << 4
    return packed


def _pack_nibbles(codes: U8Array) -> U8Array:
    """[n, 8, 32] codes to [n, 128] bytes: sub-blocks 2k and 2k+1 are the low and high nibbles of 32 bytes."""
    pairs = codes.reshape(-1, 4, 2, 32) & np.uint8(15)
    return (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(-1, 128)


def _encode_q4_k(values: F32Array, weights: F32Array | None) -> U8Array:
    header, codes = _encode_affine(values, weights, 15)
    return np.concatenate([header, _pack_nibbles(codes)], axis=1)


def _encode_q5_k(values: F32Array, weights: F32Array | None) -> U8Array:
    header, codes = _encode_affine(values, weights, 31)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth_bits = np.bitwise_or.reduce((codes >> 4) << shifts, axis=1)
    return np.concatenate([header, fifth_bits, _pack_nibbles(codes)], axis=1)


def _pack_pairs_of_bits(codes: U8Array) -> U8Array:
    """[n, 256] codes of two bits to [n, 64] bytes: each 128 are four times 32, at bits 0, 2, 4 and 6 of 32 bytes."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    packed: U8Array = np.bitwise_or.reduce(codes.reshape(-1, 2, 4, 32) << shifts, axis=2)
    return packed.reshape(-1, 64)


def _encode_q2_k(values: F32Array, weights: F32Array | None) -> U8Array:
    n = values.size // SUPER_BLOCK
    x, w = _blocks(values, weights, 16)
    found = round_affine(x, w, *fit_affine(x, 3, w), (16, 15, 3))
    scales = found.scales.astype(np.uint8) | found.offsets.astype(np.uint8) << np.uint8(4)
    codes = found.codes.T.astype(np.uint8, order="C").reshape(n, SUPER_BLOCK)
    return np.concatenate([scales.reshape(n, 16), _pack_pairs_of_bits(codes), found.d_bytes, found.dmin_bytes], axis=1)


# -- K-quants without


def _encode_q6_k(values: F32Array, weights: F32Array | None) -> U8Array:
    n = values.size // SUPER_BLOCK
    x, w = _blocks(values, weights, 16)
    scale = fit_scale(x, _Q6_GRID, w)
    per_block = scale.reshape(n, 16)
    at = np.abs(per_block).argmax(axis=1)
    # The largest scale is stored as -128, which the sign of the step makes up for.
    d_bytes, d = to_f16(per_block[np.arange(n), at] / -128)
    step = np.repeat(d, 16)
    scale8 = np.clip(np.rint(scale * inverse(step)), -128, 127)
    codes = round_codes(x, inverse(step * scale8), None, -32, 31, np.empty_like(x))
    unsigned = (codes.T + 32).astype(np.uint8).reshape(n, 2, 4, 32)
    low, high = unsigned & np.uint8(15), unsigned >> np.uint8(4)
    low_bytes = (low[:, :, :2] | low[:, :, 2:] << np.uint8(4)).reshape(n, 128)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high_bytes = np.bitwise_or.reduce(high << shifts, axis=2).reshape(n, 64)
    scale_bytes = scale8.astype(np.int8).view(np.uint8).reshape(n, 16)
    return np.concatenate([low_bytes, high_bytes, scale_bytes, d_bytes], axis=1)


def _encode_q3_k(values: F32Array, weights: F32Array | None) -> U8Array:
    n = values.size // SUPER_BLOCK
    x, w = _blocks(values, weights, 16)
    d_bytes, whole, scale = round_scales(x, w, fit_scale(x, _Q3_GRID, w), _Q3_GRID, (16, _SIX_BITS))
    codes = round_codes(x, inverse(scale), None, -4, 3, np.empty_like(x))
    unsigned = (codes.T + 4).astype(np.uint8).reshape(n, SUPER_BLOCK)
    bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    third = np.bitwise_or.reduce((unsigned.reshape(n, 8, 32) >> np.uint8(2)) << bits, axis=1)
    scale6 = (whole + 32).astype(np.uint8).reshape(n, 16)
    packed = np.empty((n, 12), dtype=np.uint8)
    packed[:, :8] = scale6[:, :8] & 15 | (scale6[:, 8:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)
    packed[:, 8:] = np.bitwise_or.reduce((scale6.reshape(n, 4, 4) >> np.uint8(4)) << shifts, axis=1)
    return np.concatenate([third, _pack_pairs_of_bits(unsigned & np.uint8(3)), packed, d_bytes], axis=1)


# -- tables of values


def _halves(codes: U8Array) -> U8Array:
    """[blocks, 32] codes to [blocks, 16] bytes: the first half in the low nibbles."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


def _encode_iq4_nl(values: F32Array, weights: F32Array | None) -> U8Array:
    x, w = _blocks(values, weights, 32)
    d_bytes, d = to_f16(fit_scale(x, _IQ4_GRID, w))
    codes = _IQ4_GRID.codes(x * inverse(d)).T
    return np.concatenate([d_bytes, _halves(codes)], axis=1)


def _encode_iq4_xs(values: F32Array, weights: F32Array | None) -> U8Array:
    n = values.size // SUPER_BLOCK
    x, w = _blocks(values, weights, 32)
    d_bytes, whole, scale = round_scales(x, w, fit_scale(x, _IQ4_GRID, w), _IQ4_GRID, (8, _SIX_BITS))
    nibbles = _halves(_IQ4_GRID.codes(x * inverse(scale)).T).reshape(n, 128)
    scale6 = (whole + 32).astype(np.uint16).reshape(n, 8)
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = np.bitwise_or.reduce((scale6 >> np.uint16(4)) << shifts, axis=1).astype("<u2").view(np.uint8).reshape(n, 2)
    low = (scale6 & np.uint16(15)).astype(np.uint8)
    return np.concatenate([d_bytes, high, low[:, 0::2] | low[:, 1::2] << np.uint8(4), nibbles], axis=1)


def _encode_mxfp4(values: F32Array, weights: F32Array | None) -> U8Array:
    """The power of two is the one that brings the largest value to 4 .. 8, or one of its neighbours."""
    x, w = _blocks(values, weights, 32)
    largest = np.abs(x).max(axis=0)
    _, exponent = np.frexp(largest)  # largest in [2 ** (exponent - 1), 2 ** exponent)
    usual = np.where(largest > 0, exponent - 3 + 127, 0)
    best_error = np.full_like(largest, np.inf)
    best = np.zeros_like(usual)
    values_of, wide = np.empty_like(x), np.empty_like(x)
    for add in (0, -1, 1):
        stored = np.clip(usual + add, 0, 254)
        scale = np.ldexp(np.float32(1), stored - 128).astype(np.float32)  # of doubled values
        _FP4_GRID.snap(np.multiply(x, inverse(scale), out=values_of), values_of)
        np.subtract(x, np.multiply(values_of, scale, out=values_of), out=wide)
        error = sums(wide, wide) if w is None else sums(wide * w, wide)
        better = error < best_error
        best_error, best = np.where(better, error, best_error), np.where(better, stored, best)
    scale = np.ldexp(np.float32(1), best - 128).astype(np.float32)
    codes = _FP4_GRID.codes(x * inverse(scale)).T
    return np.concatenate([best.astype(np.uint8).reshape(-1, 1), _halves(codes)], axis=1)


# -- types of one scale per 32


def _fifth_bits(codes: U8Array) -> U8Array:
    """[blocks, 32] codes to the bytes [blocks, 4] of their fifth bits."""
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


_Encoder = Callable[[F32Array, F32Array | None], U8Array]


def _encode_symmetric(grid: IntGrid) -> _Encoder:
    def encode(values: F32Array, weights: F32Array | None) -> U8Array:
        x, w = _blocks(values, weights, 32)
        d_bytes, d = to_f16(fit_scale(x, grid, w))
        codes = round_codes(x, inverse(d), None, grid.low, grid.high, np.empty_like(x))
        unsigned = (codes.T - grid.low).astype(np.uint8)
        parts = [d_bytes] + [_fifth_bits(unsigned)] * (grid.high > 7) + [_halves(unsigned & np.uint8(15))]
        return np.concatenate(parts, axis=1)

    return encode


def _encode_with_minimum(max_code: int) -> _Encoder:
    def encode(values: F32Array, weights: F32Array | None) -> U8Array:
        x, w = _blocks(values, weights, 32)
        scale, offset = fit_affine(x, max_code, w)
        (d_bytes, d), (m_bytes, m) = to_f16(scale), to_f16(-offset)
        inverse_scale = inverse(d)
        codes = round_codes(x, inverse_scale, -m * inverse_scale, 0, max_code, np.empty_like(x))
        unsigned = codes.T.astype(np.uint8)
        parts = [d_bytes, m_bytes] + [_fifth_bits(unsigned)] * (max_code > 15) + [_halves(unsigned & np.uint8(15))]
        return np.concatenate(parts, axis=1)

    return encode


def _by_gguf(qtype: QuantType) -> _Encoder:
    """gguf's own quantizer, to which all columns are alike."""

    def encode(values: F32Array, weights: F32Array | None) -> U8Array:
        encoded: U8Array = gguf.quants.quantize(values, qtype)
        return encoded.view(np.uint8)

    return encode


def _of_type(search: Callable[[F32Array, F32Array | None, QuantType], U8Array], qtype: QuantType) -> _Encoder:
    def encode(values: F32Array, weights: F32Array | None) -> U8Array:
        return search(values, weights, qtype)

    return encode


def _encode_q1_0(values: F32Array, weights: F32Array | None) -> U8Array:
    """Signs, and of 128 columns the mean magnitude, which has the least squared error."""
    x, w = _blocks(values, weights, 128)
    magnitudes = np.abs(x, dtype=np.float64)
    d = magnitudes.mean(axis=0) if w is None else (magnitudes * w).sum(axis=0) / w.sum(axis=0, dtype=np.float64)
    d_bytes, _ = to_f16(d.astype(np.float32))
    return np.concatenate([d_bytes, np.packbits(x >= 0, axis=0, bitorder="little").T], axis=1)


_ENCODERS: dict[QuantType, _Encoder] = {
    QuantType.Q8_0: _by_gguf(QuantType.Q8_0),
    QuantType.Q4_0: _encode_symmetric(_Q4_GRID),
    QuantType.Q4_K: _encode_q4_k,
    QuantType.Q5_K: _encode_q5_k,
    QuantType.Q6_K: _encode_q6_k,
    QuantType.Q2_K: _encode_q2_k,
    QuantType.Q3_K: _encode_q3_k,
    QuantType.Q4_1: _encode_with_minimum(15),
    QuantType.Q5_0: _encode_symmetric(_Q5_GRID),
    QuantType.Q5_1: _encode_with_minimum(31),
    QuantType.IQ4_NL: _encode_iq4_nl,
    QuantType.IQ4_XS: _encode_iq4_xs,
    QuantType.MXFP4: _encode_mxfp4,
    QuantType.TQ1_0: _by_gguf(QuantType.TQ1_0),
    QuantType.TQ2_0: _by_gguf(QuantType.TQ2_0),
    **{qtype: _of_type(encode_grid, qtype) for qtype in GRID_TYPES},
    **{qtype: _of_type(encode_iqk, qtype) for qtype in IQK_WRITABLE},
    QuantType.Q1_0: _encode_q1_0,
    QuantType.F32: _by_gguf(QuantType.F32),
    QuantType.F16: _by_gguf(QuantType.F16),
    QuantType.BF16: _by_gguf(QuantType.BF16),
}

QUANTIZABLE_TYPES: tuple[QuantType, ...] = (
    QuantType.Q8_0,
    QuantType.Q4_0,
    QuantType.Q4_K,
    QuantType.Q5_K,
    QuantType.Q6_K,
)
"""Types that experts can be quantized to while a model is loaded: kernels read them."""

WRITABLE_TYPES: tuple[QuantType, ...] = tuple(_ENCODERS)
"""Types that `quantize` writes."""
