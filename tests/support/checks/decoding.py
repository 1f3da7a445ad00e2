"""Decodes blocks by the `gguf` package, or, of types that it does not decode, one by one from their layouts.

The oracle of whatever decodes blocks. Knows nothing of the extension.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from gguf import quants

from ktransformers.kernels.types import QuantType, type_size

__all__ = ["ROW_HEADS", "SUB_BLOCKS", "blocks_of_row", "decoded", "parts_of_rows", "set_row_scales"]

_Bytes = npt.NDArray[np.uint8]
_Float = npt.NDArray[np.float32]
_Parts = tuple[np.float32, list[int], list[list[int]]]
"""d, and scales and values of the sub-blocks."""

# Of ik_llama.cpp's ggml-common.h. Pairs are two int8, the lower byte first; of values the second half is taken where a
# sub-block's bit is set.
_IQ2_PAIRS = (
    *(0xE9C1, 0x0DC1, 0xC1D8, 0xF6D8, 0x0DD8, 0x2FD8, 0xD8E9, 0xE9E9, 0x01E9, 0x0DE9, 0x1CE9, 0xC1F6, 0x01F6, 0x0DF6),
    *(0x2FF6, 0xE901, 0xF601, 0x0101, 0x0D01, 0x1C01, 0xD80D, 0xE90D, 0xF60D, 0x010D, 0x0D0D, 0xC11C, 0xE91C, 0x011C),
    *(0x1C1C, 0x2F1C, 0xE92F, 0x0D2F),
)
_IQ2_VALUES = (-31, -13, 1, 17, -26, -8, 6, 22)
_IQ3_VALUES = (-63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51)
_IQ4_VALUES = (
    *(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    *(-123, -100, -79, -61, -45, -31, -18, -6, 5, 17, 29, 42, 57, 73, 93, 117),
)
_IQ5_VALUES = (
    *(-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6),
    *(-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121),
    *(-124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16, -10, -4),
    *(1, 7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123),
)
_IQ6_VALUES = (
    *(-127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54),
    *(-51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5),
    *(-2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44),
    *(47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121),
    *(-126, -120, -114, -108, -103, -97, -92, -87, -83, -78, -73, -69, -65, -61, -57, -53),
    *(-50, -46, -43, -39, -36, -33, -30, -27, -24, -21, -18, -15, -12, -10, -7, -4),
    *(-1, 1, 4, 7, 10, 13, 15, 18, 21, 24, 28, 31, 34, 37, 41, 45),
    *(48, 52, 56, 60, 64, 69, 73, 78, 83, 88, 93, 99, 104, 110, 116, 122),
)


def decoded(rows: _Bytes, qtype: QuantType) -> _Float:
    """Blocks of rows [N, bytes] -> fp32 [N, K]."""
    if qtype is QuantType.Q1_0:
        return np.array([_q1_0(block) for block in rows.reshape(-1, 18)], dtype=np.float32).reshape(len(rows), -1)
    if qtype in SUB_BLOCKS:
        parts = [_products(*SUB_BLOCKS[qtype](block)) for row in rows for block in blocks_of_row(row, qtype)]
        return np.array(parts).reshape(len(rows), -1)
    return np.ascontiguousarray(quants.dequantize(rows, qtype), dtype=np.float32)


def _q1_0(block: _Bytes) -> list[float]:
    d, number = float(block[:2].view(np.float16)[0]), int.from_bytes(block[2:].tobytes(), "little")
    return [d if number >> i & 1 else -d for i in range(128)]


def blocks_of_row(row: _Bytes, qtype: QuantType) -> list[_Bytes]:
    """The blocks of a row, each behind the bytes that are in front of the row."""
    head, size = ROW_HEADS.get(qtype, 0), type_size(qtype)
    return [np.concatenate([row[:head], row[at : at + size]]) for at in range(head, len(row), size)]


def parts_of_rows(rows: _Bytes, qtype: QuantType) -> tuple[_Bytes, _Bytes]:
    """Views of rows [N, bytes]: what is in front of their blocks [N, bytes, 0 of most types], and the blocks [N, n,
    bytes].
    """
    head = ROW_HEADS.get(qtype, 0)
    return rows[:, :head], rows[:, head:].reshape(len(rows), -1, type_size(qtype))


def set_row_scales(heads: _Bytes, scales: npt.NDArray[np.floating]) -> None:
    """Write numbers [N] into what is in front of rows [N, bytes], where there is something."""
    if heads.shape[1]:
        stored = scales.astype(np.float16 if heads.shape[1] == 2 else np.float32)
        heads[:] = stored.view(np.uint8).reshape(heads.shape)


def _table(values: tuple[int, ...], bit: int) -> tuple[int, ...]:
    return values[len(values) // 2 :] if bit else values[: len(values) // 2]


def _iq2_k(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH8B64B", block.tobytes())
    stored, codes = data[:8], data[8:]
    scales, values = [], []
    for sub in range(16):
        scales.append((stored[sub // 2] >> 4 * (sub % 2) & 15) - 8)
        table, at = _table(_IQ2_VALUES, extra >> sub & 1), 32 * (sub // 8) + 16 * (sub % 2)
        values.append([table[code >> 2 * (sub // 2 % 4) & 3] for code in codes[at : at + 16]])
    return np.float32(d), scales, values


def _iq3_k(block: _Bytes) -> _Parts:
    d, extra, signs, *data = struct.unpack("<eHH8B64B32B", block.tobytes())
    stored, codes, thirds = data[:8], data[8:72], data[72:]
    scales, values = [], []
    for sub in range(16):
        size = 2 * (stored[sub // 2] >> 4 * (sub % 2) & 15) + 1
        scales.append(-size if signs >> sub & 1 else size)
        table, first, row = _table(_IQ3_VALUES, extra >> sub & 1), 16 * (sub % 2), []
        for j in range(first, first + 16):
            low = codes[32 * (sub // 8) + j] >> 2 * (sub // 2 % 4) & 3
            row.append(table[low + 4 * (thirds[j] >> sub // 2 & 1)])
        values.append(row)
    return np.float32(d), scales, values


def _six_bits(lower: list[int], upper: list[int], sub: int) -> int:
    return (lower[sub // 2] >> 4 * (sub % 2) & 15) + 16 * (upper[sub // 4] >> 2 * (sub % 4) & 3) - 32


def _iq4_k(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH4B8B128B", block.tobytes())
    upper, lower, codes = data[:4], data[4:12], data[12:]
    values = []
    for sub in range(16):
        table, at = _table(_IQ4_VALUES, extra >> sub & 1), 16 * (sub // 2)
        values.append([table[code >> 4 * (sub % 2) & 15] for code in codes[at : at + 16]])
    return np.float32(d), [_six_bits(lower, upper, sub) for sub in range(16)], values


def _iq5_k(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH4B8B128B32B", block.tobytes())
    upper, lower, codes, fifths = data[:4], data[4:12], data[12:140], data[140:]
    values = []
    for sub in range(16):
        table, first, row = _table(_IQ5_VALUES, extra >> sub & 1), 16 * (sub % 2), []
        for j in range(first, first + 16):
            nibble = codes[32 * (sub // 4) + j] >> 4 * (sub // 2 % 2) & 15
            row.append(table[nibble + 16 * (fifths[j] >> sub // 2 & 1)])
        values.append(row)
    return np.float32(d), [_six_bits(lower, upper, sub) for sub in range(16)], values


def _iq6_k(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH16b128B64B", block.tobytes())
    scales, codes, uppers = data[:16], data[16:144], data[144:]
    values = []
    for sub in range(16):
        table, first, row = _table(_IQ6_VALUES, extra >> sub & 1), 16 * (sub % 2), []
        for j in range(first, first + 16):
            nibble = codes[32 * (sub // 4) + j] >> 4 * (sub // 2 % 2) & 15
            row.append(table[nibble + 16 * (uppers[32 * (sub // 8) + j] >> 2 * (sub // 2 % 4) & 3)])
        values.append(row)
    return np.float32(d), scales, values


def _iq2_ks(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH4B64B", block.tobytes())
    stored, codes = data[:4], data[4:]
    scales, values = [], []
    for sub in range(8):
        scales.append((stored[sub // 2] >> 4 * (sub % 2) & 15) + 16 * (extra >> 8 + sub & 1) - 16)
        table, at = _table(_IQ2_VALUES, extra >> sub & 1), 32 * (sub // 4)
        values.append([table[code >> 2 * (sub % 4) & 3] for code in codes[at : at + 32]])
    return np.float32(d), scales, values


def _iq3_ks(block: _Bytes) -> _Parts:
    d, extra, *data = struct.unpack("<eH4B64B32B", block.tobytes())
    stored, codes, thirds = data[:4], data[4:68], data[68:]
    scales, values = [], []
    for sub in range(8):
        scales.append((stored[sub % 4] >> 4 * (sub // 4) & 15) + 16 * (extra >> sub & 1) - 16)
        table, low = _table(_IQ3_VALUES, extra >> 8 + sub & 1), codes[32 * (sub // 4) : 32 * (sub // 4) + 32]
        values.append([table[(low[j] >> 2 * (sub % 4) & 3) + 4 * (thirds[j] >> sub & 1)] for j in range(32)])
    return np.float32(d), scales, values


def _iq2_kl(block: _Bytes) -> _Parts:
    d, uppers, *data = struct.unpack("<eH4B64B16B", block.tobytes())
    stored, codes, fifths = data[:4], data[4:68], data[68:]
    scales, values = [], []
    for sub in range(8):
        scales.append((stored[sub % 4] >> 4 * (sub // 4) & 15) + 16 * (uppers >> 2 * sub & 3) - 32)
        row = list[int]()
        for j in range(16):
            pair = (codes[16 * (sub // 2) + j] >> 4 * (sub % 2) & 15) + 16 * (fifths[j] >> sub & 1)
            row += struct.unpack("<bb", struct.pack("<H", _IQ2_PAIRS[pair]))
        values.append(row)
    return np.float32(d), scales, values


def _iq4_ks(block: _Bytes) -> _Parts:
    d, *data = struct.unpack("<f8B128B", block.tobytes())
    stored, codes = data[:8], data[8:]
    values = []
    for sub in range(8):
        table, pairs = _table(_IQ4_VALUES, stored[sub] & 1), codes[16 * sub : 16 * sub + 16]
        values.append([table[code & 15] for code in pairs] + [table[code >> 4] for code in pairs])
    return np.float32(d), [byte // 2 * 2 - 127 for byte in stored], values


def _iq4_kss(block: _Bytes) -> _Parts:
    d, *words = struct.unpack("<f64H", block.tobytes())
    scales, values = [], []
    for sub in range(8):
        eight = words[8 * sub : 8 * sub + 8]
        byte = sum((word % 2) << i for i, word in enumerate(eight))
        table, pairs = _table(_IQ4_VALUES, byte % 2), []
        for word in eight:
            even = word - word % 2
            pairs += [(even ^ even // 2) % 256, (even ^ even // 2) // 256]
        scales.append(byte // 2 * 2 - 127)
        values.append([table[code & 15] for code in pairs] + [table[code >> 4] for code in pairs])
    return np.float32(d), scales, values


def _iq5_ks(block: _Bytes) -> _Parts:
    d, *data = struct.unpack("<f8B128B32B", block.tobytes())
    stored, codes, fifths = data[:8], data[8:136], data[136:]
    values = []
    for sub in range(8):
        table, low = _table(_IQ5_VALUES, stored[sub] & 1), codes[32 * (sub // 2) : 32 * (sub // 2) + 32]
        values.append([table[(low[j] >> 4 * (sub % 2) & 15) + 16 * (fifths[j] >> sub & 1)] for j in range(32)])
    return np.float32(d), [byte // 2 * 2 - 127 for byte in stored], values


def _trellis(code: int, count: int) -> list[int]:
    """Values of a seed, as ik_llama.cpp's QuantizerIQKT::set_values."""
    x, values = code + 4096, []
    for _ in range(count):
        x = x * 0xCBAC1FED % 2**32
        values.append(sum(x >> at & 63 for at in (0, 8, 16, 24)) - 126)
    return values


def _iq1_kt(block: _Bytes) -> _Parts:
    d, *data = struct.unpack("<f8B32B16B", block.tobytes())
    bytes_of, low, high = data[:8], data[8:40], data[40:]
    values = []
    for sub in range(8):
        row = []
        for j in range(4):
            above = high[4 * (sub % 4) + j] >> 4 * (sub // 4) & 15
            row += _trellis(low[4 * sub + j] + 256 * above + 4096 * (bytes_of[sub] >> 4 + j & 1), 8)
        values.append(row)
    return np.float32(d), [_IQ4_VALUES[byte & 15] for byte in bytes_of], values


def _iq2_kt(block: _Bytes) -> _Parts:
    d, *data = struct.unpack("<f4B32H", block.tobytes())
    scales = [_IQ4_VALUES[data[sub % 4] >> 4 * (sub // 4) & 15] for sub in range(8)]
    values = [[value for j in range(4) for value in _trellis(data[4 + 4 * sub + j], 8)] for sub in range(8)]
    return np.float32(d), scales, values


def _iq3_kt(block: _Bytes) -> _Parts:
    d, *data = struct.unpack("<f4B32H32B", block.tobytes())
    codes, signs, values = data[4:36], data[36:], []
    for sub in range(8):
        sizes = [abs(value) for j in range(4) for value in _trellis(codes[4 * sub + j], 8)]
        values.append([-size if signs[j] >> sub & 1 else size for j, size in enumerate(sizes)])
    return np.float32(d), [data[sub % 4] >> 4 * (sub // 4) & 15 for sub in range(8)], values


def _iq4_kt(block: _Bytes) -> _Parts:
    d, *data = struct.unpack("<f8I64B32B", block.tobytes())
    words, low, high = data[:8], data[8:72], data[72:]
    values = []
    for sub in range(8):
        row = []
        for j in range(8):
            at = 8 * sub + j
            code = low[at] + 256 * (high[at % 32] >> 4 * (at // 32) & 15) + 4096 * (words[sub] >> 8 + 3 * j & 7)
            row += _trellis(code + 32768 * (words[sub] & 1), 4)
        values.append(row)
    return np.float32(d), [(word >> 1 & 127) - 64 for word in words], values


SUB_BLOCKS: Mapping[QuantType, Callable[[_Bytes], _Parts]] = {
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
    QuantType.IQ1_KT: _iq1_kt,
    QuantType.IQ2_KT: _iq2_kt,
    QuantType.IQ3_KT: _iq3_kt,
    QuantType.IQ4_KT: _iq4_kt,
}
"""By type that the package does not decode, what reads a block of 256 weights in sub-blocks, behind what is in front of
its row.
"""

ROW_HEADS: Mapping[QuantType, int] = {
    QuantType.IQ2_KS: 2,
    QuantType.IQ3_KS: 2,
    QuantType.IQ2_KL: 2,
    QuantType.IQ4_KS: 4,
    QuantType.IQ4_KSS: 4,
    QuantType.IQ5_KS: 4,
    QuantType.IQ1_KT: 4,
    QuantType.IQ2_KT: 4,
    QuantType.IQ3_KT: 4,
    QuantType.IQ4_KT: 4,
}
"""Bytes in front of a row's blocks."""


def _products(d: np.float32, scales: list[int], values: list[list[int]]) -> _Float:
    return ((d * np.array(scales, dtype=np.float32))[:, None] * np.array(values, dtype=np.float32)).reshape(-1)
