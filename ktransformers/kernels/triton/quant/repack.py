"""ggml matrices repacked for the GPU, so that one thread reads the same words of neighbouring rows side by side.

The numbers stay the same, bit for bit. Rows run fastest in every plane, so a warp reads 512 contiguous bytes, no lane
needs another lane's scale, and the activations are the same for all lanes. Knows torch; does not know Triton. With
N rows and K columns, the planes of a matrix in their order:

    type   plane    dtype, shape          content
    Q4_K   quants   int32 [K / 8, N]      low nibbles of bytes: columns 8 j .. 8 j + 3, high ones: 8 j + 4 .. 8 j + 7
           d        int32 [K / 256, N]    fp16 d (low half) and dmin
           scales   int16 [K / 32, N]     six-bit scale (low byte) and minimum
    Q5_K   quants   int32 [5 K / 32, N]   32 columns in 5 words: 4 of nibbles, and bit g of byte p is bit 4 of column
                                          4 g + p
           d, scales                      as Q4_K
    Q6_K   quants   int32 [3 K / 16, N]   16 columns in 3 words: 4 bytes of 6 bits in each, columns 12 .. 15 in the top
                                          bits of the bytes, the lowest two bits in the first word
           scales   int8 [K / 16, N]
           d        fp16 [K / 256, N]
    Q4_0   quants   int32 [K / 8, N]      nibbles, as Q4_K
           d        fp16 [K / 32, N]
    Q8_0   quants   int32 [K / 4, N]      4 signed bytes
           d        fp16 [K / 32, N]
    MXFP4  quants   int32 [K / 8, N]      nibbles, as Q4_K
           scales   uint8 [K / 32, N]     exponents
    FP8    quants   int32 [K / 4, N]      4 codes
           scales   fp32 [K / 128, N / 128], rounded up

Q4_K grows by 4 bytes in 144, Q5_K by 4 in 176 (scales unpacked from six bits to eight), the others not at all.
N must be a multiple of 8, so that every plane begins at a multiple of 16 bytes and four rows are one aligned word.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ktransformers.kernels.cpu import packed_nbytes
from ktransformers.kernels.triton.quant.cpu_packed_codes import CODE_TYPES
from ktransformers.kernels.triton.quant.cpu_packed_grid import GRID_TYPES
from ktransformers.kernels.types import (
    FP8_BLOCK,
    Fp8Matrix,
    GroupType,
    OwnType,
    QuantType,
    WeightType,
    block_size,
    fp8_nbytes,
    row_bytes,
)

__all__ = [
    "CPU_PACKED_TYPES",
    "FP8_COLUMNS",
    "GPU_TYPES",
    "READ_TYPES",
    "ROW_MULTIPLE",
    "GpuLayout",
    "can_join_rows",
    "can_repack",
    "has_gemv",
    "join_rows",
    "layout_nbytes",
    "repack",
    "repack_fp8",
    "repacked_nbytes",
]

#: The block formats that the Triton kernels read; `repack` repacks them.
GPU_TYPES = frozenset({QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q4_0, QuantType.MXFP4})

#: The block formats that they read from the tiles of the CPU's kernels alone (cpu_packed_codes.py, cpu_packed_grid.py).
CPU_PACKED_TYPES: frozenset[WeightType] = frozenset(GroupType) | frozenset(
    QuantType(number) for number in (*CODE_TYPES, *GRID_TYPES)
)

#: All types of matrices that they read.
READ_TYPES: frozenset[WeightType] = GPU_TYPES | CPU_PACKED_TYPES | {QuantType.BF16, QuantType.F16, OwnType.F8_E4M3}


class GpuLayout(IntEnum):
    """Layouts of a matrix that a GPU reads: as in the file, as `repack` leaves it, or as `cpu.pack` does.

    FP8 in rows is codes and then scales.
    """

    ROWS = 0
    PLANES = 1
    CPU_PACKED = 2


ROW_MULTIPLE = 8
FP8_COLUMNS = 32
"""What the columns of an FP8 matrix must be a multiple of."""
_PIECE = 1 << 22  # weights repacked at once
_EXTRA = {QuantType.Q4_K: 4, QuantType.Q5_K: 4}


def can_repack(qtype: WeightType, rows: int, cols: int) -> bool:
    """Whether a matrix [rows, cols] can be repacked; others are read in rows."""
    if not isinstance(qtype, OwnType) and qtype not in GPU_TYPES:
        return False
    unit = FP8_COLUMNS if isinstance(qtype, OwnType) else block_size(qtype)
    return rows % ROW_MULTIPLE == 0 and cols % unit == 0 and rows * cols > 0


def has_gemv(type_number: int, layout: GpuLayout) -> bool:
    """Whether few rows are multiplied with a matrix as it streams from memory, not through tensor cores."""
    return layout == GpuLayout.PLANES or (layout == GpuLayout.CPU_PACKED and type_number in CPU_PACKED_TYPES)


def repacked_nbytes(qtype: WeightType, rows: int, cols: int) -> int:
    """Return the bytes of a repacked matrix [rows, cols]. Raises ValueError where `can_repack` is False."""
    if not can_repack(qtype, rows, cols):
        raise ValueError(f"a {qtype.name} matrix [{rows}, {cols}] has no repacked form")
    if isinstance(qtype, OwnType):
        return fp8_nbytes(rows, cols)
    return rows * (row_bytes(qtype, cols) + cols // block_size(qtype) * _EXTRA.get(qtype, 0))


def layout_nbytes(qtype: WeightType, rows: int, cols: int, layout: GpuLayout) -> int:
    """Return the bytes of a matrix [rows, cols] in a layout. Raises ValueError where it has no such form."""
    if layout == GpuLayout.PLANES:
        return repacked_nbytes(qtype, rows, cols)
    if layout == GpuLayout.ROWS and qtype in CPU_PACKED_TYPES:
        raise ValueError(f"a {qtype.name} matrix is read by a GPU in the CPU's tiles alone: pack it first")
    # Also checks the columns.
    nbytes = fp8_nbytes(rows, cols) if isinstance(qtype, OwnType) else row_bytes(qtype, cols) * rows
    return packed_nbytes(qtype, rows, cols) if layout == GpuLayout.CPU_PACKED else nbytes


def _nibble_words(values: Tensor) -> Tensor:
    """uint8 [..., n] of four significant bits -> the bytes of n / 8 words: values 0-3 in low nibbles, 4-7 in high."""
    eights = values.unflatten(-1, (-1, 2, 4))
    return (eights[..., 0, :] | (eights[..., 1, :] << 4)).flatten(-2)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of a Q4_K or Q5_K block -> scales and minima, uint8 [..., 8] each."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=-1)
    return scales, minima


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., G, n] -> [..., G * 2 * n]: of each group the low nibbles, then the high ones."""
    return torch.stack([packed & 15, packed >> 4], dim=-2).flatten(-3)


def _k_planes(blocks: Tensor, qtype: QuantType) -> list[tuple[Tensor, int]]:
    """Q4_K and Q5_K: blocks uint8 [E, N, B, size] -> planes as (bytes [E, N, B, n], element size)."""
    scales, minima = _six_bit_scales(blocks[..., 4:16])
    values = _nibbles(blocks[..., -128:].unflatten(-1, (4, 32)))
    if qtype == QuantType.Q5_K:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        bits = ((blocks[..., None, 16:48] >> shifts) & 1).unflatten(-1, (8, 4))  # [..., 8 groups, g, p]
        upper = (bits << shifts).sum(-2, dtype=torch.uint8)
        quants = torch.cat([_nibble_words(values.unflatten(-1, (8, 32))), upper], dim=-1).flatten(-2)
    else:
        quants = _nibble_words(values)
    return [(quants, 4), (blocks[..., :4], 4), (torch.stack([scales, minima], dim=-1).flatten(-2), 2)]


def _q6_planes(blocks: Tensor) -> list[tuple[Tensor, int]]:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = 2 * torch.arange(4, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3) << 4
    values = (low | high.flatten(-3)).unflatten(-1, (16, 16))
    pieces = (values[..., None, 12:] >> shifts[:3]) & 3  # of columns 12 to 15: [..., 16 chunks, 3, 4]
    quants = values[..., :12].unflatten(-1, (3, 4)) | (pieces << 6)
    return [(quants.flatten(-3), 4), (blocks[..., 192:208], 1), (blocks[..., 208:210], 2)]


def _planes(blocks: Tensor, qtype: QuantType) -> list[tuple[Tensor, int]]:
    if qtype in (QuantType.Q4_K, QuantType.Q5_K):
        return _k_planes(blocks, qtype)
    if qtype == QuantType.Q6_K:
        return _q6_planes(blocks)
    if qtype == QuantType.MXFP4:
        return [(_nibble_words(_nibbles(blocks[..., None, 1:])), 4), (blocks[..., :1], 1)]
    quants = blocks[..., 2:]
    if qtype == QuantType.Q4_0:
        quants = _nibble_words(_nibbles(quants.unsqueeze(-2)))
    return [(quants, 4), (blocks[..., :2], 2)]


def repack(raw: Tensor, qtype: QuantType, rows: int, cols: int) -> Tensor:
    """Repack a matrix, or many of one shape, on the device where it is.

    raw: uint8, [rows * row_bytes] or any shape of that many bytes, or [E, ...] with E times as many, in ggml's layout.
    Returns uint8 [repacked_nbytes] or [E, repacked_nbytes]. Works in pieces: needs about 200 MB beside the result.
    Raises ValueError for a size that does not fit or a matrix without a repacked form.
    """
    nbytes = repacked_nbytes(qtype, rows, cols)
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
    """Repack rows [E, n, B, size], the first of which is number `row`, into out [E, repacked_nbytes]."""
    count = piece.shape[1]
    at = 0
    for values, element in _planes(piece, qtype):
        units = values.shape[2] * values.shape[3] // element
        nbytes = units * rows * element
        plane = out[:, at : at + nbytes].unflatten(1, (units, rows, element))
        plane[:, :, row : row + count] = values.reshape(len(out), count, units, element).transpose(1, 2)
        at += nbytes


def repack_fp8(weight: Fp8Matrix) -> Tensor:
    """Repack an FP8 matrix on its device, K a multiple of 32; rows, then scales, where `can_repack` says no.

    Weights must be finite: e4m3's NaN is read as 480. Raises ValueError for a matrix that does not fit.
    """
    rows, cols = weight.shape
    if cols % FP8_COLUMNS or weight.nbytes >= 2**31:
        raise ValueError(f"an FP8 matrix [{rows}, {cols}] needs columns in {FP8_COLUMNS}s and less than 2 GiB")
    values, scales = weight.values, weight.scales
    if can_repack(weight.qtype, rows, cols):
        values, scales = values.reshape(rows, cols // 4, 4).transpose(0, 1), scales.T
    return torch.cat([values.reshape(-1), scales.reshape(-1).view(torch.uint8)])


#: Of each type's planes: columns that one element stands for, bytes of an element, and rows that it stands for.
_PLANES: dict[WeightType, tuple[tuple[int, int, int], ...]] = {
    QuantType.Q4_K: ((8, 4, 1), (256, 4, 1), (32, 2, 1)),
    QuantType.Q5_K: ((32, 20, 1), (256, 4, 1), (32, 2, 1)),
    QuantType.Q6_K: ((16, 12, 1), (16, 1, 1), (256, 2, 1)),
    QuantType.Q4_0: ((8, 4, 1), (32, 2, 1)),
    QuantType.Q8_0: ((4, 4, 1), (32, 2, 1)),
    QuantType.MXFP4: ((8, 4, 1), (32, 1, 1)),
    OwnType.F8_E4M3: ((4, 4, 1), (FP8_BLOCK, 4, FP8_BLOCK)),
}


def can_join_rows(qtype: WeightType, counts: Sequence[int], cols: int) -> bool:
    """Whether repacked matrices of so many rows can become one: no block of scales may lie across two of them."""
    if isinstance(qtype, QuantType):
        return True
    return all(rows % FP8_BLOCK == 0 for rows in counts[:-1]) and fp8_nbytes(sum(counts), cols) < 2**31


def join_rows(parts: list[tuple[Tensor, int]], qtype: WeightType, cols: int, *, interleaved: bool = False) -> Tensor:
    """Join repacked matrices of one type into one with all their rows, one part after another.

    parts: (what `repack` gave, its rows). interleaved: parts of one size take turns, row by row; not FP8. Raises
    ValueError for sizes that do not fit.
    """
    counts = [rows for _, rows in parts]
    for data, rows in parts:
        if data.numel() != repacked_nbytes(qtype, rows, cols) or (interleaved and rows != counts[0]):
            raise ValueError(f"{data.numel()} bytes are not {rows} rows of {cols} columns of {qtype.name}")
    if not can_join_rows(qtype, counts, cols) or (interleaved and isinstance(qtype, OwnType)):
        raise ValueError(f"{qtype.name} matrices of {counts} rows cannot be joined")
    planes, at = [], [0] * len(parts)
    for columns, element, share in _PLANES[qtype]:
        # Elements of several words are planes of words, one after another: [units, words, rows].
        words, size = (element // 4, 4) if element > 4 else (1, element)
        units = -(-cols // columns) * words
        pieces = []
        for i, (data, rows) in enumerate(parts):
            nbytes = units * -(-rows // share) * size
            pieces.append(data[at[i] : at[i] + nbytes].view(units, -1, size))
            at[i] += nbytes
        joined = torch.stack(pieces, dim=2).flatten(1, 2) if interleaved else torch.cat(pieces, dim=1)
        planes.append(joined.reshape(-1))
    return torch.cat(planes)
