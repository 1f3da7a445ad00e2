"""Decodes blocks by the `gguf` package, or, of types that it does not decode, one by one from their layouts.

The oracle of whatever decodes blocks. Knows nothing of the extension.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.types import QuantType, type_size

__all__ = ["SUB_BLOCKS", "decoded"]

_Bytes = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]
_Parts = tuple[np.float32, list[int], list[list[int]]]
"""d, and scales and values of the sub-blocks."""

# Of ik_llama.cpp's ggml-common.h: the second half is taken where a sub-block's bit is set.
_IQ4_K_VALUES = (
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    (-123, -100, -79, -61, -45, -31, -18, -6, 5, 17, 29, 42, 57, 73, 93, 117),
)
_IQ5_K_VALUES = (
    *(-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6),
    *(-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121),
    *(-124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16, -10, -4),
    *(1, 7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123),
)


def decoded(rows: _Bytes, qtype: QuantType) -> _Float:
    """Blocks of rows [N, bytes] -> fp32 [N, K]."""
    if qtype is QuantType.Q1_0:
        return np.array([_q1_0(block) for block in rows.reshape(-1, 18)], dtype=np.float32).reshape(len(rows), -1)
    if qtype in SUB_BLOCKS:
        blocks = rows.reshape(-1, type_size(qtype))
        return np.array([_products(*SUB_BLOCKS[qtype](block)) for block in blocks]).reshape(len(rows), -1)
    return np.ascontiguousarray(quants.dequantize(rows, qtype), dtype=np.float32)


def _q1_0(block: _Bytes) -> list[float]:
    d, number = float(block[:2].view(np.float16)[0]), int.from_bytes(block[2:].tobytes(), "little")
    return [d if number >> i & 1 else -d for i in range(128)]


def _iq4_k(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH4B8B128B", block.tobytes())
    upper, lower, codes = data[:4], data[4:12], data[12:]
    scales, values = [], []
    for pair in range(8):
        bits = upper[pair // 2] >> 4 * (pair % 2)
        scales.append((lower[pair] % 16) + 16 * (bits & 3) - 32)
        scales.append((lower[pair] // 16) + 16 * (bits >> 2 & 3) - 32)
        for half in range(2):
            table = _IQ4_K_VALUES[extra >> (2 * pair + half) & 1]
            values.append([table[code >> 4 * half & 15] for code in codes[16 * pair : 16 * pair + 16]])
    return np.float32(d), scales, values


def _iq5_k(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH4B8B128B32B", block.tobytes())
    upper, lower, codes, fifths = data[:4], data[4:12], data[12:140], data[140:]
    scales, values = [], []
    for sub in range(16):
        scales.append((lower[sub // 2] >> 4 * (sub % 2) & 15) + 16 * (upper[sub // 4] >> 2 * (sub % 4) & 3) - 32)
        first, row = 16 * (sub % 2), []
        for j in range(first, first + 16):
            nibble = codes[32 * (sub // 4) + j] >> 4 * (sub // 2 % 2) & 15
            row.append(_IQ5_K_VALUES[32 * (extra >> sub & 1) + 16 * (fifths[j] >> sub // 2 & 1) + nibble])
        values.append(row)
    return np.float32(d), scales, values


SUB_BLOCKS: Mapping[QuantType, Callable[[_Bytes], _Parts]] = {QuantType.IQ4_K: _iq4_k, QuantType.IQ5_K: _iq5_k}
"""By type that the package does not decode, what reads a block of 256 weights in sub-blocks."""


def _products(d: np.float32, scales: list[int], values: list[list[int]]) -> _Float:
    return ((d * np.array(scales, dtype=np.float32))[:, None] * np.array(values, dtype=np.float32)).reshape(-1)
