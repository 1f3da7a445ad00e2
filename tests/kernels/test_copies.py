"""Pinning memory in place: whole pages, once each, and all of it or nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.errors import KernelError
from ktransformers.kernels.copies import CudaCopies, PinnedRanges, page_ranges
from ktransformers.kernels.cuda import CudaDriver


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


def test_pinned_until_closed() -> None:
    pinner = FakePinner()
    ranges = PinnedRanges(pinner, [(5000, 10), (9000, 8000), (40960, 4096)])
    assert pinner.pinned == {4096: 4096, 8192: 12288, 40960: 4096}
    assert ranges.nbytes == 20480
    ranges.close()
    ranges.close()
    assert pinner.pinned == {}


def test_all_or_nothing() -> None:
    pinner = FakePinner(fails_at=1)
    with pytest.raises(KernelError, match="no more memory"):
        PinnedRanges(pinner, [(0, 1), (8192, 1)])
    assert pinner.pinned == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_on_a_device_wait_for_compute_and_compute_for_copies() -> None:
    driver = CudaDriver("cuda")
    source = torch.arange(1 << 20, dtype=torch.int32)
    nbytes = source.numel() * 4
    pinned = PinnedRanges(driver, [(source.data_ptr(), nbytes)], [source])
    copies = CudaCopies(driver)
    target = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    result = torch.zeros_like(target)
    busy = torch.randn(4096, 4096, device="cuda")
    for round_number in range(20):
        source.fill_(round_number)
        for _ in range(3):
            busy = busy @ busy.T / 4096  # the compute stream is late
        copies.wait(copies.compute_mark())
        copies.copy(target.data_ptr(), source.data_ptr(), nbytes)
        mark = copies.mark()
        copies.compute_waits(mark)
        result.copy_(target)
        target.fill_(-1)
        torch.cuda.synchronize()
        assert copies.is_done(mark)
        assert bool((result == round_number).all())
    pinned.close()
    with pytest.raises(KernelError, match="cuMemHostUnregister"):
        driver.unpin(source.data_ptr() // 4096 * 4096)
