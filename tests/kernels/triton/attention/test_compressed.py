"""What surrounds attention over compressed keys on the GPU, against complex rotations, loops and lists in fp64."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.attention_call import RowPages
from ktransformers.kernels.triton.attention.compressed import (
    Entries,
    attended,
    keep_values,
    make_entries,
    turn,
)

TOLERANCE = 1e-5  # of fp32, whose sums are of a hundred terms at most
PAGE, SLOTS = 6, 60


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """fp64 [..., D], whose last columns are turned by angles [..., P / 2]."""
    first = x.shape[-1] - 2 * angles.shape[-1]
    pairs = torch.view_as_complex(x[..., first:].double().reshape(*angles.shape, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles.double()), angles.double())).flatten(-2)
    return torch.cat((x[..., :first].double(), turned), -1)


def normalized(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("dim", [16, 24])
def test_heads_are_normalized_and_turned_and_turned_back(dim: int, has_weight: bool, device: torch.device) -> None:
    x, angles, weight = normal(5, 3, dim + 4)[..., :dim], normal(5, 4, seed=1), normal(dim, seed=2)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    there = turn(x.to(device), cos, sin, norm=(weight.to(device) if has_weight else None, 1e-3))
    spread = angles[:, None].expand(-1, 3, -1)
    want = rotated(normalized(x, weight if has_weight else 1.0, 1e-3), spread)
    torch.testing.assert_close(there.cpu().double(), want, atol=TOLERANCE, rtol=TOLERANCE)
    back = turn(there, cos, sin, is_back=True)
    torch.testing.assert_close(back.cpu().double(), rotated(want, -spread), atol=TOLERANCE, rtol=TOLERANCE)


def test_keys_go_to_their_slots_and_padding_goes_nowhere(device: torch.device) -> None:
    x, angles, cache = normal(4, 1, 16), normal(4, 2, seed=1), torch.full((6, 1, 40), 7.0)
    slots, kept = torch.tensor([5, -1, 0, 6]), cache.to(device)
    turn(x.to(device), angles.cos().to(device), angles.sin().to(device), cache=kept, slot_mapping=slots.to(device))
    cache[[5, 0], :, :16] = rotated(x, angles[:, None])[[0, 2]].float()
    torch.testing.assert_close(kept.cpu(), cache, atol=TOLERANCE, rtol=TOLERANCE)


def places(device: torch.device, lens: list[int], seqs: list[int]) -> RowPages:
    table = torch.randperm(SLOTS // PAGE, generator=torch.Generator().manual_seed(3)).to(torch.int32).view(2, -1)
    return RowPages(table.to(device), PAGE, torch.tensor(seqs).int().to(device), torch.tensor(lens).int().to(device))


def slot(pages: RowPages, seq: int, position: int) -> int:
    return int(pages.block_table[seq, position // PAGE]) * PAGE + position % PAGE


@pytest.mark.parametrize(("rate", "series"), [(4, 2), (9, 1)])
def test_entries_are_weighted_sums_of_their_tokens(rate: int, series: int, device: torch.device) -> None:
    """Of two sequences, also where the tokens before the first one are missing; frequencies up to thousands."""
    dim, wide = 16, 2 * series * 16
    lens = [rate - 1, rate, 2 * rate, 2 * rate, 3 * rate - 1, 0]
    pages, slots = places(device, lens, [0, 0, 0, 1, 1, 1]), [-1] * 6
    for row in (1, 2, 3):
        slots[row] = slot(pages, [0, 0, 0, 1, 1, 1][row], lens[row] - 1)
    cache, values = torch.full((SLOTS, 3 * dim + wide), 9.0), normal(SLOTS, wide, seed=1)
    bias, weight, frequencies = (
        normal(rate, series * dim, seed=2),
        normal(dim, seed=3),
        torch.tensor([1.0, 4321.0, 0.1]),
    )
    kept = cache.to(device)
    every = torch.arange(SLOTS).to(device)
    keep_values(values[:, : wide // 2].to(device), values[:, wide // 2 :].to(device), kept, 3 * dim, every)
    entries = Entries(
        rate, series, dim, 3 * dim, bias.to(device), weight.to(device), 1e-3, frequencies.to(device), 1.25
    )
    make_entries(kept, entries, torch.tensor(slots).to(device), pages)
    cache[:, 3 * dim :] = values
    for row in (1, 2, 3):
        start, seq = lens[row] - rate, int(pages.seq_ids[row])
        parts, gates = [], []
        for one in range(series):
            for j in range(rate):
                position = start + j - (series - 1 - one) * rate
                if position >= 0:
                    token = values[slot(pages, seq, position)].double().view(2, series, dim)[:, one]
                    parts.append(token[0])
                    gates.append(token[1] + bias[j].view(series, dim)[one])
        pooled = (torch.stack(gates).softmax(0) * torch.stack(parts)).sum(0)
        turned = rotated(normalized(pooled, weight, 1e-3), start * frequencies)
        turned[-6:] *= 1.25
        cache[slots[row], dim : 2 * dim] = turned.float()
    torch.testing.assert_close(kept.cpu(), cache, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("rate", "is_chosen"), [(0, False), (3, False), (3, True)])
def test_rows_see_entries_and_then_their_window(rate: int, is_chosen: bool, device: torch.device) -> None:
    lens, seqs, window, units, most = [1, 7, 20, 30, 0], [0, 1, 1, 0, 0], 4, 5, 3 if is_chosen else 10
    pages = places(device, lens, seqs)
    # runs of 3 slots, two of a page: the first entry, and every second one from there on
    runs = [[slot(pages, seq, 6 * i) // 3 for i in range(3)] for seq in seqs]
    chosen = torch.tensor(runs, dtype=torch.int32, device=device) if is_chosen else None
    table, counts = attended(pages, window, units, 300, rate=rate, most=most if rate else 0, chosen=chosen)
    for row, (length, seq) in enumerate(zip(lens, seqs, strict=True)):
        entries = range(min(length // rate, most)) if rate else []
        ends = [(2 * i if is_chosen else i) * rate + rate - 1 for i in entries]
        want = [slot(pages, seq, end) * units + 1 for end in ends]
        want += [slot(pages, seq, position) * units for position in range(max(length - window, 0), length)]
        assert table[row, : int(counts[row])].tolist() == want
        assert not table[row, int(counts[row]) :].any()


def test_bad_arguments_are_named(device: torch.device) -> None:
    x, angles = normal(2, 1, 16).to(device), normal(2, 9).to(device)
    with pytest.raises(ValueError, match="no fewer than the 18 that are rotated"):
        turn(x, angles, angles)
    pages, ids = places(device, [4, 4], [0, 1]), torch.zeros(2, dtype=torch.int64, device=device)
    entries = Entries(4, 1, 16, 32, normal(4, 16).to(device), angles.new_ones(16), 1e-6, angles[0, :2], 1.0)
    with pytest.raises(ValueError, match="a cache of 40 columns has no room for entries of 16"):
        make_entries(normal(60, 40).to(device), entries, ids, pages)
    with pytest.raises(TypeError, match="chosen must be int32"):
        attended(pages, 4, 5, 30, rate=4, most=2, chosen=ids[:, None])
