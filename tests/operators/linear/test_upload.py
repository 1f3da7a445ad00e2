"""Parts on their way to a device: the same bytes, a bounded piece at a time."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.linear import upload as module


@pytest.mark.parametrize("sizes", [[], [0], [7], [8], [3, 5, 1], [20, 0, 3], [8, 8], [1] * 9, [5, 30, 2]])
def test_pieces_are_bounded_and_make_the_whole(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 8)
    whole = torch.arange(sum(sizes), dtype=torch.uint8)
    pieces = [torch.cat(some) for some in module._pieces(whole.split(sizes))]
    assert all(piece.numel() == 8 for piece in pieces[:-1])
    assert all(0 < piece.numel() <= 8 for piece in pieces)
    assert torch.equal(torch.cat([*pieces, whole[:0]]), whole)


def test_parts_arrive_side_by_side() -> None:
    pool = WorkerPool(2)
    parts = [torch.arange(12, dtype=torch.uint8).view(3, 4), torch.arange(5, dtype=torch.uint8)]
    assert module.upload(parts, torch.device("cpu"), pool).tolist() == [*range(12), *range(5)]
    pool.close()
