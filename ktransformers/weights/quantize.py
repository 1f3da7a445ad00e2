"""Quantizes fp32 matrices to GGML block formats. Knows no file, no model and no kernel.

Q8_0 and Q4_0 are the `gguf` package's own. The K-quants (Q4_K, Q5_K, Q6_K), whose layouts are those that
`gguf.quants` dequantizes, are searched for the least squared error:

1. Per sub-block of 32 (16 for Q6_K), several trial scales around the one that spans the values give integer codes;
   for fixed codes the best scale (and offset) has a closed form, and the trial with the least error wins.
2. The sub-block scales (and offsets) of a super-block of 256 are rounded to 6 bits (8 for Q6_K) of a common fp16 step.
3. The codes are taken again for the rounded scales, and the offsets once more for those codes.

Arrays are kept as [values of one sub-block, sub-blocks], so that every step is one vector operation over sub-blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf.quants
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as QuantType

from ktransformers.errors import UnsupportedError, WeightError

__all__ = ["QUANTIZABLE_TYPES", "quantize", "target_type"]

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]

SUPER_BLOCK = 256
CHUNK_WEIGHTS = 1 << 16  # the ten or so temporaries of one chunk stay in a core's L2 and L3 cache
MAX_MAGNITUDE = 65504.0  # of fp16; anything larger is no trained weight, and its scale might overflow
AFFINE_TRIALS = {
    15: ((0.02, 0.02), (0.04, 0.0), (-0.015, 0.02), (0.0, -0.015), (-0.03, 0.04)),
    31: ((0.0, 0.0), (0.0, -0.03), (0.02, 0.0), (-0.03, -0.03), (0.0, 0.02)),
}
"""Per largest code: shares of a sub-block's span that the codes leave out at its low and its high end.

Picked greedily from a 9 x 9 grid, on normal and Laplace distributed weights, as the five that together err least:
within 2 % of what the whole grid finds.
"""
SYMMETRIC_TRIALS = tuple(range(25, 33))  # codes for the largest magnitude; whole ones err least, found the same way


def quantize(values: npt.NDArray[np.floating], qtype: QuantType) -> U8Array:
    """Quantize [rows, cols] of any float dtype to uint8 [rows, row_bytes].

    cols must be a multiple of the type's block size (32 or 256). Raises UnsupportedError for a type that is not in
    QUANTIZABLE_TYPES, WeightError for values that are not finite or exceed fp16's range, ValueError for a bad shape.
    """
    encode = _ENCODERS.get(qtype)
    if encode is None:
        names = ", ".join(t.name.lower() for t in QUANTIZABLE_TYPES)
        raise UnsupportedError(f"cannot quantize to {qtype.name}; possible types are {names}")
    block, block_bytes = GGML_QUANT_SIZES[qtype]
    if values.ndim != 2 or values.shape[1] % block:
        raise ValueError(f"{qtype.name} needs [rows, multiple of {block}], got {list(values.shape)}")
    rows, cols = values.shape
    out = np.empty((rows, cols // block * block_bytes), dtype=np.uint8)
    step = max(1, CHUNK_WEIGHTS // max(cols, 1))
    for start in range(0, rows, step):
        chunk = np.ascontiguousarray(values[start : start + step], dtype=np.float32)
        # One pass that also catches NaN, which fails every comparison.
        if not (chunk.size == 0 or (chunk.max() <= MAX_MAGNITUDE and chunk.min() >= -MAX_MAGNITUDE)):
            raise WeightError(f"cannot quantize to {qtype.name}: a weight is not finite or exceeds {MAX_MAGNITUDE:g}")
        out[start : start + step] = encode(chunk).reshape(chunk.shape[0], -1)
    return out


_SHORT_ROW_TYPES = {QuantType.Q4_K: QuantType.Q4_0, QuantType.Q5_K: QuantType.Q8_0, QuantType.Q6_K: QuantType.Q8_0}


def target_type(qtype: QuantType, cols: int) -> QuantType | None:
    """The type that rows of `cols` weights get when `qtype` is asked for, or None when they must stay as they are.

    K-quants need rows in multiples of 256. Other rows get the 32-block type that is no coarser in bits per weight
    of its codes: Q8_0 for Q5_K and Q6_K, Q4_0 for Q4_K.
    """
    if cols % GGML_QUANT_SIZES[qtype][0] == 0:
        return qtype
    if cols % 32 == 0:
        return _SHORT_ROW_TYPES.get(qtype)
    return None


def _inverse(scale: F32Array) -> F32Array:
    """1 / scale, and 0 where the scale is 0 (then every code is 0 as well). Subnormal scales count as 0."""
    usable = np.abs(scale) > np.finfo(np.float32).tiny
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=usable)


def _to_f16(step: F32Array) -> tuple[U8Array, F32Array]:
    """fp16 bytes [n, 2] and the fp32 values [n] that they decode to."""
    half = step.astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2), half.astype(np.float32)


def _codes(x: F32Array, inverse: F32Array, shift: F32Array | None, low: int, high: int, out: F32Array) -> F32Array:
    """round(x * inverse + shift) clipped to [low, high]; all [values, sub-blocks]."""
    np.multiply(x, inverse, out=out)
    if shift is not None:
        out += shift
    np.rint(out, out=out)
    return np.clip(out, low, high, out=out)


def _fit_affine(x: F32Array, max_code: int) -> tuple[F32Array, F32Array]:
    """Scale and offset [sub-blocks], both >= 0, with x ~ scale * code - offset of least squared error."""
    count = np.float32(x.shape[0])
    low = np.minimum(x.min(axis=0), 0.0)
    span = np.maximum(x.max(axis=0), 0.0) - low
    sum_x = x.sum(axis=0)
    sum_xx = np.einsum("ij,ij->j", x, x)
    best_scale, best_offset = span / max_code, -low
    best_error = np.full_like(span, np.inf)
    codes = np.empty_like(x)
    for cut_low, cut_high in AFFINE_TRIALS[max_code]:
        inverse = _inverse(span * np.float32((1 - cut_low - cut_high) / max_code))
        shift = np.maximum(-(low + span * np.float32(cut_low)), 0) * inverse
        for _ in range(2):
            _codes(x, inverse, shift, 0, max_code, codes)
            sum_q = codes.sum(axis=0)
            sum_qq = np.einsum("ij,ij->j", codes, codes)
            sum_xq = np.einsum("ij,ij->j", x, codes)
            scale, offset = _least_squares(count, sum_x, sum_q, sum_qq, sum_xq)
            error = (
                sum_xx
                + scale * scale * sum_qq
                + count * offset * offset
                - 2 * (scale * sum_xq - offset * sum_x + scale * offset * sum_q)
            )
            better = error < best_error
            best_error = np.where(better, error, best_error)
            best_scale = np.where(better, scale, best_scale)
            best_offset = np.where(better, offset, best_offset)
            inverse = _inverse(scale)
            shift = offset * inverse
    return best_scale, best_offset


def _least_squares(
    count: np.float32, sum_x: F32Array, sum_q: F32Array, sum_qq: F32Array, sum_xq: F32Array
) -> tuple[F32Array, F32Array]:
    """Least-squares scale and offset for fixed codes, the offset held at >= 0 (the format cannot store less)."""
    scale = (count * sum_xq - sum_x * sum_q) * _inverse(count * sum_qq - sum_q * sum_q)
    offset = (scale * sum_q - sum_x) / count
    is_bounded = offset <= 0
    scale = np.where(is_bounded, sum_xq * _inverse(sum_qq), scale)
    return np.maximum(scale, 0), np.where(is_bounded, 0, offset).astype(np.float32)


def _encode_affine(values: F32Array, max_code: int) -> tuple[U8Array, U8Array]:
    """Header bytes [n, 16] (d, dmin, packed 6-bit scales and offsets) and codes [n, 8, 32] of Q4_K and Q5_K."""
    n = values.size // SUPER_BLOCK
    x = np.ascontiguousarray(values.reshape(n * 8, 32).T)
    scale, offset = _fit_affine(x, max_code)
    d_bytes, d = _to_f16(scale.reshape(n, 8).max(axis=1) / 63)
    dmin_bytes, dmin = _to_f16(offset.reshape(n, 8).max(axis=1) / 63)
    d, dmin = np.repeat(d, 8), np.repeat(dmin, 8)
    inverse_dmin = _inverse(dmin)
    scale6 = np.clip(np.rint(scale * _inverse(d)), 0, 63)
    offset6 = np.clip(np.rint(offset * inverse_dmin), 0, 63)
    scale = d * scale6
    inverse = _inverse(scale)
    codes = np.empty_like(x)
    _codes(x, inverse, dmin * offset6 * inverse, 0, max_code, codes)
    offset = (scale * codes.sum(axis=0) - x.sum(axis=0)) / 32
    offset6 = np.clip(np.rint(offset * inverse_dmin), 0, 63)
    _codes(x, inverse, dmin * offset6 * inverse, 0, max_code, codes)
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


def _encode_q4_k(values: F32Array) -> U8Array:
    header, codes = _encode_affine(values, 15)
    return np.concatenate([header, _pack_nibbles(codes)], axis=1)


def _encode_q5_k(values: F32Array) -> U8Array:
    header, codes = _encode_affine(values, 31)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth_bits = np.bitwise_or.reduce((codes >> 4) << shifts, axis=1)
    return np.concatenate([header, fifth_bits, _pack_nibbles(codes)], axis=1)


def _fit_symmetric(x: F32Array) -> F32Array:
    """Signed scale [sub-blocks] with x ~ scale * code, code in [-32, 31], of least squared error.

    The largest magnitude goes to the negative end, which reaches one further: that is why the scale is signed.
    """
    largest = np.where(x.max(axis=0) > -x.min(axis=0), x.max(axis=0), x.min(axis=0))
    best_gain = np.full_like(largest, -1.0)  # how much the squared error falls below that of all-zero codes
    best_scale: F32Array = np.zeros_like(largest)
    inverse_largest = _inverse(largest)
    codes = np.empty_like(x)
    for trial in SYMMETRIC_TRIALS:
        _codes(x, inverse_largest * np.float32(-trial), None, -32, 31, codes)
        sum_xq = np.einsum("ij,ij->j", x, codes)
        scale = sum_xq * _inverse(np.einsum("ij,ij->j", codes, codes))
        gain = scale * sum_xq
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


def _encode_q6_k(values: F32Array) -> U8Array:
    n = values.size // SUPER_BLOCK
    x = np.ascontiguousarray(values.reshape(n * 16, 16).T)
    scale = _fit_symmetric(x)
    per_block = scale.reshape(n, 16)
    at = np.abs(per_block).argmax(axis=1)
    # The largest scale is stored as -128, which the sign of the step makes up for.
    d_bytes, d = _to_f16(per_block[np.arange(n), at] / -128)
    step = np.repeat(d, 16)
    scale8 = np.clip(np.rint(scale * _inverse(step)), -128, 127)
    codes = _codes(x, _inverse(step * scale8), None, -32, 31, np.empty_like(x))
    unsigned = (codes.T + 32).astype(np.uint8).reshape(n, 2, 4, 32)
    low, high = unsigned & np.uint8(15), unsigned >> np.uint8(4)
    low_bytes = (low[:, :, :2] | low[:, :, 2:] << np.uint8(4)).reshape(n, 128)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high_bytes = np.bitwise_or.reduce(high << shifts, axis=2).reshape(n, 64)
    scale_bytes = scale8.astype(np.int8).view(np.uint8).reshape(n, 16)
    return np.concatenate([low_bytes, high_bytes, scale_bytes, d_bytes], axis=1)


def _encode_by_gguf(qtype: QuantType) -> Callable[[F32Array], U8Array]:
    def encode(values: F32Array) -> U8Array:
        encoded: U8Array = gguf.quants.quantize(values, qtype)
        return encoded

    return encode


_ENCODERS: dict[QuantType, Callable[[F32Array], U8Array]] = {
    QuantType.Q8_0: _encode_by_gguf(QuantType.Q8_0),
    QuantType.Q4_0: _encode_by_gguf(QuantType.Q4_0),
    QuantType.Q4_K: _encode_q4_k,
    QuantType.Q5_K: _encode_q5_k,
    QuantType.Q6_K: _encode_q6_k,
}

QUANTIZABLE_TYPES: tuple[QuantType, ...] = tuple(_ENCODERS)
"""Types that `quantize` writes."""
