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


SUB_BLOCKS: Mapping[QuantType, Callable[[_Bytes], _Parts]] = {QuantType.IQ4_K: _iq4_k}
"""By type that the package does not decode, what reads a block of 256 weights in sub-blocks."""


def _products(d: np.float32, scales: list[int], values: list[list[int]]) -> _Float:
    each = [d * np.float32(scale) * np.float32(v) for scale, sub in zip(scales, values, strict=True) for v in sub]
    return np.array(each, dtype=np.float32)
