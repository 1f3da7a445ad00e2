"""Decodes ggml's blocks to numbers: by `gguf.quants`, and those of the types that the package has no decoder for.

Q1_0 is 128 weights in 18 bytes: an fp16 number d, and a bit for each, from the lowest of the first byte up: d where it
is set, else -d (llama.cpp's ggml-quants.c).

IQ4_K is 256 weights in 144 bytes (ik_llama.cpp's ggml-common.h): an fp16 number d; a bit b for each 16 weights, from
the lowest up; the upper 2 bits of their 16 scales s, four in a byte; the lower 4 bits, two in a byte; 8 times 16 bytes
of codes q, the low nibbles being the first 16 of 32 weights. A weight is d (s - 32) (IQ4_NL's value of q + 4 b).

IQ5_K is the same in 176 bytes, of codes with 5 bits: 4 times 32 bytes of nibbles, the low ones being the first 32 of 64
weights, and 32 bytes with the fifth bits of every 32nd weight. A weight is d (s - 32) (the value of q + 2 b).

Knows nothing of files, the extension or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.types import QuantType, type_size

__all__ = ["decode_blocks"]

_U8Array = npt.NDArray[np.uint8]
_F32Array = npt.NDArray[np.float32]

_IQ5_VALUES = np.array(
    [
        *(-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6),
        *(-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121),
    ],
    dtype=np.int32,
)


def decode_blocks(rows: _U8Array, qtype: QuantType) -> _F32Array:
    """Decode blocks of a type, uint8 [..., bytes of whole blocks], to fp32 [..., cols]. Raises NotImplementedError
    where no decoder is known.
    """
    rows = np.ascontiguousarray(rows)
    decode = _DECODERS.get(qtype)
    if decode is None:
        return np.ascontiguousarray(quants.dequantize(rows, qtype), dtype=np.float32)
    return decode(rows.reshape(-1, type_size(qtype))).reshape(*rows.shape[:-1], -1)


def _decode_q1_0(blocks: _U8Array) -> _F32Array:
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), d, -d)


def _decode_iq4_k(blocks: _U8Array) -> _F32Array:
    packed = blocks[:, 16:].reshape(-1, 8, 1, 16)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2)
    return _scaled_by_16(blocks, np.array(quants.IQ4_NL.kvalues, dtype=np.int32)[codes], 4)


def _decode_iq5_k(blocks: _U8Array) -> _F32Array:
    packed = blocks[:, 16:144].reshape(-1, 4, 1, 32)
    fifths = blocks[:, None, 144:] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32) | fifths << 4
    return _scaled_by_16(blocks, _IQ5_VALUES[codes], 2)


def _scaled_by_16(blocks: _U8Array, values: npt.NDArray[np.int32], step: int) -> _F32Array:
    """What the fields in front of codes make of a block's values: int32, 256 times N."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    shifts = step * np.unpackbits(blocks[:, 2:4], axis=1, bitorder="little").astype(np.int32)
    upper = blocks[:, 4:8, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3
    lower = blocks[:, 8:16, None] >> np.array([0, 4], dtype=np.uint8) & 15
    scales = (lower.reshape(-1, 16) | upper.reshape(-1, 16) << 4).astype(np.int32) - 32
    shifted = values.reshape(-1, 16, 16) + shifts[..., None]
    weights: _F32Array = (d * scales.astype(np.float32))[..., None] * shifted.astype(np.float32)
    return weights


_DECODERS: Mapping[QuantType, Callable[[_U8Array], _F32Array]] = {
    QuantType.Q1_0: _decode_q1_0,
    QuantType.IQ4_K: _decode_iq4_k,
    QuantType.IQ5_K: _decode_iq5_k,
}
"""Of blocks [N, bytes] to fp32, N times the elements of a block."""
