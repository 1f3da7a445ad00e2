"""Weights packed for the CPU kernels (csrc/kernels/packed/packed.inl), read by the GPU as they are.

Experts that rest in RAM in that form can be copied over PCIe and multiplied without another copy or a conversion. Its
tiles of 16 rows hold words of 4 columns with the rows side by side, so reads are as wide as in the GPU's own layout;
a tile here is always 64 columns: one group g of a K-quant's block, or two blocks of 32. csrc/kernels/packed/packed.inl,
bf16.inl and fp8.inl describe the bytes; the constants below are theirs, and the tests compare with what `cpu.pack`
and `cpu.pack_fp8` write.
"""

from __future__ import annotations

from ktransformers.kernels.triton.common.bits import (
    BF16,
    F8_E4M3,
    MXFP4,
    Q4_0,
    Q5_K,
    Q6_K,
    Q8_0,
    e2m1,
    e4m3,
    e8m0,
    shifted,
)
from ktransformers.kernels.triton.common.runtime import jit, tl
from ktransformers.kernels.triton.quant.cpu_packed_bytes import (
    block_bytes,
    byte_pairs,
    halves,
    head_bytes,
    line_words,
    tile_bytes,
)
from ktransformers.kernels.triton.quant.cpu_packed_codes import code_tile, has_codes
from ktransformers.kernels.triton.quant.cpu_packed_grid import grid_tile, has_grid

__all__ = ["cpu_tile"]


@jit
def value(word, extra, s, m, one, b: tl.constexpr, h: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the number in nibble h of byte b (of Q8_0: in byte b): (1 + u / 256) 256 s - (256 s + m)."""
    if TYPE == MXFP4:
        return (e2m1(word, 8 * b + 4 * h) * s).to(DTYPE)
    if TYPE == Q8_0:
        bits = shifted(word, 15 - 8 * b) & 0x7F8000
    else:
        bits = shifted(word, 15 - 8 * b - 4 * h) & 0x78000
        if TYPE == Q5_K:
            bits = bits | (shifted(extra, 19 - 8 * b) & 0x80000)
        if TYPE == Q6_K:
            bits = bits | (shifted(extra, 19 - 8 * b) & 0x180000)
    scaled = 256.0 * s
    return ((bits | one).to(tl.float32, bitcast=True) * scaled - (scaled + m)).to(DTYPE)


@jit
def four_bytes(word, extra, s, m, one, h: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers in nibble h of the four bytes of a word, as [..., bit 1, bit 0] of the byte."""
    even = tl.join(value(word, extra, s, m, one, 0, h, TYPE, DTYPE), value(word, extra, s, m, one, 2, h, TYPE, DTYPE))
    odd = tl.join(value(word, extra, s, m, one, 1, h, TYPE, DTYPE), value(word, extra, s, m, one, 3, h, TYPE, DTYPE))
    return tl.join(even, odd)


@jit
def tile_of_256(base, k0, n, mask, one, TYPE: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Load 64 columns of a K-quant: word i of a group has its columns 4 i + b in low nibbles, 32 + 4 i + b in high
    ones.
    """
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    LINES: tl.constexpr = 256 if TYPE == Q6_K else 320
    g = k0 % 256 // 64
    block = head_bytes(TYPE, K) + k0 // 256 * block_bytes(TYPE)
    i = tl.arange(0, 8)[:, None]
    word = line_words(base, block + LINES + 64 * (8 * g + i), n, mask, SIZE)
    upper, upper_high = word, word
    if TYPE == Q6_K:
        d = halves(base, k0 // 256 * 32, n, mask, SIZE)
        first = byte_pairs(base, block + 64 * g, n, mask, SIZE) >> (8 * (i // 4))
        second = byte_pairs(base, block + 64 * g + 32, n, mask, SIZE) >> (8 * (i // 4))
        s = d * ((first << 24) >> 24).to(tl.float32)
        s_high = d * ((second << 24) >> 24).to(tl.float32)
        m, m_high = 32.0 * s, 32.0 * s_high
        upper = line_words(base, block + LINES + 2048 + 64 * (4 * g + i % 4), n, mask, SIZE) >> (2 * (i // 4))
        upper_high = upper >> 4
    else:
        d, dmin = halves(base, block, n, mask, SIZE), halves(base, block + 32, n, mask, SIZE)
        scale = byte_pairs(base, block + 64 + 32 * g, n, mask, SIZE)
        minimum = byte_pairs(base, block + 192 + 32 * g, n, mask, SIZE)
        s, s_high = d * (scale & 255).to(tl.float32), d * ((scale >> 8) & 255).to(tl.float32)
        m, m_high = dmin * (minimum & 255).to(tl.float32), dmin * ((minimum >> 8) & 255).to(tl.float32)
        if TYPE == Q5_K:
            upper = line_words(base, block + LINES + 2048 + 128 * g, n, mask, SIZE) >> i
            upper_high = line_words(base, block + LINES + 2112 + 128 * g, n, mask, SIZE) >> i
    low = four_bytes(word, upper, s, m, one, 0, TYPE, DTYPE)
    high = four_bytes(word, upper_high, s_high, m_high, one, 1, TYPE, DTYPE)
    tile = tl.permute(tl.join(low, high), (4, 0, 2, 3, 1))  # from [i, rows, bits of b, half]
    return tl.reshape(tile, (64, n.shape[1]))


@jit
def tile_of_32(base, k0, n, mask, one, TYPE: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Load 64 columns of a type with blocks of 32; those past K are zero."""
    HEAD: tl.constexpr = head_bytes(TYPE, K)
    WORDS: tl.constexpr = block_bytes(TYPE) // 64
    SIZE: tl.constexpr = tile_bytes(TYPE, K)
    at = tl.arange(0, 2 * WORDS)[:, None]
    block = k0 // 32 + at // WORDS
    mask = mask & (block < K // 32)
    word = line_words(base, HEAD + 64 * (WORDS * block + at % WORDS), n, mask, SIZE)
    if TYPE == MXFP4:
        exponent = tl.load(base + n // 16 * SIZE + (16 * block + n % 16), mask=mask, other=0)
        s = e8m0(exponent.to(tl.int32))
    else:
        s = halves(base, 32 * block, n, mask, SIZE)
    if TYPE == Q8_0:
        word = word ^ -2139062144  # 0x80808080: signed bytes become q + 128
        tile = tl.permute(four_bytes(word, word, s, 128.0 * s, one, 0, TYPE, DTYPE), (0, 2, 3, 1))
    else:
        low = four_bytes(word, word, s, 8.0 * s, one, 0, TYPE, DTYPE)
        high = four_bytes(word, word, s, 8.0 * s, one, 1, TYPE, DTYPE)
        split = tl.reshape(tl.join(low, high), (2, 4, n.shape[1], 2, 2, 2))  # [block, word, rows, bits of b, half]
        tile = tl.permute(split, (0, 5, 1, 3, 4, 2))
    return tl.reshape(tile, (64, n.shape[1]))


@jit
def columns_of_pairs(even, odd):
    """Join [32, rows] of even and of odd columns -> [64, rows]."""
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (64, even.shape[1]))


@jit
def tile_of_bf16(base, k0, n, mask, K: tl.constexpr, DTYPE: tl.constexpr):
    """Load 64 columns of BF16: line i of a tile holds columns 2 i and 2 i + 1; those past K are zero."""
    i = k0 // 2 + tl.arange(0, 32)[:, None]
    word = line_words(base, 64 * i, n, mask & (i < K // 2), 32 * K)
    even, odd = word.to(tl.int16).to(tl.bfloat16, bitcast=True), (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return columns_of_pairs(even.to(DTYPE), odd.to(DTYPE))


@jit
def tile_of_fp8(base, k0, n, mask, K: tl.constexpr, DTYPE: tl.constexpr):
    """Load 64 columns of FP8: half i of a line holds columns 2 i and 2 i + 1; those past K are zero."""
    HEAD: tl.constexpr = ((K + 127) // 128 * 4 + 63) // 64 * 64
    SIZE: tl.constexpr = HEAD + 16 * K
    i = k0 // 2 + tl.arange(0, 32)[:, None]
    pair = byte_pairs(base, HEAD + 32 * i, n, mask & (i < K // 2), SIZE)
    head = (base + n // 16 * SIZE).to(tl.pointer_type(tl.float32)) + k0 // 128
    scale = tl.load(head, mask=mask, other=0.0) * 0.00390625  # the head holds 256 times the scale
    return columns_of_pairs((e4m3(pair, 0) * scale).to(DTYPE), (e4m3(pair, 8) * scale).to(DTYPE))


@jit
def cpu_tile(base, k0, n, mask, one, tables, TYPE: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """Load columns k0 .. k0 + 63 (k0 a multiple of 64) of the rows n [1, BN] -> [64, BN] of DTYPE. mask: [1, BN].

    tables: uint8 pointer to `tables.tables`.
    """
    if has_codes(TYPE):
        tile = code_tile(base, k0, n, mask, one, TYPE, K, DTYPE)
    elif TYPE == Q8_0 or TYPE == Q4_0 or TYPE == MXFP4:
        tile = tile_of_32(base, k0, n, mask, one, TYPE, K, DTYPE)
    elif TYPE == BF16:
        tile = tile_of_bf16(base, k0, n, mask, K, DTYPE)
    elif TYPE == F8_E4M3:
        tile = tile_of_fp8(base, k0, n, mask, K, DTYPE)
    elif has_grid(TYPE):
        tile = grid_tile(base, k0, n, mask, tables, TYPE, K, DTYPE)
    else:
        tile = tile_of_256(base, k0, n, mask, one, TYPE, K, DTYPE)
    return tile
