"""The best tokens of rows of logits on the GPU: == with torch's sort, ties and what is not finite included."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton.common.candidates import MAX_VOCAB, BestTokens

ROOM = 128
KINDS = ("normal", "rounded", "few", "zeros", "clustered", "tiny", "ends")


def make_row(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    row = torch.randn(vocab, generator=generator) * 4
    if kind == "rounded":
        return row.bfloat16().float()  # as most LM heads leave them
    if kind == "few":
        return row.round()
    if kind == "zeros":
        return torch.where(row > 0, 0.0, -0.0)
    if kind == "clustered":
        first = vocab // 3
        row[first : first + 100] += 30  # many of the best in few groups
    elif kind == "tiny":
        row *= 2.0**-147  # subnormals
    elif kind == "ends":
        row -= 50
        row[0] = row[-1] = 3.0
    return row


def make_rows(vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([make_row(kind, vocab, generator) for kind in KINDS])


def lowest_best(row: torch.Tensor) -> int:
    return int((row == row.max()).nonzero()[0])


def is_over(row: torch.Tensor, top: int) -> bool:
    """Whether more than ROOM tokens are as good as the top-th, or as many groups of 64 as the top-th best group."""
    maxima = torch.stack([group.max() for group in row.split(64)]).sort(descending=True).values
    held = maxima >= maxima[min(top, len(maxima)) - 1] if top <= len(maxima) else maxima == maxima
    return int(held.sum()) > ROOM or int((row >= row.sort(descending=True).values[min(top, len(row)) - 1]).sum()) > ROOM


def check(rows: torch.Tensor, tops: tuple[int, ...], device: torch.device) -> None:
    vocab = rows.shape[1]
    logits = torch.empty(len(rows), vocab + 3, device=device)[:, :vocab].copy_(rows)  # rows that lie apart
    tools = BestTokens.make(len(rows) + 1, vocab, ROOM, device)
    assert tools.find_best(logits).flatten().tolist() == [lowest_best(row) for row in rows]
    for top in tops:
        for row, found in zip(rows, tools.find_candidates(logits, top).cpu(), strict=True):
            assert int(found[0]) == lowest_best(row)
            count = int(found[1])
            assert (count == -1) == is_over(row, top)
            if count == -1:
                continue
            ids = found[2 : 2 + count].long()
            assert torch.equal(ids, ids.unique())  # ascending
            assert torch.equal(found[2 + ROOM : 2 + ROOM + count], row[ids].view(torch.int32))
            assert min(top, vocab) <= count <= ROOM
            assert torch.equal(ids, (row >= row[ids].min()).nonzero().flatten())


@pytest.mark.every(4)
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 500, 2049, 32_000])
def test_best_and_candidates(vocab: int, device: torch.device) -> None:
    check(make_rows(vocab, vocab), (1, 2, 20, 64), device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_large_vocabularies(vocab: int, device: torch.device) -> None:
    check(make_rows(vocab, vocab)[:2], (50,), device)


@pytest.mark.every(4)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 77, 199])
def test_rows_that_are_not_finite_have_nothing(bad: float, place: int, device: torch.device) -> None:
    logits = make_rows(200, 3).to(device)
    wanted = [lowest_best(row) for row in logits.cpu()]
    logits[2, place], wanted[2] = bad, -1
    tools = BestTokens.make(len(logits), 200, ROOM, device)
    assert tools.find_best(logits).flatten().tolist() == wanted
    table = tools.find_candidates(logits, 5).cpu()
    assert table[:, 0].tolist() == wanted
    assert int(table[2, 1]) == -1
    assert int(table[0, 1]) >= 5


def test_no_rows(device: torch.device) -> None:
    tools = BestTokens.make(2, 200, ROOM, device)
    assert tools.find_best(torch.empty(0, 200, device=device)).shape == (0, 1)
    assert tools.find_candidates(torch.empty(0, 200, device=device), 1).shape == (0, 2 + 2 * ROOM)


def test_bad_arguments_are_named(device: torch.device) -> None:
    tools = BestTokens.make(2, 200, ROOM, device)
    with pytest.raises(TypeError, match="fp32"):
        tools.find_best(torch.zeros(2, 200, dtype=torch.bfloat16, device=device))
    for shape in ((3, 200), (2, 300)):
        with pytest.raises(ValueError, match="do not fit"):
            tools.find_best(torch.zeros(shape, device=device))
    for top in (0, 65):
        with pytest.raises(ValueError, match="top must be"):
            tools.find_candidates(torch.zeros(2, 200, device=device), top)
    with pytest.raises(ValueError, match="power of two"):
        BestTokens.make(2, 200, 100, device)
    with pytest.raises(ValueError, match="logits"):
        BestTokens.make(2, MAX_VOCAB + 1, ROOM, device)
