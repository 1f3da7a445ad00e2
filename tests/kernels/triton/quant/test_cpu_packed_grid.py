"""Tiles of IQ1, IQ2 and IQ3 as a GPU reads them, against gguf.quants."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.types import QuantType
from tests.support.triton_kernels.quant_cases import GRID_TYPES, pack_for_cpu, random_matrix

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ktransformers.kernels.cpu import grid_values
from ktransformers.kernels.triton.common.runtime import jit, tl
from ktransformers.kernels.triton.linear.grid import grid_gemv, grid_pair
from ktransformers.kernels.triton.quant.cpu_packed_grid import grid_tile
from ktransformers.kernels.triton.quant.tables import tables

TYPES = list(GRID_TYPES)


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


@jit
def multiply(x, stride, base, second, out, table, first, last, TYPE: tl.constexpr, SECOND: tl.constexpr,
             K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """Rows 0 to M - 1 by `grid_gemv`, then two of the first row by `grid_pair`."""
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    n, mask = at[None, :], at < N
    live = mask[None, :]
    r0, r1, r2, r3 = grid_gemv(x, stride, base, n, live, table, first, last, TYPE, K, KS, M)
    g, u = grid_pair(x, base, second, n, live, table, first, last, TYPE, SECOND, K, KS)
    tl.store(out + at, r0, mask=mask)
    tl.store(out + N + at, r1, mask=mask)
    tl.store(out + 2 * N + at, r2, mask=mask)
    tl.store(out + 3 * N + at, r3, mask=mask)
    tl.store(out + 4 * N + at, g, mask=mask)
    tl.store(out + 5 * N + at, u, mask=mask)


@pytest.mark.every(3)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_numbers_are_those_of_the_file(qtype, device):
    """A tile and a part of another; every product has fewer bits than fp32, whatever their order."""
    raw, values = random_matrix(qtype, 20, 512)
    packed = pack_for_cpu(raw, qtype, 20, 512).to(device)
    assert torch.equal(read(packed, qtype, 20, 512, torch.float32), values)
    assert (read(packed, qtype, 20, 512, torch.float16) - values).abs().max() <= 2**-11 * values.abs().max()


@pytest.mark.every(3)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_products_with_few_rows(qtype, device):
    """Steps that end within K, and a last row that is no tile's; beside another type in the same loop."""
    rows, cols, tokens, other = 21, 768, 1 + TYPES.index(qtype) % 4, TYPES[TYPES.index(qtype) - 1]
    raw, values = random_matrix(qtype, rows, cols)
    raw_other, others = random_matrix(other, rows, cols, seed=1)
    packed = [pack_for_cpu(raw, qtype, rows, cols), pack_for_cpu(raw_other, other, rows, cols)]
    dtype = torch.float16 if tokens % 2 else torch.bfloat16
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.full((6, rows), 7.0, device=device)
    first, second = (data.to(device) for data in packed)
    given = x.to(device), x.stride(0), first, second, out, tables(device)
    multiply[(2,)](*given, 0, 2, int(qtype), int(other), cols, rows, BN=16, KS=16, M=tokens)
    # In fp32, whatever the order: each of a sum's terms is off by at most 2^-23 of all of them for every addition.
    exact, size = x.double() @ values.double().T, x.abs().double() @ values.abs().double().T
    assert ((out[:tokens].cpu() - exact).abs() <= cols * 2**-23 * size).all()
    assert (out[tokens:4] == 0).all()
    assert torch.equal(out[4], out[0])
    exact, size = x[0].double() @ others.double().T, x[0].abs().double() @ others.abs().double().T
    assert ((out[5].cpu() - exact).abs() <= cols * 2**-23 * size).all()


def test_tables_hold_all_entries(device):
    """6 bits of a value, of IQ1 2 bits of it plus one; the first column is the lowest."""
    table = tables(device).cpu().view(torch.uint8)
    for qtype, at, dtype in ((QuantType.IQ2_S, 6144, torch.int64), (QuantType.IQ3_S, 15360, torch.int32)):
        values = torch.from_numpy(grid_values(qtype)).long()
        packed = table[at : at + len(values) * dtype.itemsize].view(dtype).long()
        for column in range(values.shape[1]):
            assert torch.equal(packed >> (6 * column + 8 * (column // 4)) & 63, values[:, column])
    trits = table[17408:21504].view(torch.int16).long()
    ones = torch.from_numpy(grid_values(QuantType.IQ1_S)).long()
    assert trits.shape == (2048,)
    assert all(torch.equal((trits >> (2 * c) & 3) * 8 - 8, ones[:, c]) for c in range(8))
    assert tables(device) is tables(device)


RANKS = {"IQ2_XXS": 5376, "IQ2_XS": 5632, "IQ2_S": 6144, "IQ1_S": 7936}
BYTES = {"IQ3_XXS": 7168, "IQ3_S": 7424}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_and_values_are_those_of_the_grid(name, device):
    """A nibble of a code's word names a byte of the type's values, of which each word is there 8 times."""
    table = tables(device).cpu()
    grid = torch.from_numpy(grid_values(QuantType[name])).int()
    at = 10000 if name == "IQ1_S" else 9984
    words = table[at : at + 16].view(2, 8)
    assert (words == words[:, :1]).all()
    values = words[:, 0].contiguous().view(torch.int8).int()
    packed = table[RANKS[name] :][: len(grid)]
    for column in range(grid.shape[1]):
        rank = packed >> (8 * (column % 4) + 4 * (column // 4)) & 7
        if name == "IQ1_S":
            assert torch.equal(values[rank], grid[:, column] + 1)
            assert torch.equal(values[rank + 4], grid[:, column] - 1)
        else:
            assert torch.equal(values[rank], grid[:, column])
            assert torch.equal(values[rank + 4], -grid[:, column])


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_the_grid(name, device):
    """A code's word has its values, whose signs are computed."""
    table, grid = tables(device).cpu(), torch.from_numpy(grid_values(QuantType[name])).int()
    values = table[BYTES[name] :][: len(grid)].contiguous().view(torch.int8).view(-1, 4).int()
    assert torch.equal(values, grid)
    assert values.min() > 0  # so that of no byte both signs are one number
