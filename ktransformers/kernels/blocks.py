"""Decodes ggml's blocks to numbers: by `gguf.quants`, and those of Q1_0, of which the package has the name and sizes
only.

Q1_0 is 128 weights in 18 bytes: an fp16 number d, and a bit for each, from the lowest of the first byte up: d where it
is set, else -d (llama.cpp's ggml-quants.c). Knows nothing of files, the extension or devices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.types import QuantType

__all__ = ["decode_blocks"]

_U8Array = npt.NDArray[np.uint8]
_F32Array = npt.NDArray[np.float32]


def decode_blocks(rows: _U8Array, qtype: QuantType) -> _F32Array:
    """Decode blocks of a type, uint8 [..., bytes of whole blocks], to fp32 [..., cols]. Raises NotImplementedError
    where no decoder is known.
    """
    if qtype is not QuantType.Q1_0:
        return np.ascontiguousarray(quants.dequantize(np.ascontiguousarray(rows), qtype), dtype=np.float32)
    blocks = np.ascontiguousarray(rows).reshape(-1, 18)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(bits, d, -d).reshape(*rows.shape[:-1], -1)
