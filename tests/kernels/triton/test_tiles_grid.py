"""Tiles of IQ1, IQ2 and IQ3 as a GPU reads them, against gguf.quants."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton import runtime
from ktransformers.kernels.types import QuantType
from tests.support.triton_kernels.quant_cases import pack_for_cpu, random_matrix

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ktransformers.kernels.cpu import grid_values
from ktransformers.kernels.triton.runtime import jit, tl
from ktransformers.kernels.triton.tables import tables
from ktransformers.kernels.triton.tiles_grid import GRID_TYPES, grid_tile

TYPES = sorted(GRID_TYPES, key=lambda qtype: qtype.name)


@jit
def read_tiles(base, out, table, TYPE: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    k0 = tl.program_id(0) * 64
    tile = grid_tile(base, k0, n, n < N, table, TYPE, K, out.dtype.element_ty)
    tl.store(out + n * K + k0 + tl.arange(0, 64)[:, None], tile, mask=n < N)


def read(packed, qtype, rows, cols, dtype):
    out = torch.full((rows, cols), 7.0, dtype=dtype, device=packed.device)
    read_tiles[(cols // 64, -(-rows // 32))](packed, out, tables(packed.device), int(qtype), cols, rows, BN=32)
    return out.cpu()


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_numbers_are_those_of_the_file(qtype, device):
    """Two tiles and a part of a third; every product has fewer bits than fp32, whatever their order."""
    raw, values = random_matrix(qtype, 37, 768)
    packed = pack_for_cpu(raw, qtype, 37, 768).to(device)
    assert torch.equal(read(packed, qtype, 37, 768, torch.float32), values)
    assert (read(packed, qtype, 37, 768, torch.float16) - values).abs().max() <= 2**-11 * values.abs().max()


def test_tables_hold_all_entries(device):
    """6 bits of a value, of IQ1 2 bits of it plus one; the first column is the lowest."""
    table = tables(device).cpu()
    for qtype, at, dtype in ((QuantType.IQ2_S, 6144, torch.int64), (QuantType.IQ3_S, 15360, torch.int32)):
        values = torch.from_numpy(grid_values(qtype)).long()
        packed = table[at : at + len(values) * dtype.itemsize].view(dtype).long()
        for column in range(values.shape[1]):
            assert torch.equal(packed >> (6 * column + 8 * (column // 4)) & 63, values[:, column])
    trits = table[17408:].view(torch.int16).long()
    ones = torch.from_numpy(grid_values(QuantType.IQ1_S)).long()
    assert trits.shape == (2048,)
    assert all(torch.equal((trits >> (2 * c) & 3) * 8 - 8, ones[:, c]) for c in range(8))
    assert tables(device) is tables(device)
