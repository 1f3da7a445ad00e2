"""Blocks of the types that the `gguf` package decodes and does not encode, from values: plain rounding, for tests.

How well they fit does not matter: what is compared with is what gguf makes of the blocks.
"""

from __future__ import annotations

import gguf.quants
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as QuantType

from ktransformers.weights.quantize import QUANTIZABLE_TYPES, quantize

_Bytes = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]


def encode(rows: _Float, qtype: QuantType) -> _Bytes:
    """rows fp32 [N, K] -> blocks uint8 [N, bytes], by whoever can: our quantizer, gguf's, or this module."""
    if qtype in QUANTIZABLE_TYPES:
        return quantize(rows, qtype)
    own = {
        QuantType.IQ4_NL: (_iq4_nl, 32),
        QuantType.NVFP4: (_nvfp4, 64),
        QuantType.Q2_K: (_q2_k, 256),
        QuantType.Q3_K: (_q3_k, 256),
    }.get(qtype)
    if own is None:
        blocks: _Bytes = gguf.quants.quantize(rows, qtype)
        return blocks
    make, size = own
    return make(rows.reshape(-1, size)).reshape(len(rows), -1)


def _halves(values: _Float) -> _Bytes:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _over(values: _Float, scale: _Float) -> _Float:
    """values / scale, 0 where the scale is."""
    return np.divide(values, scale, out=np.zeros(np.broadcast(values, scale).shape, np.float32), where=scale != 0)


def _nearest(values: _Float, table: tuple[int, ...]) -> _Bytes:
    return np.abs(values[..., None] - np.array(table, np.float32)).argmin(-1).astype(np.uint8)


def _two_bits(codes: _Bytes) -> _Bytes:
    """[n, 256] -> [n, 64]: of every 128 codes those 32 apart share a byte."""
    parts = (codes.reshape(-1, 2, 4, 32) & 3) << np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    return parts.sum(2).astype(np.uint8).reshape(-1, 64)


def _iq4_nl(blocks: _Float) -> _Bytes:
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    codes = _nearest(_over(blocks, scales), gguf.quants.IQ4_NL.kvalues)
    return np.concatenate([_halves(scales), codes[:, :16] | codes[:, 16:] << 4], axis=1)


def _nvfp4(blocks: _Float) -> _Bytes:
    groups = blocks.reshape(-1, 4, 16)
    scales = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(groups).max(2) / 6)
    halves = gguf.quants.NVFP4.ue4m3_to_fp32(scales).astype(np.float32)[..., None]
    codes = _nearest(_over(groups, halves), gguf.quants.NVFP4.kvalues)
    return np.concatenate([scales, (codes[..., :8] | codes[..., 8:] << 4).reshape(-1, 32)], axis=1)


def _q2_k(blocks: _Float) -> _Bytes:
    groups = blocks.reshape(-1, 16, 16)
    least = np.maximum(-groups.min(2), 0)
    step = (groups.max(2) + least) / 3
    d = (step.max(1, keepdims=True) / 15).astype(np.float16).astype(np.float32)
    dmin = (least.max(1, keepdims=True) / 15).astype(np.float16).astype(np.float32)
    scales, minima = (np.rint(_over(x, y)).clip(0, 15).astype(np.uint8) for x, y in ((step, d), (least, dmin)))
    codes = np.rint(_over(groups + (dmin * minima)[..., None], (d * scales)[..., None])).clip(0, 3).astype(np.uint8)
    return np.concatenate([scales | minima << 4, _two_bits(codes), _halves(d), _halves(dmin)], axis=1)


def _q3_k(blocks: _Float) -> _Bytes:
    groups = blocks.reshape(-1, 16, 16)
    step = np.abs(groups).max(2) / 4
    d = (step.max(1, keepdims=True) / 31).astype(np.float16).astype(np.float32)
    scales = np.rint(_over(step, d)).clip(-32, 31).astype(np.int8)
    scales[:, ::2] *= -1  # their signs are part of the format
    codes = (np.rint(_over(groups, (d * scales)[..., None])).clip(-4, 3) + 4).astype(np.uint8).reshape(-1, 256)
    mask = ((codes >> 2).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[None, :, None]).sum(1).astype(np.uint8)
    six = (scales + 32).astype(np.uint8)
    low = six[:, :8] & 15 | (six[:, 8:] & 15) << 4
    high = ((six >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[None, :, None]).sum(1).astype(np.uint8)
    return np.concatenate([mask, _two_bits(codes), low, high, _halves(d)], axis=1)
