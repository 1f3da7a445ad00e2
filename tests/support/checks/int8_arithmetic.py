"""The exact arithmetic of the quantized kernels (csrc/kernels/formats/gemm.inl), from the block layouts alone.

Kernels are held to it bit for bit. Knows nothing of threads or tiers; of the extension, the form of activations alone
that the table of types says.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from torch import Tensor

from ktransformers.kernels.formats import FORMATS, ActForm
from ktransformers.kernels.reference import dequantize
from ktransformers.kernels.types import QuantType, RawTensor, type_size
from tests.support.checks.decoding import SUB_BLOCKS, blocks_of_row

_Bytes = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]
_Int = npt.NDArray[np.int32]

# Of which activations are quantized by 32: blocks of 32, of 64 with scales for 16, of 128; and by 256.
SMALL_BLOCKS = frozenset(QuantType(number) for number, record in FORMATS.items() if record.form is ActForm.Q32)
_SUPER_BLOCKS = frozenset(QuantType(number) for number, record in FORMATS.items() if record.form is ActForm.Q256)
_TERNARY = (QuantType.TQ1_0, QuantType.TQ2_0)


def quantize_activations(x: _Float, block: int) -> tuple[_Int, _Float]:
    """One row of activations as int8 values [K] and fp32 scales [K / block], as the quantized kernels do it."""
    blocks = x.astype(np.float32).reshape(-1, block)
    amax = np.abs(blocks).max(axis=1).astype(np.float32)
    q = np.zeros(blocks.shape, dtype=np.int32)
    scales = np.zeros(len(blocks), dtype=np.float32)
    for i, values in enumerate(blocks):
        if not np.isfinite(values).all():
            scales[i] = np.nan
        elif amax[i] >= np.float32(1e-30):
            scales[i] = amax[i] / np.float32(127)
            q[i] = np.rint(values * (np.float32(127) / amax[i])).astype(np.int32)
    return q.reshape(-1), scales


def _half(block: _Bytes, at: int) -> np.float32:
    return np.float32(block[at : at + 2].view(np.float16)[0])


def _six_bit_scales(packed: _Bytes) -> tuple[list[int], list[int]]:
    """Scales and minima of a Q4_K or Q5_K super-block, from ggml's description of the 12 bytes."""
    scales, minima = [], []
    for j in range(8):
        if j < 4:
            scales.append(int(packed[j]) & 63)
            minima.append(int(packed[j + 4]) & 63)
        else:
            scales.append((int(packed[j + 4]) & 15) | ((int(packed[j - 4]) >> 6) << 4))
            minima.append((int(packed[j + 4]) >> 4) | ((int(packed[j]) >> 6) << 4))
    return scales, minima


def _nibbles(packed: _Bytes) -> _Int:
    """[n, 32] bytes to [2 n, 32]: the low nibbles of 32 bytes, then their high ones."""
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, 32).astype(np.int32)


def _two_bits(packed: _Bytes) -> _Int:
    """64 bytes to 256 codes: those of the lowest bits of 32 bytes come first."""
    pairs = packed.reshape(2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, :, None]
    return (pairs & 3).astype(np.int32).reshape(-1)


def _q3_scales(packed: _Bytes) -> list[int]:
    """Sixteen six-bit numbers less 32: low nibbles in 8 bytes, upper pairs of bits in 4."""
    lower = [int(packed[s % 8]) >> 4 * (s // 8) & 15 for s in range(16)]
    return [low + 16 * (int(packed[8 + s % 4]) >> 2 * (s // 4) & 3) - 32 for s, low in enumerate(lower)]


def _base_3(packed: _Bytes) -> _Int:
    """TQ1_0: a byte times 3^n, of which the lower eight bits times 3 have digit n above them."""
    parts = [
        ((part.astype(np.int32)[None, :] * 3 ** np.arange(count)[:, None]) % 256 * 3 // 256).reshape(-1)
        for part, count in ((packed[:32], 5), (packed[32:48], 5), (packed[48:], 4))
    ]
    return np.concatenate(parts).astype(np.int32)


def _k_block(block: _Bytes, qtype: QuantType) -> tuple[_Int, list[int], list[int], np.float32, np.float32]:
    """Integer weights [sub-blocks, size], scales and minima of the sub-blocks, d and dmin of one super-block."""
    if qtype == QuantType.Q6_K:
        low = block[:128].reshape(2, 2, 32)
        high = block[128:192].reshape(2, 32)
        parts = []
        for n in range(2):
            for j in range(4):
                nibble = (low[n, j % 2] >> (4 * (j // 2))) & 15
                parts.append((nibble | (((high[n] >> (2 * j)) & 3) << 4)).astype(np.int32) - 32)
        return (
            np.concatenate(parts).reshape(16, 16),
            list(block[192:208].view(np.int8)),
            [],
            _half(block, 208),
            np.float32(0),
        )
    if qtype == QuantType.Q2_K:
        codes = _two_bits(block[16:80]).reshape(16, 16)
        return (
            codes,
            [int(s) & 15 for s in block[:16]],
            [int(s) >> 4 for s in block[:16]],
            _half(block, 80),
            _half(block, 82),
        )
    if qtype == QuantType.Q3_K:
        thirds = (block[None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).astype(np.int32).reshape(-1)
        codes = (_two_bits(block[32:96]) + 4 * thirds - 4).reshape(16, 16)
        return codes, _q3_scales(block[96:108]), [], _half(block, 108), np.float32(0)
    if qtype in _TERNARY:
        size = block.size - 2
        codes = _two_bits(block[:64]) if qtype == QuantType.TQ2_0 else _base_3(block[:size])
        return (codes - 1).reshape(1, 256), [1], [], _half(block, size), np.float32(0)
    if qtype == QuantType.IQ4_XS:
        upper = int(block[2:4].view(np.uint16)[0])
        scales = [((int(block[4 + s // 2]) >> 4 * (s % 2)) & 15 | ((upper >> 2 * s) & 3) << 4) - 32 for s in range(8)]
        codes = np.stack([block[8:].reshape(8, 16) & 15, block[8:].reshape(8, 16) >> 4], axis=1).reshape(8, 32)
        return np.array(quants.IQ4_NL.kvalues, dtype=np.int32)[codes], scales, [], _half(block, 0), np.float32(0)
    if qtype in SUB_BLOCKS:
        d, scales, values = SUB_BLOCKS[qtype](block)
        return np.array(values, dtype=np.int32), scales, [], d, np.float32(0)
    if qtype in GRIDS:
        return _grid_block(block, qtype)
    assert qtype in (QuantType.Q4_K, QuantType.Q5_K), qtype
    scales, minima = _six_bit_scales(block[4:16])
    weights = _nibbles(block[-128:].reshape(4, 32))
    if qtype == QuantType.Q5_K:
        bits = (block[16:48][None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
        weights = weights + 16 * bits.astype(np.int32)
    return weights, scales, minima, _half(block, 0), _half(block, 2)


# Types with a grid: columns of a sub-block, and what d is multiplied with so that scales and values are integers.
GRIDS = {
    QuantType.IQ2_XXS: (32, 1 / 8),
    QuantType.IQ2_XS: (16, 1 / 8),
    QuantType.IQ2_S: (16, 1 / 8),
    QuantType.IQ3_XXS: (32, 1 / 4),
    QuantType.IQ3_S: (32, 1),
    QuantType.IQ1_S: (32, 1 / 8),
    QuantType.IQ1_M: (16, 1 / 8),
}


def grid_scale(block: _Bytes, qtype: QuantType) -> np.float32:
    """d of a block of a type in GRIDS."""
    if qtype is QuantType.IQ1_M:
        words = block[48:56].view(np.uint16)
        bits = sum(int(word >> 12) << 4 * i for i, word in enumerate(words))
        return np.float32(np.uint16(bits).view(np.float16))
    return _half(block, 0)


def _grid_block(block: _Bytes, qtype: QuantType) -> tuple[_Int, list[int], list[int], np.float32, np.float32]:
    """As _k_block. Products of scales and values are what gguf decodes, divided by d; they are integers."""
    size, factor = GRIDS[qtype]
    d = grid_scale(block, qtype) * np.float32(factor)
    products = (quants.dequantize(block[None], qtype).astype(np.float64) / float(d)).reshape(-1, size)
    weights = np.rint(products).astype(np.int32)
    assert np.array_equal(weights, products)
    return weights, [1] * len(weights), [], d, np.float32(0)


def _k_row(row: _Bytes, qtype: QuantType, q: _Int, scales: _Float) -> np.float32:
    acc = np.float32(0)
    for b, block in enumerate(blocks_of_row(row, qtype)):
        weights, sub_scales, minima, d, dmin = _k_block(block, qtype)
        values = q[256 * b : 256 * (b + 1)].reshape(weights.shape)
        isum = sum(int(s) * int((w * a).sum()) for s, w, a in zip(sub_scales, weights, values, strict=True))
        acc = acc + (d * scales[b]) * np.float32(isum)
        if minima:
            msum = sum(m * int(a.sum()) for m, a in zip(minima, values, strict=True))
            acc = acc - (dmin * scales[b]) * np.float32(msum)
    return acc


def _ue4m3(code: int) -> float:
    """Half of what the lower seven bits of a scale of NVFP4 code; 127 is no number and counts as 0."""
    exponent, fraction = code >> 3 & 15, code & 7
    if code == 127:
        return 0.0
    return fraction * 2.0**-10 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 11)


def _small_block(block: _Bytes, qtype: QuantType) -> list[tuple[_Int, np.float32, np.float32]]:
    """(integer weights, scale, offset) of what has one scale in a block of 32 or 64, in order."""
    if qtype == QuantType.NVFP4:
        groups = block[4:].reshape(4, 8)
        codes = np.concatenate([groups & 15, groups >> 4], axis=1)
        table = np.array(quants.NVFP4.kvalues, dtype=np.int32)
        return [(table[code], np.float32(_ue4m3(int(e))), np.float32(0)) for code, e in zip(codes, block, strict=False)]
    if qtype == QuantType.Q1_0:  # 128 signs; activations have a scale for each 32
        signs = 2 * (block[2:, None] >> np.arange(8) & 1).astype(np.int32).reshape(4, 32) - 1
        return [(part, _half(block, 0), np.float32(0)) for part in signs]
    if qtype in SUB_BLOCKS:
        d, scales, values = SUB_BLOCKS[qtype](block)
        parts = zip(scales, values, strict=True)
        return [(scale * np.array(part, dtype=np.int32), d, np.float32(0)) for scale, part in parts]
    codes = np.concatenate([block[-16:] & 15, block[-16:] >> 4]).astype(np.int32)
    if qtype == QuantType.MXFP4:  # the table holds twice the values, so the exponent's bias is 128
        table = np.array(quants.MXFP4.kvalues, dtype=np.int32)
        return [(table[codes], np.float32(2.0 ** (int(block[0]) - 128)), np.float32(0))]
    if qtype in (QuantType.Q5_0, QuantType.Q5_1):
        codes = codes + 16 * (int(block[-20:-16].view(np.uint32)[0]) >> np.arange(32) & 1).astype(np.int32)
    offset = _half(block, 2) if qtype in (QuantType.Q4_1, QuantType.Q5_1) else np.float32(0)
    weights = {
        QuantType.Q8_0: lambda: block[2:].view(np.int8).astype(np.int32),
        QuantType.Q4_0: lambda: codes - 8,
        QuantType.Q5_0: lambda: codes - 16,
        QuantType.Q4_1: lambda: codes,
        QuantType.Q5_1: lambda: codes,
        QuantType.IQ4_NL: lambda: np.array(quants.IQ4_NL.kvalues, dtype=np.int32)[codes],
    }[qtype]()
    return [(weights, _half(block, 0), offset)]


def _small_row(row: _Bytes, qtype: QuantType, size: int, q: _Int, scales: _Float) -> np.float32:
    acc, at = np.float32(0), 0
    for block in row.reshape(-1, size):
        for weights, d, offset in _small_block(block, qtype):
            values, scale = q[at : at + len(weights)], scales[at // 32]
            acc = acc + (d * scale) * np.float32(int((weights * values).sum()))
            if qtype in (QuantType.Q4_1, QuantType.Q5_1):
                acc = acc + (offset * scale) * np.float32(int(values.sum()))
            at += len(weights)
    return acc


def int8_linear(x: Tensor, weight: RawTensor) -> Tensor:
    """x [T, K] times a quantized weight [N, K], in the exact arithmetic of the kernels; bit for bit what they give.

    Raises ValueError for an unquantized weight.
    """
    small = weight.qtype in SMALL_BLOCKS
    if not small and weight.qtype not in _SUPER_BLOCKS:
        raise ValueError(f"int8_linear is for quantized weights, got {weight.qtype.name}")
    block, size = 32 if small else 256, type_size(weight.qtype)
    rows = weight.data.numpy().reshape(weight.rows, weight.row_bytes)
    out = np.zeros((x.shape[0], weight.rows), dtype=np.float32)
    for t in range(x.shape[0]):
        q, scales = quantize_activations(x[t].numpy(), block)
        for n in range(weight.rows):
            if small:
                out[t, n] = _small_row(rows[n], weight.qtype, size, q, scales)
            else:
                out[t, n] = _k_row(rows[n], weight.qtype, q, scales)
    return torch.from_numpy(out)


def int8_tolerance(x: Tensor, weight: RawTensor) -> Tensor:
    """Largest error that int8 activations can cause, [T, N].

    Each activation is off by at most half a step of its block, max|x| / 254; so an output is off by at most
    sum_k |w[n, k]| * max|x of k's block| / 254. 5 % on top covers fp32 rounding of the two results.
    """
    block = 32 if weight.qtype in SMALL_BLOCKS else 256
    step = x.abs().reshape(x.shape[0], -1, block).amax(-1, keepdim=True).expand(-1, -1, block).reshape(x.shape) / 254
    return 1.05 * step @ dequantize(weight).abs().T + math.sqrt(weight.cols) * 1e-6
