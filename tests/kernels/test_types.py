"""RawTensor: sizes, views, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.types import QuantType, RawTensor, block_size, row_bytes, type_size


def test_sizes_of_the_block_formats():
    assert [block_size(t) for t in (QuantType.F32, QuantType.Q8_0, QuantType.Q4_K)] == [1, 32, 256]
    assert [type_size(t) for t in (QuantType.BF16, QuantType.Q4_0, QuantType.Q6_K)] == [2, 18, 210]
    assert row_bytes(QuantType.Q8_0, 96) == 102
    with pytest.raises(ValueError, match="300 elements cannot be Q4_K"):
        row_bytes(QuantType.Q4_K, 300)


def test_views_share_memory_and_know_their_place():
    data = torch.arange(4 * 3 * 34, dtype=torch.int64).to(torch.uint8)
    raw = RawTensor(data, QuantType.Q8_0, (4, 3, 32))
    assert (raw.rows, raw.cols, raw.row_bytes, raw.nbytes) == (12, 32, 34, 408)
    second = raw.select(1)
    assert second.shape == (3, 32)
    assert second.data.data_ptr() == data.data_ptr() + 3 * 34
    for one, other in zip(raw.unbind(), (raw.select(i) for i in range(4)), strict=True):
        assert (one.data.data_ptr(), one.shape) == (other.data.data_ptr(), other.shape)
    with pytest.raises(IndexError, match="two dimensions"):
        RawTensor(data[:34], QuantType.Q8_0, (32,)).unbind()
    assert raw.rows_slice(2, 5).data.data_ptr() == data.data_ptr() + 2 * 34
    assert raw.rows_slice(2, 5).shape == (3, 32)
    assert raw.reshape((12, 32)).shape == (12, 32)


def test_from_tensor_keeps_the_bits():
    values = torch.randn(3, 5, dtype=torch.bfloat16)
    raw = RawTensor.from_tensor(values)
    assert raw.qtype == QuantType.BF16
    assert torch.equal(raw.data.view(torch.bfloat16).reshape(3, 5), values)


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="needs 68 bytes, got 67"):
        RawTensor(torch.zeros(67, dtype=torch.uint8), QuantType.Q8_0, (2, 32))
    with pytest.raises(TypeError, match="uint8"):
        RawTensor(torch.zeros(68), QuantType.Q8_0, (2, 32))
    with pytest.raises(ValueError, match="contiguous"):
        RawTensor(torch.zeros(136, dtype=torch.uint8)[::2], QuantType.Q8_0, (2, 32))
    raw = RawTensor(torch.zeros(68, dtype=torch.uint8), QuantType.Q8_0, (2, 32))
    with pytest.raises(IndexError):
        raw.rows_slice(1, 3)
    with pytest.raises(IndexError):
        raw.select(2)
    with pytest.raises(ValueError, match="cannot reshape"):
        raw.reshape((1, 64))
    with pytest.raises(TypeError, match="float32, float16 and bfloat16"):
        RawTensor.from_tensor(torch.zeros(2, dtype=torch.int32))
