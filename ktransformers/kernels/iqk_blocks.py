"""Decodes blocks of ik_llama.cpp's types to numbers: 256 weights d s (the value of a code + n b) each.

s is a whole number and b a bit, of 16 weights each, of 32 in the _KS, _KSS and _KL types; d is an fp16 number in front
of a block, or of a row (there fp32 but for IQ2_KS, IQ3_KS and IQ2_KL). A code of IQ2_KL stands for two weights, whose b
is 0. Layouts are those of ik_llama.cpp's ggml-common.h and iqk_quantize.cpp; csrc/kernels/packed/iqk.inl has them in
words. Of IQ6_K the values are those of its products; its decoder in C computes a polynomial that is within one of them.
Knows nothing of files, the extension or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ktransformers.kernels.types import QuantType, row_head

__all__ = ["IQK_TYPES", "IQK_VALUES", "IqkValues", "decode_iqk"]

_U8Array = npt.NDArray[np.uint8]
_I32Array = npt.NDArray[np.int32]
_F32Array = npt.NDArray[np.float32]


class IqkValues(NamedTuple):
    """Values that codes stand for. values: by code. shift: what a bit adds to them. subs: scales of a block of 256.
    is_odd: whether scales are odd numbers.
    """

    values: tuple[int, ...]
    shift: int
    subs: int
    is_odd: bool = False


_IQ2 = (-31, -13, 1, 17)
_IQ3 = (-63, -40, -23, -10, 1, 13, 28, 47)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ5 = (
    *(-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6),
    *(-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121),
)
_IQ6 = (
    *(-127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54),
    *(-51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5),
    *(-2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44),
    *(47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121),
)
IQK_VALUES: Mapping[QuantType, IqkValues] = {
    QuantType.IQ2_K: IqkValues(_IQ2, 5, 16),
    QuantType.IQ3_K: IqkValues(_IQ3, 4, 16, is_odd=True),
    QuantType.IQ4_K: IqkValues(_IQ4, 4, 16),
    QuantType.IQ5_K: IqkValues(_IQ5, 2, 16),
    QuantType.IQ6_K: IqkValues(_IQ6, 1, 16),
    QuantType.IQ2_KS: IqkValues(_IQ2, 5, 8),
    QuantType.IQ3_KS: IqkValues(_IQ3, 4, 8),
    QuantType.IQ2_KL: IqkValues(_IQ3, 4, 8),
    QuantType.IQ4_KS: IqkValues(_IQ4, 4, 8, is_odd=True),
    QuantType.IQ4_KSS: IqkValues(_IQ4, 4, 8, is_odd=True),
    QuantType.IQ5_KS: IqkValues(_IQ5, 2, 8, is_odd=True),
}
"""By type, what its codes stand for."""

IQK_TYPES = frozenset(IQK_VALUES)


class _Fields(NamedTuple):
    """Of N blocks scales s and bits b [N, subs], and codes [N, 256]."""

    scales: _I32Array
    bits: _U8Array
    codes: _U8Array


def decode_iqk(blocks: _U8Array, qtype: QuantType) -> _F32Array:
    """Decode blocks of an ik_llama.cpp type, uint8 [N, bytes], to fp32 [N, 256]. A block begins with its d, also of a
    type that has it once in front of a row.
    """
    head = row_head(qtype) or 2
    d = blocks[:, :head].copy().view(np.float16 if head == 2 else np.float32).astype(np.float32)
    known = IQK_VALUES[qtype]
    fields = _FIELDS[qtype](blocks[:, head:])
    shifted = np.array(known.values, dtype=np.int32)[fields.codes].reshape(-1, known.subs, 256 // known.subs)
    shifted += known.shift * fields.bits.astype(np.int32)[..., None]
    weights: _F32Array = (d * fields.scales.astype(np.float32))[..., None] * shifted.astype(np.float32)
    return weights.reshape(-1, 256)


def _flags(data: _U8Array) -> _U8Array:
    """Bits of bytes [N, n] -> [N, 8 n], from the lowest up."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _nibbles(data: _U8Array) -> _U8Array:
    """Bytes [N, n] -> [N, 2 n], the low nibble first."""
    return np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)


def _in_runs(data: _U8Array, run: int, bits: int) -> _U8Array:
    """[N, bytes] -> [N, 256] fields of 1, 2 or 4 bits: a run of bytes has their lowest fields one after the other, then
    their next ones.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def _signed(unsigned: _U8Array, middle: int) -> _I32Array:
    return unsigned.astype(np.int32) - middle


def _iq2_k(block: _U8Array) -> _Fields:
    return _Fields(_signed(_nibbles(block[:, 2:10]), 8), _flags(block[:, :2]), _in_runs(block[:, 10:], 32, 2))


def _three_bits(low: _U8Array, high: _U8Array) -> _U8Array:
    return _in_runs(low, 32, 2) | _in_runs(high, 32, 1) << np.uint8(2)


def _iq3_k(block: _U8Array) -> _Fields:
    sizes = 2 * _nibbles(block[:, 4:12]).astype(np.int32) + 1
    scales = np.where(_flags(block[:, 2:4]), -sizes, sizes).astype(np.int32)
    return _Fields(scales, _flags(block[:, :2]), _three_bits(block[:, 12:76], block[:, 76:]))


def _six_bit_scales(block: _U8Array) -> _I32Array:
    return _signed(_nibbles(block[:, 6:14]) | _in_runs(block[:, 2:6], 1, 2) << np.uint8(4), 32)


def _iq4_k(block: _U8Array) -> _Fields:
    return _Fields(_six_bit_scales(block), _flags(block[:, :2]), _in_runs(block[:, 14:], 16, 4))


def _five_bits(low: _U8Array, high: _U8Array) -> _U8Array:
    return _in_runs(low, 32, 4) | _in_runs(high, 32, 1) << np.uint8(4)


def _iq5_k(block: _U8Array) -> _Fields:
    return _Fields(_six_bit_scales(block), _flags(block[:, :2]), _five_bits(block[:, 14:142], block[:, 142:]))


def _iq6_k(block: _U8Array) -> _Fields:
    codes = _in_runs(block[:, 18:146], 32, 4) | _in_runs(block[:, 146:], 32, 2) << np.uint8(4)
    return _Fields(block[:, 2:18].copy().view(np.int8).astype(np.int32), _flags(block[:, :2]), codes)


def _iq2_ks(block: _U8Array) -> _Fields:
    scales = _signed(_nibbles(block[:, 2:6]) | _flags(block[:, 1:2]) << np.uint8(4), 16)
    return _Fields(scales, _flags(block[:, :1]), _in_runs(block[:, 6:], 32, 2))


def _iq3_ks(block: _U8Array) -> _Fields:
    scales = _signed(_in_runs(block[:, 2:6], 4, 4) | _flags(block[:, :1]) << np.uint8(4), 16)
    return _Fields(scales, _flags(block[:, 1:2]), _three_bits(block[:, 6:70], block[:, 70:]))


_PAIRS = np.array(
    [
        *(0o02, 0o05, 0o10, 0o13, 0o15, 0o17, 0o21, 0o22, 0o24, 0o25, 0o26, 0o30, 0o34, 0o35, 0o37, 0o42),
        *(0o43, 0o44, 0o45, 0o46, 0o51, 0o52, 0o53, 0o54, 0o55, 0o60, 0o62, 0o64, 0o66, 0o67, 0o72, 0o75),
    ],
    dtype=np.uint8,
)
"""Of IQ2_KL, the codes of IQ3_KS that a pair's code stands for, an octal digit each."""


def _iq2_kl(block: _U8Array) -> _Fields:
    scales = _signed(_in_runs(block[:, 2:6], 4, 4) | _in_runs(block[:, :2], 1, 2) << np.uint8(4), 32)
    pairs = _PAIRS[_in_runs(block[:, 6:70], 16, 4) | _in_runs(block[:, 70:], 16, 1) << np.uint8(4)]
    codes = np.stack([pairs >> np.uint8(3), pairs & np.uint8(7)], axis=2).reshape(len(block), -1)
    return _Fields(scales, np.zeros((len(block), 8), dtype=np.uint8), codes)


def _of_bytes(data: _U8Array, codes: _U8Array) -> _Fields:
    return _Fields(_signed(data & np.uint8(254), 127), data & np.uint8(1), codes)


def _iq4_ks(block: _U8Array) -> _Fields:
    return _of_bytes(block[:, :8], _in_runs(block[:, 8:], 16, 4))


def _iq4_kss(block: _U8Array) -> _Fields:
    words = block.copy().view("<u2")
    even = words & np.uint16(0xFFFE)
    codes = (even ^ even >> np.uint16(1)).astype("<u2").view(np.uint8)
    scales = np.packbits((words & 1).astype(np.uint8).reshape(-1, 8, 8), axis=2, bitorder="little")
    return _of_bytes(scales[..., 0], _in_runs(codes, 16, 4))


def _iq5_ks(block: _U8Array) -> _Fields:
    return _of_bytes(block[:, :8], _five_bits(block[:, 8:136], block[:, 136:]))


_FIELDS: Mapping[QuantType, Callable[[_U8Array], _Fields]] = {
    QuantType.IQ2_K: _iq2_k,
    QuantType.IQ3_K: _iq3_k,
    QuantType.IQ4_K: _iq4_k,
    QuantType.IQ5_K: _iq5_k,
    QuantType.IQ6_K: _iq6_k,
    QuantType.IQ2_KS: _iq2_ks,
    QuantType.IQ3_KS: _iq3_ks,
    QuantType.IQ2_KL: _iq2_kl,
    QuantType.IQ4_KS: _iq4_ks,
    QuantType.IQ4_KSS: _iq4_kss,
    QuantType.IQ5_KS: _iq5_ks,
}
"""By type, what takes blocks [N, bytes behind d] apart."""
