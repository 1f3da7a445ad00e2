"""Random matrices in ggml's block formats and their values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ktransformers.kernels.blocks import decode_blocks
from ktransformers.kernels.cpu import PACKED_TYPES, Isa, WorkerPool, available_isas, has_bf16, pack, pack_fp8
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.reference import dequantize
from ktransformers.kernels.triton.quant import cpu_packed_grid as grid
from ktransformers.kernels.triton.quant.repack import GPU_TYPES
from ktransformers.kernels.types import Fp8Matrix, GroupType, QuantType, RawTensor, row_bytes, type_size
from tests.support.checks.decoding import parts_of_rows, set_row_scales
from tests.support.models.group_blocks import random_blocks

TYPES = tuple(sorted(GPU_TYPES))
"""Types that are repacked into planes."""
GRID_TYPES = tuple(QuantType(number) for number in sorted(grid.GRID_TYPES))
"""Types whose codes are looked up in a grid."""
TILE_TYPES = tuple(sorted(PACKED_TYPES - GPU_TYPES - set(GRID_TYPES)))
"""The others that are read from the tiles of the CPU's kernels alone."""
FLOATS = (QuantType.BF16, QuantType.F16)


def random_matrix(qtype: QuantType, rows: int, cols: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random bits with sane scales of both signs: uint8 [rows, row_bytes] and its values, fp32 [rows, cols].

    Of a type of floats: random numbers.
    """
    rng = np.random.default_rng([seed, int(qtype), rows, cols])
    if qtype in FLOATS:
        dtype = torch.bfloat16 if qtype is QuantType.BF16 else torch.float16
        held = torch.from_numpy(rng.standard_normal((rows, cols)) / 8).to(dtype)
        return held.view(torch.uint8), held.float()
    raw = rng.integers(0, 256, (rows, row_bytes(qtype, cols)), dtype=np.uint8)
    heads, by_row = parts_of_rows(raw, qtype)
    set_row_scales(heads, rng.uniform(1e-3, 1e-2, rows) * rng.choice([-1, 1], rows))
    blocks = by_row.reshape(-1, type_size(qtype))  # a view, where there is something to set
    for at in FORMATS[qtype].halves:
        scale = rng.uniform(1e-3, 1e-2, len(blocks)) * rng.choice([-1, 1], len(blocks))
        blocks[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if qtype == QuantType.MXFP4:
        blocks[:, 0] = rng.integers(118, 121, len(blocks))  # 2^-9 to 2^-7
    if qtype == QuantType.IQ1_M:  # four bits each of d in the highest of bytes 49, 51, 53, 55
        scale = rng.uniform(1e-3, 1e-2, len(blocks)).astype(np.float16).view(np.uint16)
        for i in range(4):
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 15) | ((scale >> (4 * i) & 15) << 4).astype(np.uint8)
    if qtype == QuantType.NVFP4:
        blocks[:, :4] = rng.integers(16, 25, (len(blocks), 4))  # 2^-5 to 2^-4
    return torch.from_numpy(raw), torch.from_numpy(decode_blocks(raw, qtype))


def random_tile_type(qtype: QuantType | GroupType, rows: int, cols: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`random_matrix`, of weights in groups too, as the CPU's tiles: uint8 1-D and the values."""
    if isinstance(qtype, QuantType):
        raw, values = random_matrix(qtype, rows, cols, seed)
        return pack_for_cpu(raw, qtype, rows, cols), values
    matrix = random_blocks(qtype, rows, cols, seed)
    return pack_for_cpu(matrix.data, qtype, rows, cols), dequantize(matrix)


def pack_for_cpu(raw: Tensor, qtype: QuantType | GroupType, rows: int, cols: int) -> Tensor:
    """A matrix as the CPU kernels repack it, uint8 1-D; BF16 on a tier that packs it, emulated if need be."""
    isa = None
    if qtype is QuantType.BF16:
        isa = next((one for one in available_isas() if has_bf16(one)), Isa.AVX512_BF16_EMULATED)
    pool = WorkerPool(1, isa)
    try:
        return pack(RawTensor(raw.contiguous().reshape(-1), qtype, (rows, cols)), pool).data
    finally:
        pool.close()


def random_fp8(rows: int, cols: int, seed: int = 0) -> tuple[Fp8Matrix, Tensor]:
    """All codes but NaN under scales of both signs, and the values, fp32 [rows, cols]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 254, (rows, cols), dtype=torch.uint8, generator=generator)
    codes += (codes >= 127).to(torch.uint8)
    scales = (torch.rand(-(-rows // 128), -(-cols // 128), generator=generator) - 0.5) / 100
    matrix = Fp8Matrix(codes, scales)
    return matrix, dequantize(matrix)


def pack_fp8_for_cpu(matrix: Fp8Matrix) -> Tensor:
    """As the CPU kernels repack it, uint8 1-D."""
    pool = WorkerPool(1)
    try:
        return pack_fp8(matrix, pool).data
    finally:
        pool.close()
