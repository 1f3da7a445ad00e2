"""Attention with products of bf16: against fp64 within what roundings allow, and equal bits over tiers, threads,
batches and chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import MAX_BF16_DIMS, Isa, WorkerPool
from tests.support.checks.flat_calls import flat_attention
from tests.support.checks.products import product

attention = flat_attention(cpu.attention)

PAGE = 16
HALF_ULP = 2.0**-8  # largest relative error of rounding to bf16
ROUND = 2.0**-24  # and of one fp32 operation
EXP = 2.0**-16  # and of exp, see exp_for_bf16

Places = tuple[Tensor, int, Tensor, Tensor, float]


@pytest.fixture(scope="module")
def all_pools(pools: list[WorkerPool]) -> Iterator[list[WorkerPool]]:
    """Those of the tiers that run here, and of emulated instructions."""
    emulated = [WorkerPool(2, isa) for isa in (Isa.AVX512_BF16_EMULATED, Isa.AMX_EMULATED)]
    yield [*pools, *emulated]
    for each in emulated:
        each.close()


def case(heads: int, kv_heads: int, dim_k: int, dim_v: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Places]:
    """Rows of two sequences around the borders of tiles and spans; q fp32, keys and values bf16, and the places."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(2 * 70, generator=generator).to(torch.int32).reshape(2, 70)
    seq_ids, kv_lens = torch.tensor([0] * 30 + [1] * 4), torch.tensor([*range(490, 520), 1, 3, 65, 1100])
    q = torch.randn(len(seq_ids), heads, dim_k, generator=generator)
    keys = torch.randn(140 * PAGE, kv_heads, dim_k, generator=generator).bfloat16()
    values = torch.randn(140 * PAGE, kv_heads, dim_v, generator=generator).bfloat16() + 1
    return q, keys, values, (table, PAGE, seq_ids, kv_lens, 0.7 * dim_k**-0.5)


def exact(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Places,
    window: int = 0,
    is_chunked: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """In fp64: results [T, Hq, Dv], the largest relative error of a weight where q is rounded, and how far on average
    values lie from the result.

    With weights off by a factor within 1 +- e each, whose sum they are divided by, a result is off by at most
    e / (1 - e) times that distance. A score's error is that of q and of sums in fp32.
    """
    table, page, seq_ids, kv_lens, scale = places
    group = q.shape[1] // keys.shape[1]
    outs, errors, distances = [], [], []
    for row, (seq, length) in enumerate(zip(seq_ids.tolist(), kv_lens.tolist(), strict=True)):
        oldest = 0
        if window and length > window:
            oldest = (length - 1) // window * window if is_chunked else length - window
        positions = torch.arange(oldest, length)
        slots = table[seq, positions // page].long() * page + positions % page
        k = keys[slots].double().repeat_interleave(group, 1)
        v = values[slots].double().repeat_interleave(group, 1)
        scores = scale * torch.einsum("hd,phd->hp", q[row].double(), k)
        sizes = scale * torch.einsum("hd,phd->hp", q[row].double().abs(), k.abs()).amax(1)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:  # a position of value 0
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
            v = torch.cat((v, torch.zeros_like(v[:1])))
        weights = scores.softmax(1)
        out = torch.einsum("hp,phd->hd", weights, v)
        outs.append(out)
        distances.append(torch.einsum("hp,phd->hd", weights, (v - out).abs()))
        errors.append(sizes)
    return torch.stack(outs), torch.stack(errors), torch.stack(distances)


def check(q: Tensor, keys: Tensor, values: Tensor, places: Places, out: Tensor, **options: object) -> None:
    """Within the roundings of fp32 and of probabilities of attention with rounded queries, and of all with others."""
    for given, rounding in ((q.bfloat16().float(), 0.0), (q, HALF_ULP)):
        want, sizes, distance = exact(given, keys, values, places, **options)  # type: ignore[arg-type]
        sums = (16 + q.shape[2] / 16 + 8) * ROUND
        softmax = 2 * EXP + 64 * ROUND  # exp, and changes of the maximum, for each 64 positions of a few spans
        error = torch.expm1((rounding + sums) * sizes + softmax) + HALF_ULP
        assert float(error.max()) < 0.2, "the bound says nothing"
        bound = (error / (1 - error))[..., None] * distance + 100 * ROUND * want.abs().clamp(min=1)
        assert bool(((out - want).abs() <= bound).all()), rounding


OPTIONS: list[dict[str, object]] = [
    {},
    {"window": 100},
    {"window": 100, "is_chunked": True},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 7, "sinks": True, "softcap": 5.0},
]
SHAPES = [(8, 2, 64, 64), (6, 6, 80, 24), (20, 1, 96, 40), (7, 1, 128, 128), (2, 1, 256, 256), (3, 3, 300, 137)]


@pytest.mark.exhaustive
@pytest.mark.every(3)
@product(strength=1, shape=SHAPES, options=OPTIONS)
def test_near_fp64_and_equal_bits(shape, options, all_pools):
    q, k, v, places = case(*shape)
    options = {**options, "sinks": torch.linspace(-1, 2, shape[0])} if options.get("sinks") else options
    out = attention(q, k, v, *places, all_pools[0], bf16_products=True, **options)
    check(q, k, v, places, out, **options)
    table, page, seq_ids, kv_lens, scale = places
    for each in all_pools[1:]:
        assert torch.equal(attention(q, k, v, *places, each, bf16_products=True, **options), out), each
    for each in (all_pools[-4], all_pools[-2], all_pools[-1]):
        for start, stop in ((0, 1), (3, 9), (17, 34), (33, 34)):
            rows = slice(start, stop)
            own = table, page, seq_ids[rows], kv_lens[rows], scale
            part = attention(q[rows], k, v, *own, each, bf16_products=True, **options)
            assert torch.equal(part, out[rows]), (each, start)


def test_a_row_does_not_depend_on_the_rows_beside_it(pools):
    """Units of all sizes, of which one thread takes the largest, and rows alone."""
    _, k, v, (table, page, _, _, scale) = case(16, 2, 128, 128, seed=5)
    q, kv_lens = torch.randn(150, 16, 128, generator=torch.Generator().manual_seed(1)), torch.arange(400, 550)

    def run(start: int, stop: int, each: WorkerPool) -> Tensor:
        places = table, page, torch.zeros(stop - start, dtype=torch.int64), kv_lens[start:stop], scale
        return attention(q[start:stop], k, v, *places, each, bf16_products=True)

    whole = run(0, 150, pools[-3])
    for each in pools[3:]:
        assert torch.equal(run(0, 150, each), whole), each
    for row in (0, 47, 48, 49, 111, 112, 113, 149):  # around positions 448 and 512
        assert torch.equal(run(row, row + 1, pools[-3]), whole[row : row + 1]), row


def test_probabilities_are_weights_that_add_up_to_1(pools):
    """What all values have in common is kept as it is: a sum of roundings would be off by up to 2^-8 of it."""
    q, k, v, places = case(4, 2, 64, 32)
    out = attention(q, k, torch.full_like(v, 3.0), *places, pools[-1], bf16_products=True)
    assert float((out - 3.0).abs().max()) <= 3 * 100 * ROUND


def test_infinite_values_are_of_those_who_see_them(all_pools):
    """Position 500 is seen from row 11 on; the rows before share its tile."""
    q, k, v, places = case(4, 2, 32, 48)
    clean = attention(q, k, v, *places, all_pools[0], bf16_products=True)
    v[places[0][0, 500 // PAGE] * PAGE + 500 % PAGE, :, 40] = math.inf
    for each in all_pools:
        out = attention(q, k, v, *places, each, bf16_products=True)
        assert bool(out[11:30, :, 40].isinf().all())
        out[11:30, :, 40] = clean[11:30, :, 40]
        assert torch.equal(out, clean), each


def test_what_is_not_seen_and_what_is_no_number(all_pools):
    q, k, v, places = case(4, 2, 32, 32)
    clean = attention(q, k, v, *places, all_pools[0], bf16_products=True, window=50)
    used, (table, _, seq_ids, kv_lens, _) = torch.zeros(len(k), dtype=torch.bool), places
    for seq, length in zip(seq_ids.tolist(), kv_lens.tolist(), strict=True):
        for position in range(max(0, length - 50), length):
            used[table[seq, position // PAGE] * PAGE + position % PAGE] = True
    k[~used], v[~used], q[3, 1, 7] = math.nan, math.inf, math.nan
    for each in all_pools:
        out = attention(q, k, v, *places, each, bf16_products=True, window=50)
        assert bool(out[3, 1].isnan().all())
        out[3, 1] = clean[3, 1]
        assert torch.equal(out, clean), each


def test_subnormal_numbers_are_zeros_everywhere(all_pools):
    """Keys whose products with queries are around the least normal number, and values around it."""
    q, k, v, places = case(4, 2, 32, 32)
    q *= 2.0**-60
    k, v = (k.float() * 2.0**-66).bfloat16(), (v.float() * 2.0**-126).bfloat16()
    table, page, seq_ids, kv_lens, _ = places
    places = table, page, seq_ids, kv_lens, 2.0**126
    outs = [attention(q, k, v, *places, each, bf16_products=True) for each in all_pools]
    assert bool(outs[0].abs().sum() > 0)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert float(torch.tensor(2.0**-130) * 2) == 2.0**-129  # the mode of the thread is as it was


def test_keys_and_values_that_end_at_a_page(all_pools, guarded):
    values = torch.randn(PAGE, 1, 33, generator=torch.Generator().manual_seed(3)).bfloat16()
    cache = guarded.copy_to_end(values.reshape(-1).view(torch.uint8)).view(torch.bfloat16).reshape(PAGE, 1, 33)
    q = torch.randn(2, 3, 33, generator=torch.Generator().manual_seed(5))
    places = torch.zeros(1, 1, dtype=torch.int32), PAGE, torch.zeros(2, dtype=torch.int64), torch.tensor([15, 16]), 0.3
    want = attention(q, values, values, *places, all_pools[0], bf16_products=True)
    for each in all_pools:
        assert torch.equal(attention(q, cache, cache, *places, each, bf16_products=True), want), each


def test_what_has_no_such_products_is_named(pool):
    q, k, v, places = case(4, 2, 32, 32)
    with pytest.raises(ValueError, match="products of bf16 are of keys and values in bf16"):
        attention(q, k.float(), v.float(), *places, pool, bf16_products=True)
    wide = torch.zeros(140 * PAGE, 1, MAX_BF16_DIMS + 1, dtype=torch.bfloat16)
    rows = torch.zeros(34, 1, MAX_BF16_DIMS + 1)
    with pytest.raises(ValueError, match=f"of up to {MAX_BF16_DIMS} dimensions"):
        attention(rows, wide, wide, *places, pool, bf16_products=True)
