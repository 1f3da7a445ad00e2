"""Decodes blocks by the `gguf` package, or, of types that it does not decode, one by one from their layouts.

The oracle of whatever decodes blocks. Knows nothing of the extension.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.types import QuantType

__all__ = ["decoded", "iq4_k_parts"]

_Bytes = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]

# Of ik_llama.cpp's ggml-common.h: the second half is taken where a sub-block's bit is set.
IQ4K_VALUES = (
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    (-123, -100, -79, -61, -45, -31, -18, -6, 5, 17, 29, 42, 57, 73, 93, 117),
)


def decoded(rows: _Bytes, qtype: QuantType) -> _Float:
    """Blocks of rows [N, bytes] -> fp32 [N, K]."""
    if qtype is QuantType.Q1_0:
        return np.array([_q1_0(block) for block in rows.reshape(-1, 18)], dtype=np.float32).reshape(len(rows), -1)
    if qtype is QuantType.IQ4_K:
        return np.array([_iq4_k(block) for block in rows.reshape(-1, 144)], dtype=np.float32).reshape(len(rows), -1)
    return np.ascontiguousarray(quants.dequantize(rows, qtype), dtype=np.float32)


def _q1_0(block: _Bytes) -> list[float]:
    d, number = float(block[:2].view(np.float16)[0]), int.from_bytes(block[2:].tobytes(), "little")
    return [d if number >> i & 1 else -d for i in range(128)]


def iq4_k_parts(block: _Bytes) -> tuple[np.float32, list[int], list[list[int]]]:
    """d, and scales and values of the 16 sub-blocks of a block of IQ4_K."""
    d, data = np.float32(block[:2].view(np.float16)[0]), [int(byte) for byte in block]
    extra, upper, lower, codes = data[2] + 256 * data[3], data[4:8], data[8:16], data[16:]
    scales, values = [], []
    for pair in range(8):
        bits = upper[pair // 2] >> 4 * (pair % 2)
        scales.append((lower[pair] % 16) + 16 * (bits & 3) - 32)
        scales.append((lower[pair] // 16) + 16 * (bits >> 2 & 3) - 32)
        for half in range(2):
            table = IQ4K_VALUES[extra >> (2 * pair + half) & 1]
            values.append([table[code >> 4 * half & 15] for code in codes[16 * pair : 16 * pair + 16]])
    return d, scales, values


def _iq4_k(block: _Bytes) -> list[np.float32]:
    d, scales, values = iq4_k_parts(block)
    return [d * np.float32(s) * np.float32(v) for s, sub in zip(scales, values, strict=True) for v in sub]
