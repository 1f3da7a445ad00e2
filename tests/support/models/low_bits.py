"""Blocks of the types that the `gguf` package decodes and does not encode, from values: plain rounding, for tests.

How well they fit does not matter: what is compared with is what gguf makes of the blocks.
"""

from __future__ import annotations

import gguf.quants
import numpy as np
import numpy.typing as npt

from ktransformers.kernels.types import QuantType
from ktransformers.weights.quantize.write import WRITABLE_TYPES, quantize
from tests.support.checks.decoding import IQ4K_VALUES
from tests.support.models.grid_blocks import GRID_TYPES, grid_blocks

_Bytes = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]


def encode(rows: _Float, qtype: QuantType) -> _Bytes:
    """rows fp32 [N, K] -> blocks uint8 [N, bytes], by whoever can: our quantizer, gguf's, or this module."""
    if qtype in GRID_TYPES:
        return grid_blocks(rows, qtype)
    if qtype in WRITABLE_TYPES:
        return quantize(rows, qtype)
    if qtype is QuantType.NVFP4:
        return _nvfp4(rows.reshape(-1, 64)).reshape(len(rows), -1)
    if qtype is QuantType.IQ4_K:
        return _iq4_k(rows.reshape(-1, 16, 16)).reshape(len(rows), -1)
    blocks: _Bytes = gguf.quants.quantize(rows, qtype)
    return blocks


def _over(values: _Float, scale: _Float) -> _Float:
    """values / scale, 0 where the scale is."""
    return np.divide(values, scale, out=np.zeros(np.broadcast(values, scale).shape, np.float32), where=scale != 0)


def _nearest(values: _Float, table: tuple[int, ...]) -> _Bytes:
    return np.abs(values[..., None] - np.array(table, np.float32)).argmin(-1).astype(np.uint8)


def _nvfp4(blocks: _Float) -> _Bytes:
    groups = blocks.reshape(-1, 4, 16)
    scales = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(groups).max(2) / 6)
    halves = gguf.quants.NVFP4.ue4m3_to_fp32(scales).astype(np.float32)[..., None]
    codes = _nearest(_over(groups, halves), gguf.quants.NVFP4.kvalues)
    return np.concatenate([scales, (codes[..., :8] | codes[..., 8:] << 4).reshape(-1, 32)], axis=1)


def _iq4_k(blocks: _Float) -> _Bytes:
    """Sub-blocks take the two tables in turn, and scales from 1 to 31."""
    d = (np.abs(blocks).max((1, 2)) / (31 * 113)).astype(np.float16)
    scales = np.ceil(_over(np.abs(blocks).max(2) / 113, d.astype(np.float32)[:, None])).clip(1, 31).astype(np.uint8)
    over = _over(blocks, (d.astype(np.float32)[:, None] * scales)[..., None])
    codes = np.stack([_nearest(over[:, s], IQ4K_VALUES[s % 2]) for s in range(16)], axis=1)
    stored = scales + np.uint8(32)
    upper = stored.reshape(-1, 4, 4) >> 4 << np.array([0, 2, 4, 6], dtype=np.uint8)
    lower = stored[:, ::2] & 15 | stored[:, 1::2] << 4
    extra = np.full((len(blocks), 2), 0b10101010, dtype=np.uint8)
    nibbles = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate(
        [d.view(np.uint8).reshape(-1, 2), extra, upper.sum(2, dtype=np.uint8), lower, nibbles], axis=1
    )
