"""Weights in groups with scales of their own: the exact arithmetic, in rows and packed; equal bits in every tier."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import Isa, MoeKernel, WorkerPool
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, GroupType, RawTensor, block_size, type_size
from tests.support.checks.products import thinned
from tests.support.models.group_blocks import dequantized, exact_linear, random_blocks

TIERS = (*cpu.available_isas(), Isa.AMX_EMULATED)
TYPES = tuple(GroupType)
FP8 = tuple(qtype for qtype in TYPES if qtype.name.startswith(("F8", "MXFP8")))
SHAPES = ((16, 128), (5, 384), (33, 1408))
TOKENS = (1, 2, 3, 5, 8, 17, 40)
ROUND = 2.0**-24  # largest relative error of one fp32 operation


def random_rows(tokens: int, cols: int) -> torch.Tensor:
    return torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens))


def test_bytes_are_those_of_codes_scales_and_zero_points() -> None:
    sizes = {"I4_32_BF16": (32, 18), "I4_32_F16_Z": (32, 19), "I4_128_F32_Z": (128, 69), "I8_128_BF16": (128, 130)}
    sizes |= {"F8_128_F32": (128, 132), "MXFP8": (32, 33), "NVFP4_F32": (32, 22)}
    for name, (columns, nbytes) in sizes.items():
        assert (block_size(GroupType[name]), type_size(GroupType[name])) == (columns, nbytes)
    per_row = 16  # a head is filled up to 64 bytes for 16 rows; NVFP4 has the number of a row once
    for qtype in TYPES:
        size = type_size(qtype) - (4 if qtype.name == "NVFP4_F32" else 0)
        assert cpu.packed_nbytes(qtype, 64, 2048) <= 64 * (2048 // block_size(qtype) * size + per_row)


@pytest.mark.parametrize(
    ("qtype", "isa", "shape"),
    thinned(((q, i, s) for q in TYPES if q not in FP8 for i in TIERS for s in SHAPES), strength=1),
)
def test_integers_are_multiplied_exactly(qtype: GroupType, isa: Isa, shape: tuple[int, int]) -> None:
    weight, pool = random_blocks(qtype, *shape), WorkerPool(2, isa)
    packed = cpu.pack(weight, pool)
    x = random_rows(17, shape[1])
    want = exact_linear(x, weight)
    for tokens in (1, 3, 17):
        assert torch.equal(cpu.linear(x[:tokens], packed, pool), want[:tokens])
        assert torch.equal(cpu.linear(x[:tokens], weight, pool), want[:tokens])
    pool.close()


@pytest.mark.parametrize("qtype", FP8)
def test_fp8_is_near_fp64(qtype: GroupType) -> None:
    rows, cols = 33, 640
    weight, pool = random_blocks(qtype, rows, cols), WorkerPool(1)
    packed, wide = cpu.pack(weight, pool), dequantized(weight).double()
    x = random_rows(30, cols)
    # A product passes size / 4 fused steps, 2 sums, the scale and a sum per group; the oracle rounds value times scale.
    steps = block_size(qtype) // 4 + 2 + 1 + cols // block_size(qtype) + 1
    bound = 1.01 * steps * ROUND * (x.double().abs() @ wide.abs().T)
    for tokens in (1, 2, 30):
        for form in (weight, packed):
            error = (cpu.linear(x[:tokens], form, pool).double() - x[:tokens].double() @ wide.T).abs()
            assert (error <= bound[:tokens]).all()
    pool.close()


@pytest.mark.parametrize("qtype", TYPES)
def test_every_tier_and_number_of_tokens_gives_the_same_bits(qtype: GroupType) -> None:
    rows, cols = 37, 640
    weight, x = random_blocks(qtype, rows, cols, seed=1), random_rows(max(TOKENS), cols)
    first = WorkerPool(1, Isa.SCALAR)
    packed = cpu.pack(weight, first)
    want = cpu.linear(x, packed, first)
    assert torch.equal(cpu.linear(x[:6], weight, first), want[:6])
    first.close()
    for isa in TIERS:
        pool = WorkerPool(2, isa)
        assert torch.equal(cpu.pack(weight, pool).data, packed.data), isa
        for tokens in TOKENS:
            assert torch.equal(cpu.linear(x[-tokens:].contiguous(), packed, pool), want[-tokens:]), (isa, tokens)
        pool.close()


@pytest.mark.parametrize("qtype", TYPES)
def test_rows_are_dequantized_bit_for_bit(qtype: GroupType) -> None:
    weight, pool = random_blocks(qtype, 7, 384, seed=2), WorkerPool(1)
    ids = torch.tensor([6, 0, 3])
    assert torch.equal(cpu.dequantize_rows(weight, ids, pool), dequantized(weight)[ids])
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_all_fp8_codes_and_nans(isa: Isa) -> None:
    qtype, pool = GroupType["MXFP8"], WorkerPool(1, isa)
    weight = random_blocks(qtype, 256, 32)
    blocks = weight.data.view(256, 33)
    blocks[:, 1:] = 0
    blocks[:, 5] = torch.arange(256)
    x = torch.zeros(3, 32)
    x[:, 4] = 1
    wanted, is_nan = dequantized(weight)[:, 4], (torch.arange(256) & 127) == 127
    out = cpu.linear(x, cpu.pack(weight, pool), pool)
    assert torch.equal(out[:, ~is_nan], wanted[~is_nan].expand(3, -1))
    assert out[:, is_nan].isnan().all()
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_all_exponents(isa: Isa) -> None:
    pool, weight = WorkerPool(1, isa), random_blocks(GroupType["MXFP8"], 256, 32)
    blocks = weight.data.view(256, 33)
    blocks[:, 0], blocks[:, 1:] = torch.arange(256), 0
    blocks[:, 1] = 0x38 - 8 * 6  # 2^-6, so that 256 times the largest scale is finite
    x = torch.zeros(1, 32)
    x[0, 0] = 1
    out, wanted = cpu.linear(x, cpu.pack(weight, pool), pool)[0], dequantized(weight)[:, 0]
    assert torch.equal(out[:247], wanted[:247])
    assert out[255].isnan()
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("name", ["I4_32_BF16", "I8_128_F32_Z", "NVFP4_F32", "MXFP8"])
def test_experts_equal_their_linears(isa: Isa, name: str) -> None:
    experts, width, hidden = 3, 128, 256
    pool, qtype = WorkerPool(2, isa), GroupType[name]
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = (
        cpu.pack_all([random_blocks(qtype, *shape, seed=10 * part + e) for e in range(experts)], pool)
        for part, shape in enumerate(shapes)
    )
    kernel = MoeKernel(ExpertWeights(gate, up, down), ActivationSpec(), pool)
    for tokens in (1, 60):
        x = random_rows(tokens, hidden)
        ids = torch.arange(tokens)[:, None] % experts
        each = [
            cpu.linear(
                cpu.activate(ActivationSpec(), cpu.linear(x, gate[e], pool), cpu.linear(x, up[e], pool), pool),
                down[e],
                pool,
            )
            for e in range(experts)
        ]
        wanted = torch.stack(each)[ids[:, 0], torch.arange(tokens)]
        assert torch.equal(kernel.forward(x, ids, torch.ones(tokens, 1)), wanted)
    pool.close()


def test_nothing_outside_the_matrix_is_read(guarded) -> None:
    for qtype in TYPES:
        pool = WorkerPool(1)
        weight = random_blocks(qtype, 17, 128)
        inside = RawTensor(guarded.copy_to_end(weight.data), qtype, weight.shape)
        packed = cpu.pack(inside, pool)
        at_end = type(packed)(guarded.copy_to_end(packed.data), packed.qtype, packed.shape)
        for tokens in (1, 20):
            x = random_rows(tokens, 128)
            assert torch.equal(cpu.linear(x, at_end, pool), cpu.linear(x, inside, pool))
        pool.close()
