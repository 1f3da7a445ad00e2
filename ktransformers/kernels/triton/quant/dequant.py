"""Weights of ggml's block formats inside Triton kernels: from stored bits to numbers in registers.

Three layouts: planes (repack.py, fast: aligned words, neighbouring rows side by side), the CPU kernels'
(cpu_packed.py) and ggml's (byte by byte, for what packing does not take). Matrices are [N rows, K columns]; tiles here
are [columns or words, rows], rows fastest, as the repacked planes lie. MXFP4 and FP8 are small floats times a scale.
The other block formats are `w = s * u - m` with an unsigned integer u and a scale and a minimum per 16 or 32 columns.
In the repacked forms u goes into the mantissa of a float 1 + u / 2^p, so that the integer never has to be converted:
w = (1 + u / 2^p) (2^p s) - (2^p s + m), with p at most 8, off by less than 2^-14 |s| for its roundings.
Knows the bits of the formats; does not know matrix products or experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.triton.common.bits import (
    BF16,
    F8_E4M3,
    F16,
    MXFP4,
    ONE,
    Q4_0,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    e2m1,
    e2m1_small,
    e4m3,
    e8m0,
    half_bits,
    shifted,
)
from ktransformers.kernels.triton.common.runtime import constant, jit, static, tl, triton
from ktransformers.kernels.triton.quant.cpu_packed import cpu_tile
from ktransformers.kernels.triton.quant.cpu_packed_grid import has_grid
from ktransformers.kernels.triton.quant.repack import READ_TYPES, GpuLayout, layout_nbytes
from ktransformers.kernels.triton.quant.tables import tables
from ktransformers.kernels.types import QuantType, WeightType

__all__ = [
    "WeightMatrix",
    "check_matrix",
    "dequantize",
    "five_bits",
    "group_scales",
    "group_words",
    "lane_rows",
    "one_plus",
    "runs_ahead",
    "six_bits",
    "unit",
    "weight_tile",
]

# Layout as constants of the kernels.
ROWS = constant(int(GpuLayout.ROWS))
PLANES = constant(int(GpuLayout.PLANES))
TILES = constant(int(GpuLayout.CPU_PACKED))

_BLOCKS = tuple((number, format.block, format.nbytes) for number, format in FORMATS.items())


@jit
def chunk_words(base, chunk, n, mask, TYPE: tl.constexpr, N: tl.constexpr):
    """Load the words that columns fill: 1 for 8 nibbles, 2 for 8 bytes, 3 for 16 of Q6_K, 5 for 32 of Q5_K; a tuple of
    5.
    """
    words = base.to(tl.pointer_type(tl.int32))
    if TYPE == Q5_K:
        a = tl.load(words + (5 * chunk) * N + n, mask=mask, other=0)
        b = tl.load(words + (5 * chunk + 1) * N + n, mask=mask, other=0)
        c = tl.load(words + (5 * chunk + 2) * N + n, mask=mask, other=0)
        d = tl.load(words + (5 * chunk + 3) * N + n, mask=mask, other=0)
        e = tl.load(words + (5 * chunk + 4) * N + n, mask=mask, other=0)
    elif TYPE == Q6_K:
        a = tl.load(words + (3 * chunk) * N + n, mask=mask, other=0)
        b = tl.load(words + (3 * chunk + 1) * N + n, mask=mask, other=0)
        c = tl.load(words + (3 * chunk + 2) * N + n, mask=mask, other=0)
        d, e = c, c
    elif TYPE == Q8_0 or TYPE == F8_E4M3:
        a = tl.load(words + (2 * chunk) * N + n, mask=mask, other=0)
        b = tl.load(words + (2 * chunk + 1) * N + n, mask=mask, other=0)
        if TYPE == Q8_0:
            a, b = a ^ -2139062144, b ^ -2139062144  # 0x80808080: signed bytes become q + 128
        c, d, e = b, b, b
    else:
        a = tl.load(words + chunk * N + n, mask=mask, other=0)
        b, c, d, e = a, a, a, a
    return a, b, c, d, e


@jit
def scales(base, g, n, mask, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Return scale s and offset m of scale group g (16 columns of Q6_K, 32 of the others), fp32."""
    if TYPE == Q4_K or TYPE == Q5_K:
        at: tl.constexpr = K // 8 * 5 * N if TYPE == Q5_K else K // 2 * N
        dm = tl.load((base + at).to(tl.pointer_type(tl.int32)) + (g // 8) * N + n, mask=mask, other=0)
        sm = tl.load((base + at + K // 64 * N).to(tl.pointer_type(tl.int16)) + g * N + n, mask=mask, other=0)
        sm = sm.to(tl.int32)
        s = half_bits(dm) * (sm & 255).to(tl.float32)
        return s, half_bits(dm >> 16) * ((sm >> 8) & 255).to(tl.float32)
    if TYPE == Q6_K:
        at6: tl.constexpr = K // 4 * 3 * N
        sc = tl.load((base + at6).to(tl.pointer_type(tl.int8)) + g * N + n, mask=mask, other=0)
        d6 = tl.load(
            (base + at6 + K // 16 * N).to(tl.pointer_type(tl.float16)) + (g // 16) * N + n, mask=mask, other=0.0
        )
        s6 = d6.to(tl.float32) * sc.to(tl.float32)
        return s6, 32.0 * s6
    if TYPE == F8_E4M3:
        grid = (base + K * N).to(tl.pointer_type(tl.float32))
        column = tl.min(tl.min(n, axis=1), axis=0) // 128  # tiles have 64 or 128 rows: one column of the grid
        s8 = tl.load(grid + g // 4 * ((N + 127) // 128) + column, mask=g < K // 32, other=0.0)
        s8 = tl.broadcast_to(s8, (g.shape[0], n.shape[1]))
        return s8, s8
    if TYPE == MXFP4:
        s4 = e8m0(tl.load(base + K // 2 * N + g * N + n, mask=mask, other=0).to(tl.int32))
        return s4, s4
    at0: tl.constexpr = K * N if TYPE == Q8_0 else K // 2 * N
    d = tl.load((base + at0).to(tl.pointer_type(tl.float16)) + g * N + n, mask=mask, other=0.0).to(tl.float32)
    return d, (128.0 if TYPE == Q8_0 else 8.0) * d


@jit
def group_words(base, group, n, mask, TYPE: tl.constexpr, N: tl.constexpr):
    """Load all words of a group of 32 columns, as a tuple of 8 (the last ones repeat where a type has fewer)."""
    W: tl.constexpr = 5 if TYPE == Q5_K else 6 if TYPE == Q6_K else 8 if TYPE == Q8_0 or TYPE == F8_E4M3 else 4
    at = base.to(tl.pointer_type(tl.int32)) + W * group * N + n
    a = tl.load(at, mask=mask, other=0)
    b = tl.load(at + N, mask=mask, other=0)
    c = tl.load(at + 2 * N, mask=mask, other=0)
    d = tl.load(at + 3 * N, mask=mask, other=0)
    e, f, g, h = d, d, d, d
    if W > 4:
        e = tl.load(at + 4 * N, mask=mask, other=0)
    if W > 5:
        f = tl.load(at + 5 * N, mask=mask, other=0)
    if W > 6:
        g = tl.load(at + 6 * N, mask=mask, other=0)
        h = tl.load(at + 7 * N, mask=mask, other=0)
    return a, b, c, d, e, f, g, h


@jit
def five_bits(words, g: tl.constexpr):
    """Return the values of columns 4 g .. 4 g + 3 of a chunk of Q5_K, in bytes."""
    nibbles = words[g // 2] if g % 2 == 0 else words[g // 2] >> 4
    return (nibbles & 0x0F0F0F0F) | (shifted(words[4], 4 - g) & 0x10101010)


@jit
def six_bits(words, g: tl.constexpr):
    """Return the values of columns 4 g .. 4 g + 3 of a chunk of Q6_K, in bytes; of g < 3 six bits of each count."""
    if g < 3:
        return words[g]
    return (words[0] >> 6) & 0x03030303 | (words[1] >> 4) & 0x0C0C0C0C | (words[2] >> 2) & 0x30303030


@jit
def group_scales(base, group, n, mask, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Return scale s and offset m of the two halves of a group."""
    if TYPE == Q6_K:
        s, m = scales(base, 2 * group, n, mask, TYPE, K, N)
        t, o = scales(base, 2 * group + 1, n, mask, TYPE, K, N)
    else:
        s, m = scales(base, group, n, mask, TYPE, K, N)
        t, o = s, m
    return s, m, t, o


@jit
def one_plus(words, one, i: tl.constexpr, TYPE: tl.constexpr):
    """Return 1 + u / 2^p of column i of a chunk; 2^p is `unit(i, TYPE)`.

    one: 0x3F800000, the bits of 1.0, as a kernel argument: a value that the compiler does not know lies in a register,
    and one LOP3 does both the mask and the exponent. FP8 is the number itself instead, FP4 2^-126 times it.
    """
    if TYPE == F8_E4M3:
        return e4m3(words[i // 4], 8 * (i % 4))
    if TYPE == MXFP4:
        return e2m1_small(words[0], 8 * (i % 4) + 4 * (i // 4))
    if TYPE == Q8_0:
        bits = shifted(words[i // 4], 15 - 8 * (i % 4)) & 0x7F8000
    elif TYPE == Q5_K:
        bits = shifted(five_bits(words, i // 4), 18 - 8 * (i % 4)) & 0x7C0000
    elif TYPE == Q6_K:
        bits = shifted(six_bits(words, i // 4), 17 - 8 * (i % 4)) & 0x7E0000
    else:  # one shift for two nibbles
        bits = shifted(words[0], 15 - 8 * (i % 4)) & (0x78000 if i < 4 else 0x780000)
    return (bits | one).to(tl.float32, bitcast=True)


@jit
def unit(i: tl.constexpr, TYPE: tl.constexpr):
    """Return the 2^p of `one_plus`."""
    if TYPE == Q5_K:
        return 32.0
    if TYPE == Q6_K:
        return 64.0
    return 16.0 if i % 8 >= 4 and (TYPE == Q4_K or TYPE == Q4_0) else 256.0


@jit
def weight(words, s, m, one, i: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the weight of column i of a chunk."""
    if TYPE == MXFP4:
        return (one_plus(words, one, i, TYPE) * 1.7014118346046923e38 * s).to(DTYPE)  # 2^127
    if TYPE == F8_E4M3:
        return (one_plus(words, one, i, TYPE) * s).to(DTYPE)
    scaled = unit(i, TYPE) * s
    return (one_plus(words, one, i, TYPE) * scaled - (scaled + m)).to(DTYPE)


@jit
def join_two(words, s, m, one, i: tl.constexpr, j: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    return tl.join(weight(words, s, m, one, i, TYPE, DTYPE), weight(words, s, m, one, j, TYPE, DTYPE))


@jit
def join_eight(words, s, m, one, i: tl.constexpr, step: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Return columns i + step * (0 .. 7) of a chunk as [..., bit 2, bit 1, bit 0] of the factor."""
    a = join_two(words, s, m, one, i, i + 4 * step, TYPE, DTYPE)
    b = join_two(words, s, m, one, i + 2 * step, i + 6 * step, TYPE, DTYPE)
    c = join_two(words, s, m, one, i + step, i + 5 * step, TYPE, DTYPE)
    d = join_two(words, s, m, one, i + 3 * step, i + 7 * step, TYPE, DTYPE)
    return tl.join(tl.join(a, b), tl.join(c, d))


@static
def fills_lanes(BK, BN, warps):
    """Whether each lane has a group of 32 columns of its own in a tile of the planes."""
    return 32 * warps <= BK // 32 * BN


@static
def runs_ahead(type_number, layout):
    """Whether a tile is dequantized one step before its products: it is, where the registers that this takes pay."""
    return layout == int(GpuLayout.PLANES) or (layout == int(GpuLayout.CPU_PACKED) and has_grid(type_number))


@static
def lane_rows(type_number, layout, BK, BN, warps):
    """Return how many neighbouring rows of a tile one lane reads; a guess at the compiler's choice, for speed alone."""
    if layout == int(GpuLayout.PLANES):
        chunk = 32 if fills_lanes(BK, BN, warps) else 8
        elements = BK // {int(QuantType.Q5_K): 32, int(QuantType.Q6_K): 16}.get(type_number, chunk) * BN
    elif layout == int(GpuLayout.CPU_PACKED):
        elements = (2 if has_grid(type_number) else 8) * BN
    else:
        return 1
    return max(1, min(4, elements // (32 * warps)))


@jit
def group_tile(base, k0, n, mask, one, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Load `packed_tile` of types with chunks of 8 columns, where a lane takes the four chunks that share their
    scales.
    """
    group = k0 // 32 + tl.arange(0, BK // 32)[:, None]
    if K % BK != 0:
        mask = mask & (group < K // 32)
    s, m = scales(base, group, n, mask, TYPE, K, N)
    a = join_eight(chunk_words(base, 4 * group, n, mask, TYPE, N), s, m, one, 0, 1, TYPE, DTYPE)
    b = join_eight(chunk_words(base, 4 * group + 1, n, mask, TYPE, N), s, m, one, 0, 1, TYPE, DTYPE)
    c = join_eight(chunk_words(base, 4 * group + 2, n, mask, TYPE, N), s, m, one, 0, 1, TYPE, DTYPE)
    d = join_eight(chunk_words(base, 4 * group + 3, n, mask, TYPE, N), s, m, one, 0, 1, TYPE, DTYPE)
    tile = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 5, 6, 2, 3, 4, 1))
    return tl.reshape(tile, (BK, n.shape[1]))


@jit
def packed_tile(base, k0, n, mask, one, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
                DTYPE: tl.constexpr):  # fmt: skip
    """Load columns k0 .. k0 + BK - 1 (k0, BK: multiples of 32) of the rows n [1, BN] -> [BK, BN] of DTYPE. mask: [1,
    BN].

    Values of a chunk are joined in registers, and the bits of their number moved to where columns are counted.
    """
    C: tl.constexpr = 32 if TYPE == Q5_K else 16 if TYPE == Q6_K else 8  # columns of a chunk
    chunk = k0 // C + tl.arange(0, BK // C)[:, None]
    if K % BK != 0:
        mask = mask & (chunk < K // C)
    words = chunk_words(base, chunk, n, mask, TYPE, N)
    s, m = scales(base, chunk // 4 if C == 8 else chunk, n, mask, TYPE, K, N)
    if C == 8:
        tile = tl.permute(join_eight(words, s, m, one, 0, 1, TYPE, DTYPE), (0, 2, 3, 4, 1))
    elif C == 16:
        even, odd = join_eight(words, s, m, one, 0, 2, TYPE, DTYPE), join_eight(words, s, m, one, 1, 2, TYPE, DTYPE)
        tile = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 5, 1))
    else:
        zero, one_ = join_eight(words, s, m, one, 0, 4, TYPE, DTYPE), join_eight(words, s, m, one, 1, 4, TYPE, DTYPE)
        two, three = join_eight(words, s, m, one, 2, 4, TYPE, DTYPE), join_eight(words, s, m, one, 3, 4, TYPE, DTYPE)
        tile = tl.permute(tl.join(tl.join(zero, two), tl.join(one_, three)), (0, 2, 3, 4, 5, 6, 1))
    return tl.reshape(tile, (BK, n.shape[1]))


@jit
def load_byte(pointer, mask):
    return tl.load(pointer, mask=mask, other=0).to(tl.int32)


@jit
def load_half(pointer, mask):
    """Load an fp16 at any even address."""
    return tl.load(pointer.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@jit
def raw_k(row, k, mask, TYPE: tl.constexpr):
    """Return element k of a Q4_K or Q5_K row, in the order of operations of gguf.quants."""
    size: tl.constexpr = 144 if TYPE == Q4_K else 176
    block = row + (k // 256) * size
    sub, i = k % 256 // 32, k % 32
    first = load_byte(block + 4 + sub, mask & (sub < 4)) & 63
    second = load_byte(block + 8 + sub, mask & (sub < 4)) & 63
    third = load_byte(block + 8 + sub, mask & (sub >= 4))
    sc = tl.where(sub < 4, first, (third & 15) | ((load_byte(block + sub, mask & (sub >= 4)) >> 6) << 4))
    mn = tl.where(sub < 4, second, (third >> 4) | ((load_byte(block + 4 + sub, mask & (sub >= 4)) >> 6) << 4))
    q = (load_byte(block + size - 128 + 32 * (sub // 2) + i, mask) >> (4 * (sub % 2))) & 15
    if TYPE == Q5_K:
        q += ((load_byte(block + 16 + i, mask) >> sub) & 1) << 4
    s = load_half(block, mask) * sc.to(tl.float32)
    return s * q.to(tl.float32) - load_half(block + 2, mask) * mn.to(tl.float32)


@jit
def raw_value(row, k, mask, TYPE: tl.constexpr):
    """Return element k of a row in ggml's layout, fp32. row, k, mask: of shapes that broadcast."""
    if TYPE == Q4_K or TYPE == Q5_K:
        return raw_k(row, k, mask, TYPE)
    if TYPE == Q6_K:
        block = row + (k // 256) * 210
        half, part, i = k % 256 // 128, k % 128 // 32, k % 32
        low = (load_byte(block + 64 * half + 32 * (part % 2) + i, mask) >> (4 * (part // 2))) & 15
        high = (load_byte(block + 128 + 32 * half + i, mask) >> (2 * part)) & 3
        sc = load_byte((block + 192 + k % 256 // 16).to(tl.pointer_type(tl.int8)), mask)
        return load_half(block + 208, mask) * sc.to(tl.float32) * ((low | (high << 4)) - 32).to(tl.float32)
    if TYPE == Q8_0:
        block8 = row + (k // 32) * 34
        q8 = load_byte((block8 + 2 + k % 32).to(tl.pointer_type(tl.int8)), mask)
        return load_half(block8, mask) * q8.to(tl.float32)
    if TYPE == MXFP4:
        block17 = row + (k // 32) * 17
        code = load_byte(block17 + 1 + k % 16, mask) >> (4 * (k % 32 // 16))
        return e2m1(code, 0) * e8m0(load_byte(block17, mask))
    block4 = row + (k // 32) * 18
    q4 = (load_byte(block4 + 2 + k % 16, mask) >> (4 * (k % 32 // 16))) & 15
    return load_half(block4, mask) * (q4 - 8).to(tl.float32)


@static
def raw_row_bytes(type_number, cols):
    """Return the bytes of a row in ggml's layout; 0 for weights in groups, which are not read in rows: the compiler
    visits this for other layouts, too.
    """
    for number, block, nbytes in _BLOCKS:
        if number == type_number:
            return cols // block * nbytes
    return 0


@jit
def weight_tile(base, k0, n, mask, one, tables, TYPE: tl.constexpr, LAYOUT: tl.constexpr, K: tl.constexpr,
                N: tl.constexpr,
                BK: tl.constexpr, DTYPE: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """Load columns k0 .. k0 + BK - 1 of the rows n [1, BN] as [BK, BN] of DTYPE; zero where masked or past K.

    base: uint8 pointer to the matrix. mask: [1, BN]. BK: a multiple of 32 (64 in the
    CPU's layout); k0 a multiple of BK. WARPS: of the program.
    """
    if LAYOUT == PLANES and TYPE != Q5_K and TYPE != Q6_K and fills_lanes(BK, n.shape[1], WARPS):
        return group_tile(base, k0, n, mask, one, TYPE, K, N, BK, DTYPE)
    if LAYOUT == PLANES:
        return packed_tile(base, k0, n, mask, one, TYPE, K, N, BK, DTYPE)
    if LAYOUT == TILES:
        return cpu_tile(base, k0, n, mask, one, tables, TYPE, K, DTYPE)
    k = k0 + tl.arange(0, BK)[:, None]
    if TYPE == F8_E4M3:
        byte = load_byte(base + n.to(tl.int64) * K + k, mask & (k < K))
        grid = (base + K * N).to(tl.pointer_type(tl.float32))
        s = tl.load(grid + n // 128 * ((K + 127) // 128) + k // 128, mask=mask & (k < K), other=0.0)
        return (one_plus((byte, byte, byte, byte, byte), one, 0, TYPE) * s).to(DTYPE)
    if TYPE == BF16 or TYPE == F16:
        values = base.to(tl.pointer_type(tl.bfloat16 if TYPE == BF16 else tl.float16))
        return tl.load(values + n.to(tl.int64) * K + k, mask=mask & (k < K), other=0.0).to(DTYPE)
    row = base + n.to(tl.int64) * raw_row_bytes(TYPE, K)
    return raw_value(row, k, mask & (k < K), TYPE).to(DTYPE)


@jit
def _dequantize_kernel(base, out, one, tables, TYPE: tl.constexpr, LAYOUT: tl.constexpr, K: tl.constexpr,
                       N: tl.constexpr,
                       BN: tl.constexpr):  # fmt: skip
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    mask = n < N
    k0 = tl.program_id(0) * 64
    tile = weight_tile(base, k0, n, mask, one, tables, TYPE, LAYOUT, K, N, 64, tl.float32, 4)
    k = k0 + tl.arange(0, 64)[:, None]
    tl.store(out + n.to(tl.int64) * K + k, tile.to(out.dtype.element_ty), mask=mask & (k < K))


def check_matrix(weight: Tensor, qtype: WeightType, rows: int, cols: int, layout: GpuLayout, matrices: int = 1) -> None:
    """Check the bytes of one matrix [rows, cols] or of many.

    Raises TypeError or ValueError that names what is wrong: type, dtype, size, strides, a matrix of 2 GiB or more.
    """
    if qtype not in READ_TYPES:
        names = ", ".join(sorted(t.name for t in READ_TYPES))
        raise ValueError(f"weight is {qtype.name}, which has no GPU kernel; transcode it to one of {names}")
    if weight.dtype != torch.uint8:
        raise TypeError(f"weight must be uint8, got {weight.dtype}")
    nbytes = layout_nbytes(qtype, rows, cols, layout)
    if weight.numel() != matrices * nbytes or not weight.is_contiguous():
        raise ValueError(
            f"weight must be {matrices} contiguous matrices of {nbytes} bytes, got {tuple(weight.shape)} "
            f"with strides {weight.stride()}"
        )
    if nbytes >= 2**31 or rows * cols >= 2**31:
        raise ValueError(f"a matrix [{rows}, {cols}] of {nbytes} bytes is too large for 32-bit offsets")


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """A matrix [rows, cols] of weights as the kernels read it. data: uint8 on their device, in `layout`.

    Raises TypeError or ValueError where the bytes do not agree with the rest.
    """

    data: Tensor
    qtype: WeightType
    rows: int
    cols: int
    layout: GpuLayout = GpuLayout.ROWS

    def __post_init__(self) -> None:
        check_matrix(self.data, self.qtype, self.rows, self.cols, self.layout)


def dequantize(matrix: WeightMatrix, out: Tensor | None = None) -> Tensor:
    """Return a matrix as numbers: [rows, cols], of `out`'s dtype (fp32, fp16 or bf16; fp32 when None).

    Equal to `gguf.quants.dequantize` up to one rounding of the output type (and
    |s| 2^-14 in the repacked forms: see above).
    """
    raw, rows, cols = matrix.data, matrix.rows, matrix.cols
    if out is None:
        out = torch.empty(rows, cols, dtype=torch.float32, device=raw.device)
    if out.shape != (rows, cols) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{rows}, {cols}], got {tuple(out.shape)}")
    if rows and cols:
        grid = (triton.cdiv(cols, 64), triton.cdiv(rows, 64))
        _dequantize_kernel[grid](
            raw, out, ONE, tables(raw.device), int(matrix.qtype), int(matrix.layout), cols, rows, BN=64, num_warps=4
        )
    return out
