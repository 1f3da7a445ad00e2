"""ggml matrices re-laid for the GPU, so that one thread reads the same words of neighbouring rows side by side.

The numbers stay the same, bit for bit. Rows run fastest in every plane, so a warp reads 512 contiguous bytes, no lane
needs another lane's scale, and the activations are the same for all lanes. Knows torch; does not know Triton. With
N rows and K columns, the planes of a matrix in their order:

    type   plane    dtype, shape          content
    Q4_K   quants   int32 [K / 8, N]      8 nibbles of columns 8 j .. 8 j + 7, the first lowest
           d        int32 [K / 256, N]    fp16 d (low half) and dmin
           scales   int16 [K / 32, N]     six-bit scale (low byte) and minimum
    Q5_K   quants   int32 [5 K / 32, N]   32 columns in 5 words: 6 of 5 bits in each, columns 30 and 31 in the top bits
           d, scales                      as Q4_K
    Q6_K   quants   int32 [3 K / 16, N]   16 columns in 3 words: 5 of 6 bits in each, column 15 in the top bits
           scales   int8 [K / 16, N]
           d        fp16 [K / 256, N]
    Q4_0   quants   int32 [K / 8, N]      nibbles
           d        fp16 [K / 32, N]
    Q8_0   quants   int32 [K / 4, N]      4 signed bytes
           d        fp16 [K / 32, N]
    MXFP4  quants   int32 [K / 8, N]      nibbles
           scales   uint8 [K / 32, N]     exponents

Q4_K grows by 4 bytes in 144, Q5_K by 4 in 176 (scales unpacked from six bits to eight), the others not at all.
N must be a multiple of 8, so that every plane begins at a multiple of 16 bytes and four rows are one aligned word.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ktransformers.kernels.cpu import packed_nbytes as cpu_packed_nbytes
from ktransformers.kernels.types import OwnType, QuantType, WeightType, block_size, fp8_nbytes, row_bytes

__all__ = [
    "GPU_TYPES",
    "READ_TYPES",
    "ROW_MULTIPLE",
    "Layout",
    "can_repack",
    "join_rows",
    "layout_nbytes",
    "packed_nbytes",
    "repack",
]

#: The block formats that the Triton kernels read; `repack` re-lays them.
GPU_TYPES = frozenset({QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q4_0, QuantType.MXFP4})

#: All types of matrices that they read.
READ_TYPES: frozenset[WeightType] = GPU_TYPES | {QuantType.BF16, QuantType.F16, OwnType.F8_E4M3}


class Layout(IntEnum):
    """How the bytes of a matrix lie: as in the file, as `repack` leaves them, or as `cpu.pack` does."""

    GGML = 0
    GPU = 1
    CPU = 2


ROW_MULTIPLE = 8
_PIECE = 1 << 22  # weights re-laid at once
_EXTRA = {QuantType.Q4_K: 4, QuantType.Q5_K: 4}


def can_repack(qtype: WeightType, rows: int, cols: int) -> bool:
    """Whether `repack` takes a matrix [rows, cols]; others are read in ggml's layout."""
    if isinstance(qtype, OwnType) or qtype not in GPU_TYPES:
        return False
    return rows % ROW_MULTIPLE == 0 and cols % block_size(qtype) == 0 and rows * cols > 0


def packed_nbytes(qtype: WeightType, rows: int, cols: int) -> int:
    """Bytes of a re-laid matrix [rows, cols]. Raises ValueError where `can_repack` is False."""
    if isinstance(qtype, OwnType) or not can_repack(qtype, rows, cols):
        raise ValueError(f"a {qtype.name} matrix [{rows}, {cols}] has no re-laid form")
    return rows * (row_bytes(qtype, cols) + cols // block_size(qtype) * _EXTRA.get(qtype, 0))


def layout_nbytes(qtype: WeightType, rows: int, cols: int, layout: Layout) -> int:
    """Bytes of a matrix [rows, cols] in a layout. Raises ValueError where it has no such form.

    FP8 in the GPU's layout or ggml's is what fp8.py makes: packed or not, codes and then scales.
    """
    if isinstance(qtype, OwnType):
        return cpu_packed_nbytes(qtype, rows, cols) if layout == Layout.CPU else fp8_nbytes(rows, cols)
    if layout == Layout.GPU:
        return packed_nbytes(qtype, rows, cols)
    nbytes = row_bytes(qtype, cols) * rows  # also checks the columns
    return cpu_packed_nbytes(qtype, rows, cols) if layout == Layout.CPU else nbytes


def _words(values: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] of `bits` significant bits -> uint8 [..., n * bits / 8], the first value lowest."""
    while bits < 8:
        values = values[..., 0::2] | (values[..., 1::2] << bits)
        bits *= 2
    return values


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of a Q4_K or Q5_K block -> scales and minima, uint8 [..., 8] each."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=-1)
    return scales, minima


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., G, n] -> [..., G * 2 * n]: of each group the low nibbles, then the high ones."""
    return torch.stack([packed & 15, packed >> 4], dim=-2).flatten(-3)


def _fields(values: Tensor, bits: int, per_word: int, top: tuple[tuple[int, int, int], ...]) -> Tensor:
    """uint8 [..., W * per_word + rest] -> the bytes of W int32 words, each with per_word values of `bits` bits.

    Bits 30 and 31 of word w hold bits of a value of the rest: top[w] = (which value, its first bit, mask).
    """
    count = len(top)
    wide = values[..., : count * per_word].unflatten(-1, (count, per_word)).to(torch.int32)
    shifts = torch.arange(per_word, dtype=torch.int32, device=values.device) * bits
    words: Tensor = (wide << shifts).sum(-1, dtype=torch.int32)
    for w, (value, right, mask) in enumerate(top):
        words[..., w] |= ((values[..., value].to(torch.int32) >> right) & mask) << 30
    return words


def _k_planes(blocks: Tensor, qtype: QuantType) -> list[tuple[Tensor, int]]:
    """Q4_K and Q5_K: blocks uint8 [E, N, B, size] -> planes as (bytes [E, N, B, n], element size)."""
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    values = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32)))
    if qtype == QuantType.Q5_K:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        bits = (blocks[..., None, 16:48] >> shifts) & 1
        values = (values | (bits.flatten(-2) << 4)).unflatten(-1, (8, 32))
        words = _fields(values, 5, 6, ((30, 0, 3), (30, 2, 3), (30, 4, 1), (31, 1, 3), (31, 3, 3)))
        words[..., 2] |= values[..., 31].to(torch.int32) << 31
        quants = words.view(torch.uint8).flatten(-2)
    else:
        quants = _words(values, 4)
    return [(quants, 4), (blocks[..., :4], 4), (torch.stack([scales, minima], dim=-1).flatten(-2), 2)]


def _q6_planes(blocks: Tensor) -> list[tuple[Tensor, int]]:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3) << 4
    values = (low | high.flatten(-3)).unflatten(-1, (16, 16))
    words = _fields(values, 6, 5, ((15, 0, 3), (15, 2, 3), (15, 4, 3)))
    return [(words.view(torch.uint8).flatten(-2), 4), (blocks[..., 192:208], 1), (blocks[..., 208:210], 2)]


def _planes(blocks: Tensor, qtype: QuantType) -> list[tuple[Tensor, int]]:
    if qtype in (QuantType.Q4_K, QuantType.Q5_K):
        return _k_planes(blocks, qtype)
    if qtype == QuantType.Q6_K:
        return _q6_planes(blocks)
    if qtype == QuantType.MXFP4:
        return [(_words(_nibbles(blocks[..., None, 1:]), 4), 4), (blocks[..., :1], 1)]
    quants = blocks[..., 2:]
    if qtype == QuantType.Q4_0:
        quants = _words(_nibbles(quants.unsqueeze(-2)), 4)
    return [(quants, 4), (blocks[..., :2], 2)]


def repack(raw: Tensor, qtype: QuantType, rows: int, cols: int) -> Tensor:
    """Re-lay a matrix, or many of one shape, on the device where it is.

    raw: uint8, [rows * row_bytes] or any shape of that many bytes, or [E, ...] with E times as many, in ggml's layout.
    Returns uint8 [packed_nbytes] or [E, packed_nbytes]. Works in pieces: needs about 200 MB beside the result.
    Raises ValueError for a size that does not fit or a matrix without a re-laid form.
    """
    nbytes = packed_nbytes(qtype, rows, cols)
    size = rows * row_bytes(qtype, cols)
    if raw.dtype != torch.uint8 or raw.numel() % size:
        raise ValueError(f"raw must be uint8 in whole matrices of {size} bytes, got {raw.dtype} {tuple(raw.shape)}")
    matrices = raw.numel() // size
    blocks = raw.reshape(matrices, rows, cols // block_size(qtype), -1)
    out = torch.empty(matrices, nbytes, dtype=torch.uint8, device=raw.device)
    some_matrices = max(1, _PIECE // (rows * cols))
    some_rows = max(1, _PIECE // cols)
    for first in range(0, matrices, some_matrices):
        for row in range(0, rows, some_rows):
            piece = blocks[first : first + some_matrices, row : row + some_rows]
            _write(piece, qtype, out[first : first + some_matrices], rows, row)
    return out[0] if matrices == 1 and raw.shape[0] != 1 else out


def _write(piece: Tensor, qtype: QuantType, out: Tensor, rows: int, row: int) -> None:
    """Re-lay rows [E, n, B, size], the first of which is number `row`, into out [E, packed_nbytes]."""
    count = piece.shape[1]
    at = 0
    for values, element in _planes(piece, qtype):
        units = values.shape[2] * values.shape[3] // element
        nbytes = units * rows * element
        plane = out[:, at : at + nbytes].unflatten(1, (units, rows, element))
        plane[:, :, row : row + count] = values.reshape(len(out), count, units, element).transpose(1, 2)
        at += nbytes


#: Of each type's planes: columns that one element stands for, and bytes of an element.
_PLANES = {
    QuantType.Q4_K: ((8, 4), (256, 4), (32, 2)),
    QuantType.Q5_K: ((32, 20), (256, 4), (32, 2)),
    QuantType.Q6_K: ((16, 12), (16, 1), (256, 2)),
    QuantType.Q4_0: ((8, 4), (32, 2)),
    QuantType.Q8_0: ((4, 4), (32, 2)),
    QuantType.MXFP4: ((8, 4), (32, 1)),
}


def join_rows(parts: list[tuple[Tensor, int]], qtype: QuantType, cols: int, *, interleaved: bool = False) -> Tensor:
    """Re-laid matrices of one type as one with all their rows, one part after another.

    parts: (what `repack` gave, its rows). interleaved: parts of one size take turns, row by row. Raises ValueError for
    sizes that do not fit.
    """
    counts = [rows for _, rows in parts]
    for data, rows in parts:
        if data.numel() != packed_nbytes(qtype, rows, cols) or (interleaved and rows != counts[0]):
            raise ValueError(f"{data.numel()} bytes are not {rows} rows of {cols} columns of {qtype.name}")
    planes, at = [], [0] * len(parts)
    for columns, element in _PLANES[qtype]:
        # Elements of several words are planes of words, one after another: [units, words, rows].
        words, size = (element // 4, 4) if element > 4 else (1, element)
        units = cols // columns * words
        pieces = []
        for i, (data, rows) in enumerate(parts):
            pieces.append(data[at[i] : at[i] + units * rows * size].view(units, rows, size))
            at[i] += units * rows * size
        joined = torch.stack(pieces, dim=2).flatten(1, 2) if interleaved else torch.cat(pieces, dim=1)
        planes.append(joined.reshape(-1))
    return torch.cat(planes)
