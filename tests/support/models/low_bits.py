"""Blocks of the types that the `gguf` package does not encode, from values: plain rounding or less, for tests.

How well they fit does not matter: what is compared with is what an oracle makes of the blocks.
"""

from __future__ import annotations

import zlib

import gguf.quants
import numpy as np
import numpy.typing as npt

from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import QuantType, block_size, row_bytes, row_head
from ktransformers.weights.quantize.write import WRITABLE_TYPES, quantize
from tests.support.checks.decoding import SUB_BLOCKS, decoded, parts_of_rows, set_row_scales
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
    if qtype in SUB_BLOCKS:
        return _drawn(rows, qtype)
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


def _drawn(rows: _Float, qtype: QuantType) -> _Bytes:
    """Blocks with one fp16 number, or rows with one: all else drawn, the same for a block or row of the same values,
    under a scale with which those that are decoded are as large.
    """
    is_by_row = row_head(qtype) > 0
    parts = rows if is_by_row else rows.reshape(-1, block_size(qtype))
    seeds = [zlib.crc32(part.tobytes()) for part in parts]
    size = row_bytes(qtype, parts.shape[1])
    data = np.stack([np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for seed in seeds])

    def set_scales(scales: _Float) -> None:
        set_row_scales(parts_of_rows(data, qtype)[0], scales)
        for at in FORMATS[qtype].halves:
            data[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)

    set_scales(np.ones(len(parts), dtype=np.float32))
    set_scales(_over(np.linalg.norm(parts, axis=1), np.linalg.norm(decoded(data, qtype), axis=1)))
    return data.reshape(len(rows), -1)
