"""Copies beside what a GPU computes, from memory that is pinned in place, on a real one."""

from __future__ import annotations

import pytest
import torch

from ktransformers.errors import KernelError
from ktransformers.kernels.transfer.copies import CudaCopies, PinnedRanges
from ktransformers.kernels.transfer.cuda import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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
