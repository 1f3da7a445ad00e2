"""Activations of 16 bits: near the dequantized weights' products in fp64, and equal bits over tiers, threads, batches.

Bounds: a block's largest number is 127 steps of the first plane; half a step at most is left, which is 127 steps of the
second. So a number is wrong by at most 1 / (4 * 127^2) = 2^-16 of its block's largest; doubled for what fp32 adds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.cpu import MoeKernel, WorkerPool, available_isas, batched_linear, linear
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType, RawTensor
from ktransformers.operators.linear.packed import pack_experts, pack_matrix

TYPES = [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.IQ3_XXS, QuantType.MXFP4, QuantType.Q2_K]
ROWS, COLS = 48, 512
STEP = 2.0**-15


@pytest.fixture(scope="module")
def wide_pools() -> Iterator[list[WorkerPool]]:
    """Two planes: every tier with two threads, the fastest with one and five as well."""
    isas = available_isas()
    made = [WorkerPool(2, isa, planes=2) for isa in isas] + [WorkerPool(n, isas[-1], planes=2) for n in (1, 5)]
    yield made
    for pool in made:
        pool.close()


def rows_of(count: int, cols: int) -> torch.Tensor:
    """Blocks that have one number far larger than the others, as activations do."""
    x = torch.randn(count, cols, generator=torch.Generator().manual_seed(count))
    x[:, ::61] *= 30.0
    return x


@pytest.mark.parametrize("qtype", TYPES, ids=lambda one: one.name)
def test_products_are_those_of_fp64_but_for_sixteen_bits(qtype, make_weight, wide_pools, pool) -> None:
    weight, x = make_weight(qtype, ROWS, COLS), rows_of(5, COLS)
    wide = reference.dequantize(weight).double()
    want = x.double() @ wide.T
    bound = STEP * x.abs().amax(-1, keepdim=True).double() * wide.abs().sum(-1)
    for matrix in (weight, pack_matrix(weight, wide_pools[-1])):
        got = linear(x, matrix, wide_pools[-1])
        assert bool(((got.double() - want).abs() <= bound).all())
        narrow = linear(x, matrix, pool)
        assert float((got - want).norm()) < float((narrow - want).norm()) / 50


@pytest.mark.parametrize("qtype", TYPES, ids=lambda one: one.name)
def test_same_bits_for_all_tiers_threads_and_batches(qtype, make_weight, wide_pools) -> None:
    weight, x = make_weight(qtype, ROWS, COLS), rows_of(70, COLS)
    whole = linear(x, pack_matrix(weight, wide_pools[0]), wide_pools[0])
    assert torch.equal(linear(x, weight, wide_pools[0]), whole)
    for pool in wide_pools:
        matrix = pack_matrix(weight, pool)
        for count in (1, 2, 7, 64, 70):
            assert torch.equal(linear(x[:count], matrix, pool), whole[:count]), (pool, count)


def experts_of(make_weight, first: QuantType, last: QuantType, count: int = 4) -> ExpertWeights:
    shapes = ((first, 256, COLS, 0), (first, 256, COLS, 100), (last, COLS, 256, 200))
    gate, up, down = ([make_weight(t, n, k, seed=seed + e) for e in range(count)] for t, n, k, seed in shapes)
    return ExpertWeights(gate, up, down)


@pytest.mark.every(12)
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (QuantType.Q4_K, QuantType.Q6_K),
        (QuantType.IQ3_XXS, QuantType.Q8_0),
        (QuantType.BF16, QuantType.Q4_K),
        (QuantType.Q8_0, QuantType.F32),
    ],
    ids=lambda one: one.name,
)
def test_experts(first, last, make_weight, wide_pools, pool) -> None:
    """Few tokens, groups of more than a task takes, and a token that no expert gets; down or up may be in fp32."""
    weights, x = experts_of(make_weight, first, last), rows_of(300, COLS)
    ids = torch.randint(0, 5, (300, 2), generator=torch.Generator().manual_seed(1))
    scores = torch.rand(300, 2, generator=torch.Generator().manual_seed(2))
    whole = MoeKernel(weights, ActivationSpec(), wide_pools[0]).forward(x, ids, scores)
    for wide in wide_pools:
        kernel = MoeKernel(weights if first is QuantType.BF16 else pack_experts(weights, wide), ActivationSpec(), wide)
        for count in (1, 3, 40, 300):
            assert torch.equal(kernel.forward(x[:count], ids[:count], scores[:count]), whole[:count]), (wide, count)
    assert bool((whole[(ids == 4).all(-1)] == 0).all())
    want = experts_in_double(weights, x, ids, scores)
    narrow = MoeKernel(weights, ActivationSpec(), pool).forward(x, ids, scores)
    assert float((whole - want).norm()) < float((narrow - want).norm()) / 50


def experts_in_double(weights: ExpertWeights, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    assert weights.gate is not None
    want = torch.zeros(len(x), COLS, dtype=torch.double)
    for e in range(len(weights.up)):
        gate, up, down = (reference.dequantize(part[e]).double() for part in (weights.gate, weights.up, weights.down))
        inner = torch.nn.functional.silu(x.double() @ gate.T) * (x.double() @ up.T)
        want += (inner @ down.T) * (scores * (ids == e)).sum(-1, keepdim=True).double()
    return want


def test_batched_products(make_weight, wide_pools) -> None:
    parts, x = [make_weight(QuantType.Q8_0, 32, COLS, seed=b) for b in range(3)], torch.randn(70, 3, COLS)
    stacked = RawTensor(torch.cat([part.data for part in parts]), QuantType.Q8_0, (3, 32, COLS))
    got = batched_linear(x, stacked, wide_pools[0])
    for b, part in enumerate(parts):
        assert torch.equal(got[:, b], linear(x[:, b].contiguous(), part, wide_pools[0]))


@pytest.mark.parametrize("planes", [0, 3])
def test_other_numbers_of_planes_are_refused(planes: int) -> None:
    with pytest.raises(ValueError, match=f"planes must be 1 or 2, got {planes}"):
        WorkerPool(1, planes=planes)
