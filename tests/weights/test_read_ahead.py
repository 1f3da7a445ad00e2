"""Reading ahead: everything, in order, as far ahead as allowed, and no further once loading ends."""

from __future__ import annotations

import queue

import pytest
import torch

from ktransformers.weights import read_ahead as module
from ktransformers.weights.read_ahead import ReadAhead

STEP = 1000


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[tuple[int, int]]:
    """(address, bytes) of each request."""
    requests: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr(module, "_STEP", STEP)
    monkeypatch.setattr(module, "read_ahead", lambda part: requests.put((part.data_ptr(), part.numel())))
    return requests


def test_parts_are_asked_for_in_order_and_in_time(asked: queue.Queue[tuple[int, int]]) -> None:
    data = torch.zeros(10_000, dtype=torch.uint8)
    parts, start = [data[4000:6500], data[:1200]], data.data_ptr()
    with ReadAhead(parts, distance=2000) as ahead:
        assert [asked.get(timeout=60) for _ in range(2)] == [(start + 4000, STEP), (start + 5000, STEP)]
        assert asked.empty()  # the third begins where the distance ends
        ahead.advance(501)
        assert [asked.get(timeout=60) for _ in range(2)] == [(start + 6000, 500), (start, STEP)]
        ahead.advance(5000)
        assert asked.get(timeout=60) == (start + 1000, 200)
    assert asked.empty()


def test_an_error_while_loading_ends_it(asked: queue.Queue[tuple[int, int]]) -> None:
    parts = [torch.zeros(10_000, dtype=torch.uint8)]
    ahead = ReadAhead(parts, distance=1)
    with pytest.raises(KeyError), ahead:
        raise KeyError
    assert not ahead._thread.is_alive()
    assert asked.qsize() <= 1
