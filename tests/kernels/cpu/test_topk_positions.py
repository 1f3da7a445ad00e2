"""The choice of positions: against whole numbers in torch, ties included; equal over tiers, threads and rows."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import cpu, reference
from tests.support.checks.flat_calls import flat_topk
from tests.support.checks.products import product

select_topk_positions = flat_topk(cpu.select_topk_positions)
oracle_topk_positions = flat_topk(reference.select_topk_positions)

PAGE = 16


def case(heads, dim, seed=0, spread=3):
    """Two sequences whose pages are scattered; q, weights, keys, table, seq_ids, kv_lens, all of small whole numbers.

    Products and sums of such are exact in fp32 in any order, and many of them are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(2 * 90, generator=generator).to(torch.int32).reshape(2, 90)

    def whole(*shape):
        return torch.randint(-spread, spread + 1, shape, generator=generator).float()

    seq_ids = torch.tensor([0] * 6 + [1] * 4 + [0])
    kv_lens = torch.tensor([1, 2, 20, 21, 600, 1440, 40, 41, 42, 1040, 33])
    rows = len(seq_ids)
    return whole(rows, heads, dim), whole(rows, heads), whole(2 * 90 * PAGE, dim), table, seq_ids, kv_lens


OPTIONS = [{}, {"block": 8, "num_local": 1}, {"block": 5, "num_local": 2}, {"block": 128}]


@product(strength=1, shape=[(1, 4), (3, 24), (64, 128), (5, 150)], options=OPTIONS, is_summed=[True, False])
def test_the_best_are_chosen_and_ties_go_to_lower_positions(shape, options, is_summed, pools):
    q, weights, keys, table, seq_ids, kv_lens = case(*shape)
    given = weights if is_summed else None
    arguments = (keys, table, PAGE)
    slots, counts = select_topk_positions(q, given, *arguments, seq_ids, kv_lens, 0.5, 10, pools[0], **options)
    want = oracle_topk_positions(q, given, *arguments, seq_ids, kv_lens, 0.5, 10, **options)
    assert [row[:count].tolist() for row, count in zip(slots, counts.tolist(), strict=True)] == want
    for each in pools[1:]:
        other = select_topk_positions(q, given, *arguments, seq_ids, kv_lens, 0.5, 10, each, **options)
        assert torch.equal(other[0], slots)
        assert torch.equal(other[1], counts)
    apart = 1 if is_summed else shape[0]
    for start, stop in ((0, 1), (4, 7), (10, 11)):
        weights_part = None if given is None else given[start:stop]
        of_rows = seq_ids[start:stop], kv_lens[start:stop], 0.5, 10, pools[-1]
        part = select_topk_positions(q[start:stop], weights_part, *arguments, *of_rows, **options)
        assert torch.equal(part[0], slots[start * apart : stop * apart])


def test_scores_of_any_numbers_are_near_those_of_fp64(pool):
    """No position that is left out scores higher than one that is chosen, but for rounding."""
    generator = torch.Generator().manual_seed(4)
    q, weights, keys, table, seq_ids, kv_lens = case(8, 40)
    q, weights, keys = (torch.randn(part.shape, generator=generator) for part in (q, weights, keys))
    slots, counts = select_topk_positions(q, weights, keys, table, PAGE, seq_ids, kv_lens, 0.2, 30, pool)
    for t, (seq, length) in enumerate(zip(seq_ids.tolist(), kv_lens.tolist(), strict=True)):
        positions = torch.arange(length)
        seen = table[seq, positions // PAGE].long() * PAGE + positions % PAGE
        dots = (torch.einsum("hd,sd->hs", q[t].double(), keys[seen].double()) * 0.2).relu()
        scores = dict(zip(seen.tolist(), (weights[t].double() @ dots).tolist(), strict=True))
        chosen = slots[t, : counts[t]].tolist()
        assert len(chosen) == len(set(chosen)) == min(30, length)
        left = [score for slot, score in scores.items() if slot not in set(chosen)]
        # 40 products of each of 8 heads, each with a relative error of 2^-24
        assert max(left, default=float("-inf")) <= min(scores[slot] for slot in chosen) + 1e-4


def test_bad_arguments_are_named(pool):
    q, weights, keys, table, seq_ids, kv_lens = case(2, 8)

    def run(q=q, weights=weights, keys=keys, lens=kv_lens, **options):
        return select_topk_positions(q, weights, keys, table, PAGE, seq_ids, lens, 0.5, 10, pool, **options)

    with pytest.raises(ValueError, match="weights must have shape"):
        run(weights=weights[:, :1])
    with pytest.raises(ValueError, match=r"k_cache must be fp32 \[slots, 8\]"):
        run(keys=keys[:, :4])
    with pytest.raises(ValueError, match="num_local 11 at most"):
        run(num_local=11)
    with pytest.raises(ValueError, match="kv_len 1441 does not fit"):
        run(lens=kv_lens.clamp_min(1441))
    with pytest.raises(ValueError, match="200 index heads; up to 128"):
        run(q=torch.zeros(11, 200, 8), weights=torch.zeros(11, 200))
    with pytest.raises(ValueError, match="lies outside a cache"):
        run(keys=keys[:16])
