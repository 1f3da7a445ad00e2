"""Decodes ggml's blocks to numbers: by `gguf.quants`, and those of the types that the package has no decoder for.

Q1_0 is 128 weights in 18 bytes: an fp16 number d, and a bit for each, from the lowest of the first byte up: d where it
is set, else -d (llama.cpp's ggml-quants.c). Types of ik_llama.cpp: iqk_blocks.py, trellis_blocks.py.

Knows nothing of files, the extension or devices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.iqk_blocks import IQK_TYPES, decode_iqk
from ktransformers.kernels.trellis_blocks import TRELLIS_TYPES, decode_trellis
from ktransformers.kernels.types import QuantType, row_head, type_size

__all__ = ["decode_blocks", "whole_blocks"]

_U8Array = npt.NDArray[np.uint8]
_F32Array = npt.NDArray[np.float32]


def decode_blocks(rows: _U8Array, qtype: QuantType) -> _F32Array:
    """Decode rows of blocks of a type, uint8 [..., bytes of a row], to fp32 [..., cols]. Raises NotImplementedError
    where no decoder is known.
    """
    rows = np.ascontiguousarray(rows)
    if qtype in IQK_TYPES:
        values = decode_iqk(whole_blocks(rows, qtype), qtype)
    elif qtype in TRELLIS_TYPES:
        values = decode_trellis(whole_blocks(rows, qtype), qtype)
    elif qtype is QuantType.Q1_0:
        values = _decode_q1_0(whole_blocks(rows, qtype))
    else:
        return np.ascontiguousarray(quants.dequantize(rows, qtype), dtype=np.float32)
    return values.reshape(*rows.shape[:-1], -1)


def whole_blocks(rows: _U8Array, qtype: QuantType) -> _U8Array:
    """Return the blocks of rows [..., bytes of a row] as uint8 [N, bytes], each behind what is in front of its row."""
    head, size = row_head(qtype), type_size(qtype)
    if head == 0:
        return rows.reshape(-1, size)
    rows = rows.reshape(-1, rows.shape[-1])
    blocks = rows[:, head:].reshape(len(rows), -1, size)
    heads = np.broadcast_to(rows[:, None, :head], (*blocks.shape[:2], head))
    return np.concatenate([heads, blocks], axis=2).reshape(-1, head + size)


def _decode_q1_0(blocks: _U8Array) -> _F32Array:
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), d, -d)
