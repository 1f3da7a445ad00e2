"""Copies of several matrices in one launch."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.kernels.triton.common.convert import CopySignal, convert_rows


@pytest.mark.parametrize("hidden", [1, 24, 2880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_three_matrices_equal_three_copies(hidden, dtype, device):
    generator = torch.Generator().manual_seed(0)
    sources = [
        torch.randn(5, hidden + 8, generator=generator).to(device, dtype)[:, :hidden],
        torch.randint(0, 512, (5, 8), generator=generator).to(device),
        torch.rand(5, 8, generator=generator).to(device),
    ]
    targets = [
        torch.zeros(7, hidden, dtype=dtype, device=device)[:5],
        torch.zeros(5, 8, dtype=torch.int32, device=device),
        torch.zeros(5, 8, device=device),
    ]
    for count in (1, 2, 3):
        for target in targets:
            target.fill_(-1)
        convert_rows(targets[:count], sources[:count])
        for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
            assert torch.equal(target, source.to(target.dtype) if i < count else torch.full_like(target, -1))


def test_pinned_memory_on_both_sides(device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    source, middle = torch.randn(3, 100).pin_memory(), torch.zeros(3, 100, device=device)
    target = torch.zeros(3, 100, dtype=torch.bfloat16, pin_memory=True)
    convert_rows([middle], [source])
    convert_rows([target], [middle])
    torch.cuda.synchronize()
    assert torch.equal(target, source.bfloat16())


@pytest.mark.parametrize("shape", [(1, 8), (1, 2880), (5, 2048)], ids=str)
def test_the_signal_is_behind_all_that_is_copied_and_can_be_repeated(shape, device):
    is_cuda = device.type == "cuda"
    word = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
    target = torch.zeros(shape, pin_memory=is_cuda)
    address = CudaDriver(device).device_address(word) if is_cuda else word.data_ptr()
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    for number in (1, 3 << 21 | 1 << 20 | 5):
        source = torch.full(shape, float(number), device=device)
        convert_rows([target], [source], CopySignal(counter, address, number))
        while word.item() != number:  # not a wait for the device: the word is all that is waited for
            assert is_cuda, "the word was not written"
        assert torch.equal(target, torch.full(shape, float(number)))
        assert counter.item() == 0


def test_arguments(device):
    x = torch.zeros(2, 4, device=device)
    convert_rows([x[:0]], [x[:0]])
    with pytest.raises(ValueError, match="nothing is copied"):
        convert_rows([x[:0]], [x[:0]], CopySignal(torch.zeros(1, dtype=torch.int32, device=device), 0, 1))
    with pytest.raises(ValueError, match="1 to 3 matrices"):
        convert_rows([x] * 4, [x] * 4)
    with pytest.raises(ValueError, match="matrix 1 must be"):
        convert_rows([x, x[:, :3]], [x, x])
    with pytest.raises(ValueError, match="rows of matrix 0 must be contiguous"):
        convert_rows([x.T], [x.T])
