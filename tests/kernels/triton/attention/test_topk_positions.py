"""The GPU's choice of positions, against whole numbers in fp64: ties included, equal."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.triton.attention import topk_positions
from tests.support.checks.flat_calls import flat_topk
from tests.support.checks.products import product

select_topk_positions = flat_topk(topk_positions.select_topk_positions)
oracle_topk_positions = flat_topk(reference.select_topk_positions)

PAGE, PAGES = 16, 12


def case(heads, dim, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(heads)
    table = torch.randperm(2 * PAGES, generator=generator).to(torch.int32).reshape(2, PAGES)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float()

    seqs, lens = torch.tensor([0, 1, 0, 1, 0, 0]), torch.tensor([1, 40, 41, 192, 0, 130])
    parts = whole(6, heads, dim).to(dtype), whole(6, heads), whole(2 * PAGES * PAGE, dim).to(dtype)
    return *(part.to(device) for part in parts), table.to(device), seqs.int().to(device), lens.int().to(device)


@product(
    strength=1,
    shape=[(1, 4), (3, 24), (64, 128)],
    options=[{}, {"block": 8, "num_local": 1}, {"block": 5, "num_local": 2}],
    is_summed=[True, False],
    dtype=[torch.float32, torch.float16],
)
def test_the_best_are_chosen_and_ties_go_to_lower_positions(shape, options, is_summed, dtype, device):
    q, weights, keys, table, seqs, lens = case(*shape, device, dtype)
    given = weights if is_summed else None
    slots, counts = select_topk_positions(q, given, keys, table, PAGE, seqs, lens, 0.5, 10, **options)
    cpu = [None if part is None else part.cpu() for part in (q, given, keys, table, seqs, lens)]
    want = oracle_topk_positions(*cpu[:4], PAGE, *cpu[4:], 0.5, 10, **options)
    assert [row[:count].tolist() for row, count in zip(slots.cpu(), counts.tolist(), strict=True)] == want
    assert int(slots.min()) >= 0


def test_rows_are_taken_in_parts_where_scores_are_many(device, monkeypatch):
    arguments = case(3, 24, device)
    whole = select_topk_positions(*arguments[:4], PAGE, *arguments[4:], 0.5, 10)
    monkeypatch.setattr("ktransformers.kernels.triton.attention.topk_positions._MAX_SCORES", 2 * PAGE * PAGES)
    parts = select_topk_positions(*arguments[:4], PAGE, *arguments[4:], 0.5, 10)
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])


def test_bad_arguments_are_named(device):
    q, weights, keys, table, seqs, lens = case(3, 24, device)
    with pytest.raises(TypeError, match="must be alike"):
        select_topk_positions(q.half(), weights, keys, table, PAGE, seqs, lens, 0.5, 10)
    with pytest.raises(ValueError, match="k_cache"):
        select_topk_positions(q, weights, keys[:, :8], table, PAGE, seqs, lens, 0.5, 10)
