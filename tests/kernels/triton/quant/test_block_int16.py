"""Activations as block-wise int16, operations on bytes, and products of block-wise int16 with weights that are looked
up.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.types import QuantType
from tests.support.triton_kernels.quant_cases import GRID_TYPES, pack_for_cpu, random_matrix

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ktransformers.kernels.triton.common.byte_ops import dot_signed, dot_unsigned, permute_bytes
from ktransformers.kernels.triton.common.runtime import jit, tl
from ktransformers.kernels.triton.linear.block_int16_gemv import (
    block_int16_gemv,
    digit_pair,
    has_block_int16,
    is_strided,
)
from ktransformers.kernels.triton.linear.planes import is_plane_type, plane_gemv, plane_pair
from ktransformers.kernels.triton.quant.block_int16 import PairOrder, block_int16_shape, quantize_block_int16
from ktransformers.kernels.triton.quant.repack import repack
from ktransformers.kernels.triton.quant.tables import tables

NIBBLES = [QuantType.IQ4_XS, QuantType.IQ4_NL]
TYPES = [*GRID_TYPES, *NIBBLES]
THREES = [QuantType.IQ3_XXS, QuantType.IQ3_S]
PLANES = [QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q4_0, QuantType.Q8_0, QuantType.MXFP4]
STRIDED = [qtype for qtype in GRID_TYPES if qtype not in THREES]


@jit
def operate(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)[:, None]
    first, second = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, permute_bytes(first, second, 0x6130))
    tl.store(out + N + i, permute_bytes(first, second, first & 0x77777777))
    tl.store(out + 2 * N + i, dot_signed(first, second, first))
    tl.store(out + 3 * N + i, dot_unsigned(first, second, second))


def test_bytes(device):
    a, b = torch.randint(-(2**31), 2**31, (2, 64), generator=torch.Generator().manual_seed(0)).int()
    out = torch.empty(4, 64, dtype=torch.int32, device=device)
    operate[(1,)](a.to(device), b.to(device), out, N=64)
    first, second = (t.numpy().view(np.uint8).reshape(64, 4) for t in (a, b))
    both = np.concatenate([first, second], axis=1)
    got = out.cpu().numpy()
    assert (got[0].view(np.uint8).reshape(64, 4) == both[:, [0, 3, 1, 6]]).all()
    chosen = np.stack([a.numpy() >> (4 * i) & 7 for i in range(4)], axis=1)
    assert (got[1].view(np.uint8).reshape(64, 4) == np.take_along_axis(both, chosen, axis=1)).all()
    signed, other = first.view(np.int8).astype(np.int64), second.view(np.int8).astype(np.int64)
    assert (got[2] == ((signed * other).sum(1) + a.numpy()).astype(np.int32)).all()
    assert (got[3] == ((signed * second).sum(1) + b.numpy()).astype(np.int32)).all()


def block_int16_of(x, strided):
    return quantize_block_int16(
        x, torch.empty(block_int16_shape(*x.shape), dtype=torch.int32, device=x.device), strided
    )


def numbers(block_int16, strided):
    """What block-wise int16 stand for, fp64 [T, K]."""
    words = block_int16.cpu()
    planes = words[..., :16].contiguous().view(torch.uint8).view(*words.shape[:2], 2, 32).long()
    q = planes[..., 0, :] + 256 * planes[..., 1, :].to(torch.int8).long()
    if strided:
        q = q.view(*q.shape[:2], 2, 4, 4).transpose(-1, -2).reshape(q.shape)
    return (q.double() * words[..., 16:17].contiguous().view(torch.float32).double()).flatten(1)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("dtype", "lowest"), [(torch.bfloat16, -7), (torch.float16, -4)])
def test_block_int16_are_the_numbers(dtype, lowest, strided, device):
    """Exactly, if none is further below the largest of its block than the module says; blocks differ in size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 288, generator=generator) + 1
    x *= 2.0 ** torch.randint(lowest, 0, x.shape, generator=generator)
    x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    x[:, ::32] = 2 - 2**-7  # the largest magnitude has its highest bit where lowest + 7 or 4 bits are left
    x[1, 32:64], x[2, 64:96] = 0, -x[2, 64:96]
    x = (x * 2.0 ** torch.arange(-4, 5).repeat_interleave(32)).to(dtype)
    assert torch.equal(numbers(block_int16_of(x.to(device), strided), strided), x.double())


def test_block_int16_of_other_numbers(device):
    """fp32 is rounded; too small a block is zero; one that is not finite has no number at all."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = -(2 - 2**-23)  # rounds up to what q cannot be
    x[0, 1] = 2 - 2**-23
    x[1] *= 1e-37
    x[2, 5], x[3, 40] = torch.inf, torch.nan
    got = numbers(block_int16_of(x.to(device), False), False).view(4, 2, 32)
    wide = x.double().view(4, 2, 32)
    largest = wide[0].abs().amax(-1, keepdim=True)
    assert ((got[0] - wide[0]).abs() <= 2.0**-14 * largest).all()
    assert got[1].abs().max() <= 1e-35
    assert got[2, 0].isnan().all()
    assert got[3, 1].isnan().all()
    assert got[2, 1].isfinite().all()
    assert got[3, 0].isfinite().all()
    words = block_int16_of(x.to(device), False).cpu()
    q = (numbers(words, False).view(4, 2, 2, 16) / words[..., 16:17, None].view(torch.float32)).nan_to_num(0)
    assert (words[..., 17:19] == q.sum(-1))[:2].all()
    assert (words[0, :, 19].view(torch.float32) == got[0].sum(-1)).all()
    with pytest.raises(ValueError, match="block-wise int16 must be"):
        quantize_block_int16(x, torch.empty(4, 2, 31, dtype=torch.int32), False)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 3), (9, 8), (40, 8)])
def test_pairs_are_ordered(tokens, top_k, device):
    """By their experts, those of one as they come; ids of no expert at the end; in as many programs as a row has."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, 14, (tokens, top_k), generator=generator).int()
    x = torch.randn(tokens, 512, generator=generator)
    order = torch.full((tokens * top_k,), -1, dtype=torch.int32, device=device)
    out = torch.empty(block_int16_shape(*x.shape), dtype=torch.int32, device=device)
    quantize_block_int16(x.to(device), out, False, PairOrder(ids.to(device), 12, order))
    known = torch.where((ids >= 0) & (ids < 12), ids, 12).flatten()
    assert torch.equal(order.cpu(), known.argsort(stable=True).int())
    words = block_int16_of(x.to(device), False)
    assert torch.equal(out[..., :20], words[..., :20])


@jit
def multiply(x, base, second, out, table, first, last, TYPE: tl.constexpr, SECOND: tl.constexpr, K: tl.constexpr,
             N: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    n, mask = at[None, :], at < N
    one = block_int16_gemv(x, base, n, mask[None, :], table, first, last, TYPE, K, KS)
    g, u = digit_pair(x, base, second, n, mask[None, :], table, first, last, TYPE, SECOND, K, KS)
    tl.store(out + at, one, mask=mask)
    tl.store(out + N + at, g, mask=mask)
    tl.store(out + 2 * N + at, u, mask=mask)


@pytest.mark.exhaustive
@pytest.mark.every(4)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_products_with_block_int16(qtype, device):
    """Steps that end within K, a last row that is no tile's, a column that outweighs all others of its block."""
    family = next(each for each in (NIBBLES, THREES, STRIDED) if qtype in each)
    other = family[family.index(qtype) - 1]
    rows, cols = 21, 768
    matrices = [random_matrix(each, rows, cols, seed) for seed, each in enumerate((qtype, other))]
    packed = [pack_for_cpu(matrices[i][0], each, rows, cols).to(device) for i, each in enumerate((qtype, other))]
    x = torch.randn(1, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0, 70] = 500
    block_int16 = block_int16_of(x.to(device), is_strided(int(qtype)))
    out = torch.full((3, rows), 7.0, device=device)
    multiply[(2,)](block_int16, *packed, out, tables(device), 0, 2, int(qtype), int(other), cols, rows, BN=16, KS=16)
    assert torch.equal(out[1], out[0])
    for got, (_, values) in zip((out[0], out[2]), matrices, strict=True):
        assert ((got.cpu() - x.double() @ values.double().T).abs() <= bound(x, values)).all()


@jit
def multiply_planes(x, base, second, out, table, first, last, TYPE: tl.constexpr, SECOND: tl.constexpr,
                    K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    n, mask = at[None, :], at < N
    one = plane_gemv(x, base, n, mask[None, :], table, first, last, TYPE, K, N, KS, 2)
    g, u = plane_pair(x, base, second, n, mask[None, :], table, first, last, TYPE, SECOND, K, N, KS)
    tl.store(out + at, one, mask=mask)
    tl.store(out + N + at, g, mask=mask)
    tl.store(out + 2 * N + at, u, mask=mask)


@pytest.mark.every(3)
@pytest.mark.parametrize("qtype", PLANES, ids=lambda t: t.name)
def test_products_of_planes_with_block_int16(qtype, device):
    """As above; with 768 columns in steps of 512 the last one ends within K."""
    other = PLANES[PLANES.index(qtype) - 1]
    rows, cols = 24, 768
    matrices = [random_matrix(each, rows, cols, seed) for seed, each in enumerate((qtype, other))]
    laid = [repack(matrices[i][0].to(device), each, rows, cols) for i, each in enumerate((qtype, other))]
    x = torch.randn(1, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0, 70] = 500
    out = torch.full((3, rows), 7.0, device=device)
    block_int16 = block_int16_of(x.to(device), False)
    multiply_planes[(2,)](
        block_int16, *laid, out, tables(device), 0, 2, int(qtype), int(other), cols, rows, BN=16, KS=16
    )
    assert torch.equal(out[1], out[0])
    for got, (_, values), each in zip((out[0], out[2]), matrices, (qtype, other), strict=True):
        most = bound(x, with_minimum(values, each))
        assert ((got.cpu() - x.double() @ values.double().T).abs() <= most).all()


def with_minimum(values, qtype):
    """What is rounded for K-quants with a minimum m are s u and m, which may be larger than w = s u - m by far."""
    if qtype not in (QuantType.Q4_K, QuantType.Q5_K):
        return values
    blocks = values.view(len(values), -1, 32)
    span = blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)
    return (blocks.abs() + 2 * blocks.abs().amax(-1, keepdim=True) + span).view(values.shape)


def bound(x, values):
    """A number is off by at most 2^-14 of the largest of its 32.

    The sums of blocks are fp32: off by 2^-23 of all terms for each of them, and for their products with scales.
    """
    blocks = values.shape[1] // 32
    wide, weights = x.double().abs().view(-1, 32), values.double().abs().view(-1, blocks, 32)
    rounded = 2.0**-14 * (weights.sum(-1) * wide.amax(-1)).sum(-1)
    return rounded + (blocks + 4) * 2.0**-23 * (weights * wide).sum((-1, -2))


def test_types_and_orders():
    assert all(is_plane_type(int(qtype)) for qtype in PLANES)
    assert not any(is_plane_type(int(qtype)) for qtype in TYPES)
    assert all(has_block_int16(int(qtype)) for qtype in TYPES)
    assert not any(has_block_int16(int(qtype)) for qtype in (QuantType.Q4_K, QuantType.Q2_K, QuantType.Q3_K))
    assert [qtype for qtype in TYPES if is_strided(int(qtype))] == STRIDED
