"""Pinning memory in place: whole pages, once each, and all of it or nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.errors import KernelError
from ktransformers.kernels.transfer.copies import PinnedRanges, page_ranges


class FakePinner:
    """Refuses what the driver refuses: pages that are pinned already, or are not."""

    def __init__(self, fails_at: int = -1) -> None:
        self.pinned: dict[int, int] = {}
        self.fails_at = fails_at

    def pin(self, address: int, nbytes: int) -> None:
        if len(self.pinned) == self.fails_at:
            raise KernelError("no more memory can be locked")
        assert address % 4096 == 0
        assert nbytes % 4096 == 0
        assert all(address + nbytes <= a or a + n <= address for a, n in self.pinned.items())
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 30000)), max_size=20))
def test_every_byte_is_in_one_range(pieces: list[tuple[int, int]]) -> None:
    pages = {page for address, n in pieces for page in range(address // 4096, (address + n - 1) // 4096 + 1)}
    ranges = page_ranges(pieces)
    assert [page for first, n in ranges for page in range(first // 4096, (first + n) // 4096)] == sorted(pages)
    assert all(first + n < after for (first, n), (after, _) in pairwise(ranges))  # copies over neighbours stay in one


def test_pinned_until_closed() -> None:
    pinner = FakePinner()
    ranges = PinnedRanges(pinner, [(5000, 10), (9000, 8000), (40960, 4096)])
    assert pinner.pinned == {4096: 16384, 40960: 4096}
    assert ranges.nbytes == 20480
    ranges.close()
    ranges.close()
    assert pinner.pinned == {}


def test_all_or_nothing() -> None:
    pinner = FakePinner(fails_at=1)
    with pytest.raises(KernelError, match="no more memory"):
        PinnedRanges(pinner, [(0, 1), (8192, 1)])
    assert pinner.pinned == {}
