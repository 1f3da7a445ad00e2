"""Turns ggml types that the native kernels do not read into ones that they read, without losing a bit.

Which type becomes which is fixed per type, so that a plan can be made from headers. Where a format's values are
`scale * small integer`, another integer format with the same scales holds them exactly:

    Q5_0 -> Q8_0      same fp16 scale per 32, 5-bit codes in 8 bits
    IQ4_NL -> Q8_0    same fp16 scale per 32, the 16 values of its table are int8
    Q3_K -> Q6_K      same fp16 scale and signed integer scales per 16, 3-bit codes in 6 bits
    TQ1_0, TQ2_0 -> Q4_0   one fp16 scale per 256 repeated eight times, codes -1, 0, 1
    NVFP4 -> BF16     4-bit-mantissa scales times 2-bit mantissas need at most 6 of BF16's 8 bits

All others have products of several scales, or an offset beside the scale, that only F32 holds. Equality with
`gguf.quants.dequantize`, bit for bit, is the test of all of this.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf.quants
import numpy as np
import numpy.typing as npt
import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.native import NATIVE_TYPES
from ktransformers.kernels.quant import QuantType, RawTensor, block_size, row_bytes, type_size
from ktransformers.weights.mapped_file import typed_view

__all__ = ["dequantize", "resident_type", "transcode"]

U8Array = npt.NDArray[np.uint8]

CHUNK_WEIGHTS = 1 << 20

_DTYPES = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
_BF16_EXACT = (QuantType.NVFP4,)
_F32_ONLY = (
    QuantType.Q4_1, QuantType.Q5_1, QuantType.Q2_K, QuantType.IQ1_S, QuantType.IQ1_M, QuantType.IQ2_XXS,
    QuantType.IQ2_XS, QuantType.IQ2_S, QuantType.IQ3_XXS, QuantType.IQ3_S,
)  # fmt: skip


def resident_type(qtype: QuantType, name: str) -> QuantType:
    """The type that a tensor stored as `qtype` has once loaded. Raises UnsupportedError, naming the tensor."""
    if qtype in NATIVE_TYPES:
        return qtype
    if qtype in _REPACKERS:
        return _REPACKERS[qtype][0]
    if qtype in _BF16_EXACT:
        return QuantType.BF16
    if qtype in _F32_ONLY:
        return QuantType.F32
    raise UnsupportedError(
        f"tensor {name!r} is stored as {qtype.name}, which is no type of model weights that can be read"
    )


def transcode(raw: RawTensor, name: str) -> RawTensor:
    """`raw` itself when the kernels read its type, else a lossless copy in `resident_type`. Works in row chunks."""
    target = resident_type(raw.qtype, name)
    if target is raw.qtype:
        return raw
    out = torch.empty(raw.rows * row_bytes(target, raw.cols), dtype=torch.uint8)
    rows_out = out.numpy().reshape(raw.rows, -1)
    convert = _REPACKERS[raw.qtype][1] if raw.qtype in _REPACKERS else _float_rows(raw.qtype, target)
    for start, stop, rows in _row_chunks(raw):
        rows_out[start:stop] = convert(rows).reshape(stop - start, -1)
    return RawTensor(out, target, raw.shape)


def dequantize(raw: RawTensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new tensor of `raw`'s logical shape with its values, rounded to `dtype` once. Any type that gguf can decode."""
    resident_type(raw.qtype, name)  # refuses what is no weight
    if raw.qtype in _DTYPES:
        return typed_view(raw.data, _DTYPES[raw.qtype]).reshape(raw.shape).to(dtype, copy=True)
    out = torch.empty((raw.rows, raw.cols), dtype=dtype)
    for start, stop, rows in _row_chunks(raw):
        out[start:stop] = torch.from_numpy(_decode(rows, raw.qtype))
    return out.reshape(raw.shape)


def _row_chunks(raw: RawTensor) -> list[tuple[int, int, U8Array]]:
    """(first row, row after the last, their bytes [rows, row_bytes]) of about CHUNK_WEIGHTS weights each."""
    rows = raw.data.numpy().reshape(raw.rows, raw.row_bytes)
    step = max(1, CHUNK_WEIGHTS // max(raw.cols, 1))
    return [(start, min(start + step, raw.rows), rows[start : start + step]) for start in range(0, raw.rows, step)]


def _decode(rows: U8Array, qtype: QuantType) -> npt.NDArray[np.float32]:
    # A hostile block may hold an infinite or NaN scale: its values are then NaN, which is not worth a warning here.
    with np.errstate(all="ignore"):
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(np.ascontiguousarray(rows), qtype)
    return values


def _float_rows(qtype: QuantType, target: QuantType) -> Callable[[U8Array], U8Array]:
    def convert(rows: U8Array) -> U8Array:
        values = _decode(rows, qtype)
        if target is QuantType.F32:
            return values.view(np.uint8)
        bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8)
        out: U8Array = bits.numpy()
        return out

    return convert


def _codes(rows: U8Array, qtype: QuantType, scale_at: int) -> tuple[U8Array, npt.NDArray[np.int8]]:
    """fp16 scale bytes [blocks, 2] and integer codes [blocks, block size].

    gguf's own decoder yields the codes when every scale is set to 1, so no bit layout is repeated here.
    """
    blocks = rows.reshape(-1, type_size(qtype)).copy()
    scales = blocks[:, scale_at : scale_at + 2].copy()
    blocks[:, scale_at : scale_at + 2] = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
    codes = _decode(blocks.reshape(rows.shape), qtype).astype(np.int8)
    return scales, codes.reshape(-1, block_size(qtype))


def _to_q8_0(qtype: QuantType) -> Callable[[U8Array], U8Array]:
    def convert(rows: U8Array) -> U8Array:
        scales, codes = _codes(rows, qtype, scale_at=0)
        return np.concatenate([scales, codes.view(np.uint8)], axis=1)

    return convert


def _ternary_to_q4_0(qtype: QuantType) -> Callable[[U8Array], U8Array]:
    def convert(rows: U8Array) -> U8Array:
        scales, codes = _codes(rows, qtype, scale_at=type_size(qtype) - 2)
        halves = (codes.reshape(-1, 2, 16) + np.int8(8)).view(np.uint8)
        nibbles = halves[:, 0] | halves[:, 1] << np.uint8(4)
        return np.concatenate([np.repeat(scales, 8, axis=0), nibbles], axis=1)

    return convert


def _q3_k_to_q6_k(rows: U8Array) -> U8Array:
    """Q3_K: hmask[32] qs[64] scales[12] d[2]. Q6_K: ql[128] qh[64] scales[16] d[2]."""
    blocks = rows.reshape(-1, type_size(QuantType.Q3_K))
    row_shape = rows.shape
    unit = blocks.copy()
    unit[:, 108:110] = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
    probe = unit.copy()
    probe[:, :32], probe[:, 32:96] = 0xFF, 0x55  # every code becomes 1, so that the values are the integer scales
    scales = _decode(probe.reshape(row_shape), QuantType.Q3_K).reshape(-1, 16, 16)[:, :, 0].astype(np.int8)
    unit[:, 96:104], unit[:, 104:108] = 0x11, 0xAA  # every 6-bit scale becomes 33, which stands for 1
    codes = _decode(unit.reshape(row_shape), QuantType.Q3_K).astype(np.int8).reshape(-1, 2, 4, 32)
    codes6 = (codes + np.int8(32)).view(np.uint8)
    low, high = codes6 & np.uint8(15), codes6 >> np.uint8(4)
    low_bytes = (low[:, :, :2] | low[:, :, 2:] << np.uint8(4)).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high_bytes = np.bitwise_or.reduce(high << shifts, axis=2).reshape(-1, 64)
    return np.concatenate([low_bytes, high_bytes, scales.view(np.uint8), blocks[:, 108:110]], axis=1)


_REPACKERS: dict[QuantType, tuple[QuantType, Callable[[U8Array], U8Array]]] = {
    QuantType.Q5_0: (QuantType.Q8_0, _to_q8_0(QuantType.Q5_0)),
    QuantType.IQ4_NL: (QuantType.Q8_0, _to_q8_0(QuantType.IQ4_NL)),
    QuantType.Q3_K: (QuantType.Q6_K, _q3_k_to_q6_k),
    QuantType.TQ1_0: (QuantType.Q4_0, _ternary_to_q4_0(QuantType.TQ1_0)),
    QuantType.TQ2_0: (QuantType.Q4_0, _ternary_to_q4_0(QuantType.TQ2_0)),
}
