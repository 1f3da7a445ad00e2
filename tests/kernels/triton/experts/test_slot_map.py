"""Pairs divided between a GPU's slots and the CPU, and sums put together again, beside plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ktransformers.kernels.triton.experts.router import Chosen
from ktransformers.kernels.triton.experts.slot_map import split_pairs, sum_onto

E, K = 7, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [1, 5, 60])  # the last one takes more than one program
def test_split(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, E + 2, (rows, K), generator=generator)
    slots = torch.where(torch.rand(rows, generator=generator) < 0.3, -1, torch.arange(rows))
    slot_of = torch.tensor([4, -1, 0, -1, 2, -1, 9])
    hits, picks = (torch.full((E,), 5, device=DEVICE) for _ in range(2))
    chosen = Chosen(hits, slots.to(DEVICE))
    memory = torch.full((rows, K), 99, dtype=torch.int32, device=DEVICE)
    given = ids.to(DEVICE, dtype)
    here, there = split_pairs(given, slot_of.to(DEVICE, torch.int32), chosen, picks, memory)
    assert here is memory
    is_known = (ids >= 0) & (ids < E)
    has_slot = is_known & (slot_of[ids.clamp(0, E - 1)] >= 0)
    assert torch.equal(here.cpu().long(), torch.where(has_slot, ids, -1))
    assert torch.equal(there.cpu().long(), torch.where(has_slot, E, ids))
    is_token = (slots >= 0)[:, None]
    assert torch.equal(picks.cpu(), 5 + torch.bincount(ids[is_known & is_token], minlength=E))
    assert torch.equal(hits.cpu(), 5 + torch.bincount(ids[has_slot & is_token], minlength=E))
    again = split_pairs(given, slot_of.to(DEVICE, torch.int32), None, picks)
    assert torch.equal(again[0], here)
    assert torch.equal(picks.cpu(), 5 + torch.bincount(ids[is_known & is_token], minlength=E))  # nothing is counted


@pytest.mark.parametrize("width", [8, 1100])
def test_sum(width: int) -> None:
    """In the order of the list, rounded once; parts that nobody wrote are not read."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, -1, 3], [E, 6, 1], [-1, -1, -1]])
    parts = torch.randn(9, width, generator=generator).half()
    parts[((ids < 0) | (ids >= E)).flatten()] = float("nan")
    base = torch.randn(3, width, generator=generator).half()  # the interpreter cuts bf16 off
    want = base.float().clone()
    for token, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            if 0 <= expert < E:
                want[token] += parts[token * K + j].float()
    out = torch.empty(3, width, dtype=torch.float16, device=DEVICE)
    got = sum_onto(base.to(DEVICE), parts.to(DEVICE), ids.to(DEVICE, torch.int32), E, out)
    assert got is out
    assert torch.equal(got.cpu(), want.half())


def test_nothing_to_do() -> None:
    picks, slot_of = torch.zeros(E, dtype=torch.int64, device=DEVICE), int32(*range(E))
    here, there = split_pairs(int32().view(0, K), slot_of, None, picks)
    assert here.shape == there.shape == (0, K)
    nothing = torch.empty(0, 8, device=DEVICE)
    assert sum_onto(nothing, nothing, here, E, nothing) is nothing


def test_arguments_that_do_not_fit() -> None:
    picks, slot_of, ids = torch.zeros(E, dtype=torch.int64, device=DEVICE), int32(*range(E)), int32([0, 1, 2])
    with pytest.raises(TypeError, match="ids must be integers"):
        split_pairs(ids.float(), slot_of, None, picks)
    with pytest.raises(ValueError, match="of one length"):
        split_pairs(ids, slot_of, None, picks[1:])
    with pytest.raises(ValueError, match="there must be"):
        split_pairs(ids, slot_of, None, picks, ids[:, 1:])
    with pytest.raises(ValueError, match="slots"):
        split_pairs(ids, slot_of, Chosen(picks, picks), picks)
    parts, base = torch.zeros(3, 8, device=DEVICE), torch.zeros(1, 8, device=DEVICE)
    with pytest.raises(ValueError, match="parts have 3 rows"):
        sum_onto(base, parts[1:], ids, E, base)
    with pytest.raises(ValueError, match="contiguous"):
        sum_onto(base, torch.zeros(3, 16, device=DEVICE)[:, ::2], ids, E, base)
