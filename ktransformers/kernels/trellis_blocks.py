"""Decodes blocks of ik_llama.cpp's types whose codes are seeds: IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT.

With x = (code + 4096) 0xCBAC1FED^(k + 1) mod 2^32, value k of a code is the sum of the lower 6 bits of the four bytes
of x, less 126; a weight is d s value, with a scale s of 32 weights and an fp32 number d in front of a row. A code
stands for 8 weights, of IQ4_KT for 4. Layouts are those of ik_llama.cpp's ggml-common.h and iqk_quantize.cpp;
csrc/kernels/packed/trellis.inl has them in words. Knows nothing of files, the extension or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktransformers.kernels.iqk_blocks import IQK_VALUES
from ktransformers.kernels.types import QuantType

__all__ = ["SEED_OFFSET", "TRELLIS_POWERS", "TRELLIS_TYPES", "VALUE_OFFSET", "decode_trellis"]

_U8Array = npt.NDArray[np.uint8]
_U32Array = npt.NDArray[np.uint32]
_I32Array = npt.NDArray[np.int32]
_F32Array = npt.NDArray[np.float32]

SEED_OFFSET, VALUE_OFFSET = 4096, 126
TRELLIS_POWERS = tuple(pow(0xCBAC1FED, k + 1, 1 << 32) for k in range(8))
"""What a seed is multiplied with for each of its values."""

_SCALES = np.array(IQK_VALUES[QuantType.IQ4_K].values, dtype=np.int32)  # IQ4_NL's values


class _Seeds(NamedTuple):
    """Of N blocks scales s [N, 8], codes [N, 32 or 64], and of IQ3_KT whether weights are negative [N, 256]."""

    scales: _I32Array
    codes: _U32Array
    signs: _U8Array | None = None


def decode_trellis(blocks: _U8Array, qtype: QuantType) -> _F32Array:
    """Decode blocks of a type of TRELLIS_TYPES, uint8 [N, bytes], to fp32 [N, 256]. A block begins with its row's d."""
    d = blocks[:, :4].copy().view(np.float32)
    scales, codes, signs = _SEEDS[qtype](blocks[:, 4:])
    powers = np.array(TRELLIS_POWERS[: 256 // codes.shape[1]], dtype=np.uint32)
    fields = ((codes + np.uint32(SEED_OFFSET))[..., None] * powers & np.uint32(0x3F3F3F3F)).view(np.uint8)
    values = fields.reshape(len(blocks), 256, 4).sum(axis=2, dtype=np.int32) - VALUE_OFFSET
    if signs is not None:
        values = np.where(signs, -np.abs(values), np.abs(values)).astype(np.int32)
    weights: _F32Array = (d * scales.astype(np.float32))[..., None] * values.reshape(-1, 8, 32).astype(np.float32)
    return weights.reshape(-1, 256)


def _halves_of_bytes(data: _U8Array) -> _U8Array:
    """Bytes [N, n] -> [N, 2 n]: the low nibbles, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _iq1_kt(block: _U8Array) -> _Seeds:
    marks = block[:, :8, None] >> np.arange(4, 8, dtype=np.uint8) & 1
    codes = block[:, 8:40].astype(np.uint32) | _halves_of_bytes(block[:, 40:]).astype(np.uint32) << np.uint32(8)
    codes |= marks.reshape(len(block), -1).astype(np.uint32) << np.uint32(12)
    return _Seeds(_SCALES[block[:, :8] & 15], codes)


def _iq2_kt(block: _U8Array) -> _Seeds:
    codes = block[:, 4:].copy().view("<u2").astype(np.uint32)
    return _Seeds(_SCALES[_halves_of_bytes(block[:, :4])], codes)


def _iq3_kt(block: _U8Array) -> _Seeds:
    signs: _U8Array = block[:, None, 68:] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = block[:, 4:68].copy().view("<u2").astype(np.uint32)
    return _Seeds(_halves_of_bytes(block[:, :4]).astype(np.int32), codes, signs.reshape(len(block), -1))


def _iq4_kt(block: _U8Array) -> _Seeds:
    words = block[:, :32].copy().view("<u4").astype(np.uint32)
    codes = block[:, 32:96].astype(np.uint32) | _halves_of_bytes(block[:, 96:]).astype(np.uint32) << np.uint32(8)
    upper = words[..., None] >> np.arange(8, 32, 3, dtype=np.uint32) & np.uint32(7)
    upper = upper << np.uint32(12) | (words[..., None] & np.uint32(1)) << np.uint32(15)
    scales = (words >> np.uint32(1) & np.uint32(127)).astype(np.int32) - 64
    return _Seeds(scales, codes | upper.reshape(len(block), -1))


_SEEDS: Mapping[QuantType, Callable[[_U8Array], _Seeds]] = {
    QuantType.IQ1_KT: _iq1_kt,
    QuantType.IQ2_KT: _iq2_kt,
    QuantType.IQ3_KT: _iq3_kt,
    QuantType.IQ4_KT: _iq4_kt,
}
"""By type, what takes blocks [N, bytes behind d] apart."""

TRELLIS_TYPES = frozenset(_SEEDS)
"""The types that this module decodes."""
