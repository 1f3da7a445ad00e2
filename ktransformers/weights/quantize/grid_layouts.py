"""Bytes of the block types whose codes name entries of a grid: IQ1, IQ2, IQ3. Knows no search.

The layouts are those that `gguf.quants` dequantizes. Of n super-blocks of 256 weights: d fp16 [n]; codes [n, 32] or
[n, 64], one for each entry of the grid; signs, a byte for 8 weights, the first the lowest bit, [n, 32]; scales
[n, 8] or [n, 16]. Of IQ1 deltas [n, 32], 1 where 1/8 is taken off and not added, in place of signs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from ktransformers.kernels.types import QuantType

__all__ = ["GRID_LAYOUTS", "Layout"]

_Bytes = npt.NDArray[np.uint8]
_Halves = npt.NDArray[np.float16]
_Int = npt.NDArray[np.int64]

Layout = Callable[[_Halves, _Int, _Int, _Int], _Bytes]
"""Of (d, codes, signs or deltas, scales) uint8 [n, bytes of a super-block]."""


def _half(d: _Halves) -> _Bytes:
    return np.ascontiguousarray(d).view(np.uint8).reshape(-1, 2)


def _little(numbers: _Int, dtype: str) -> _Bytes:
    """[n, k] numbers as bytes [n, ...]."""
    return np.ascontiguousarray(numbers).astype(dtype).view(np.uint8).reshape(len(numbers), -1)


def _gathered(numbers: _Int, bits: int, count: int) -> _Int:
    """`count` neighbours of `bits` each in one number, the first the lowest."""
    parts = numbers.reshape(len(numbers), numbers.shape[1] // count, count)
    joined: _Int = (parts << (bits * np.arange(count))).sum(-1)
    return joined


def _sign_words(signs: _Int, scales: _Int) -> _Int:
    """The eighth sign of each byte is not stored: their number is even."""
    return _gathered(signs & 127, 7, 4) | scales << 28


def _iq2_xxs(d: _Halves, codes: _Int, signs: _Int, scales: _Int) -> _Bytes:
    words = np.stack([_gathered(codes, 8, 4), _sign_words(signs, scales)], axis=-1)
    return np.concatenate([_half(d), _little(words.reshape(len(d), 16), "<u4")], axis=1)


def _iq2_xs(d: _Halves, codes: _Int, signs: _Int, scales: _Int) -> _Bytes:
    words = codes | (signs & 127) << 9
    return np.concatenate([_half(d), _little(words, "<u2"), _little(_gathered(scales, 4, 2), "u1")], axis=1)


def _iq2_s(d: _Halves, codes: _Int, signs: _Int, scales: _Int) -> _Bytes:
    parts = (codes & 255, signs, _gathered(codes >> 8, 2, 4), _gathered(scales, 4, 2))
    return np.concatenate([_half(d), *(_little(part, "u1") for part in parts)], axis=1)


def _iq3_xxs(d: _Halves, codes: _Int, signs: _Int, scales: _Int) -> _Bytes:
    return np.concatenate([_half(d), _little(codes, "u1"), _little(_sign_words(signs, scales), "<u4")], axis=1)


def _iq3_s(d: _Halves, codes: _Int, signs: _Int, scales: _Int) -> _Bytes:
    parts = (codes & 255, _gathered(codes >> 8, 1, 8), signs, _gathered(scales, 4, 2))
    return np.concatenate([_half(d), *(_little(part, "u1") for part in parts)], axis=1)


def _iq1_s(d: _Halves, codes: _Int, deltas: _Int, scales: _Int) -> _Bytes:
    upper = _gathered(codes >> 8, 3, 4) | scales << 12 | deltas[:, ::4] << 15
    return np.concatenate([_half(d), _little(codes & 255, "u1"), _little(upper, "<u2")], axis=1)


def _iq1_m(d: _Halves, codes: _Int, deltas: _Int, scales: _Int) -> _Bytes:
    upper = _gathered(codes >> 8 | deltas << 3, 4, 2)
    # d has no bytes of its own: four bits of it stand above each four scales.
    nibbles = np.ascontiguousarray(d).view(np.uint16).astype(np.int64)[:, None] >> 4 * np.arange(4) & 15
    words = _gathered(scales, 3, 4) | nibbles << 12
    return np.concatenate([_little(codes & 255, "u1"), _little(upper, "u1"), _little(words, "<u2")], axis=1)


GRID_LAYOUTS: Mapping[QuantType, Layout] = {
    QuantType.IQ2_XXS: _iq2_xxs,
    QuantType.IQ2_XS: _iq2_xs,
    QuantType.IQ2_S: _iq2_s,
    QuantType.IQ3_XXS: _iq3_xxs,
    QuantType.IQ3_S: _iq3_s,
    QuantType.IQ1_S: _iq1_s,
    QuantType.IQ1_M: _iq1_m,
}
