"""What pools of positions are made of on a GPU, against plain torch, pool by pool."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.attention_call import RowPages
from ktransformers.kernels.triton.attention import pools
from ktransformers.kernels.triton.attention.pools import rows_to_cache
from tests.support.checks.flat_calls import flat_pooled
from tests.support.checks.products import product

pooled = flat_pooled(pools.pooled)

PAGE, PAGES = 8, 5


def case(dim, size, device, dtype):
    generator = torch.Generator().manual_seed(dim)
    table = torch.randperm(2 * PAGES, generator=generator).to(torch.int32).reshape(2, PAGES)
    cache = torch.randn(2 * PAGES * PAGE, 2 * dim, generator=generator).to(dtype)
    bias = torch.randn(size, dim, generator=generator).to(dtype)
    seqs, lens = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([size, 3 * size, 2 * size + 1, 32, 0, 1])
    return *(part.to(device) for part in (cache, bias, table)), seqs.int().to(device), lens.int().to(device)


@product(
    strength=1,
    dim=[4, 24, 128],
    size=[1, 4, 8],
    has_gates=[True, False],
    dtype=[torch.float32, torch.bfloat16],
)
def test_rows_that_end_a_pool_get_its_entry_and_others_zeros(dim, size, has_gates, dtype, device):
    cache, bias, table, seqs, lens = case(dim, size, device, dtype)
    given = cache if has_gates else cache[:, :dim]
    got = pooled(given, bias if has_gates else None, table, PAGE, seqs, lens, dim, size).cpu().double()
    for row, (seq, length) in enumerate(zip(seqs.tolist(), lens.tolist(), strict=True)):
        if not length or length % size:
            assert not got[row].any()
            continue
        positions = torch.arange(length - size, length)
        slots = table.cpu()[seq][positions // PAGE].long() * PAGE + positions % PAGE
        keys, gates = cache.cpu()[slots].double().split(dim, dim=-1)
        weights = (gates + bias.cpu().double()).softmax(dim=0) if has_gates else torch.full_like(gates, 1 / size)
        assert torch.allclose(got[row], (weights * keys).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every", [1, 4])
def test_rows_go_to_their_slots_and_padding_nowhere(every, device):
    cache, rows = torch.zeros(12, 10, device=device), torch.randn(6, 5, device=device)
    slots, lens = torch.tensor([3, -1, 0, 11, 12, 7], device=device), torch.tensor([4, 4, 8, 5, 4, 0]).int().to(device)
    rows_to_cache(rows, cache, slots, lens, every)
    want = torch.zeros(12, 10)
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < 12 and int(lens[row]) % every == 0:
            want[slot, :5] = rows[row].cpu()
    assert torch.equal(cache.cpu(), want)


def test_bad_arguments_are_named(device):
    cache, bias, table, seqs, lens = case(24, 4, device, torch.float32)
    with pytest.raises(ValueError, match="cache must have shape"):
        pooled(cache[:, :24], bias, table, PAGE, seqs, lens, 24, 4)
    with pytest.raises(ValueError, match="bias must have shape"):
        pooled(cache, bias[:2], table, PAGE, seqs, lens, 24, 4)
    with pytest.raises(ValueError, match="rows of 50 columns do not fit a cache of 48"):
        rows_to_cache(torch.zeros(6, 50, device=device), cache, seqs, lens)


@pytest.mark.parametrize("size", [1, 4])
def test_chosen_pools_are_expanded_as_in_plain_torch(size, device):
    """Rows with and without pools, with positions behind the last one, and padding."""
    lens = torch.tensor([0, 1, size, 3 * size + size // 2, 32, 33])
    table = torch.randperm(2 * PAGES, generator=torch.Generator().manual_seed(1)).to(torch.int32).reshape(2, PAGES)
    seqs = torch.tensor([0, 1, 0, 1, 0, 1])
    counts = lens // size
    num_chosen = counts.clamp(max=3)
    pages = RowPages(table.to(device), PAGE, seqs.int().to(device), lens.int().to(device))
    chosen, want = torch.zeros(6, 3, dtype=torch.int32), []
    for row, (seq, length, count) in enumerate(zip(seqs.tolist(), lens.tolist(), num_chosen.tolist(), strict=True)):
        slots = [int(table[seq, at // PAGE]) * PAGE + at % PAGE for at in range(length)]
        picked = sorted(torch.randperm(length // size, generator=torch.Generator().manual_seed(row))[:count].tolist())
        chosen[row, :count] = torch.tensor([slots[pool * size + size - 1] for pool in picked], dtype=torch.int32)
        found = [slots[pool * size + i] for pool in picked for i in range(size)]
        want.append(found + slots[length // size * size :])
    got, used = pools.expanded(chosen.to(device), num_chosen.int().to(device), pages, size)
    assert got.shape == (6, 3 * size + size - 1)
    assert [row[:count].tolist() for row, count in zip(got.cpu(), used.tolist(), strict=True)] == want
    assert int(got.min()) >= 0
    assert int(got.max()) < 2 * PAGES * PAGE
