"""linear, batched_linear, dequantize_rows: against oracles, and equal bits over tiers, threads and batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants

from ktransformers.kernels import reference
from ktransformers.kernels.cpu import NATIVE_TYPES, batched_linear, dequantize_rows, linear
from ktransformers.kernels.types import QuantType, RawTensor, block_size
from tests.support.checks.decoding import decoded
from tests.support.checks.int8_arithmetic import SMALL_BLOCKS, int8_linear, int8_tolerance

TYPES = sorted(NATIVE_TYPES)
QUANTIZED = [t for t in TYPES if t not in (QuantType.F32, QuantType.F16, QuantType.BF16)]


def widths(qtype):
    """Widths that leave every kind of remainder behind blocks, chunks and registers."""
    if qtype in (QuantType.F32, QuantType.F16, QuantType.BF16):
        return (1, 7, 16, 531, 1040)
    if qtype is QuantType.NVFP4:
        return (64, 192, 576)
    if qtype is QuantType.Q1_0:
        return (128, 384, 640)
    return (32, 96, 544) if qtype in SMALL_BLOCKS else (256, 768)


def activations(rows, cols, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def test_covers_every_type_that_gguf_decodes():
    assert {QuantType(kind) for kind in quants._type_traits} <= NATIVE_TYPES


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_close_to_dequantized_weights(qtype, make_weight, pool):
    for cols in widths(qtype):
        weight, x = make_weight(qtype, 37, cols), activations(7, cols)
        bias = torch.linspace(-1, 1, 37)
        ours, oracle = linear(x, weight, pool, bias=bias), reference.linear(x, weight, bias)
        if qtype in QUANTIZED:
            tolerance = int8_tolerance(x, weight)
        else:
            # fp32 sums of K products: no more than K + 32 roundings of the sum of magnitudes.
            magnitude = x.abs() @ reference.dequantize(weight).abs().T + 1
            tolerance = magnitude * (cols + 32) * 2.0**-24
        assert bool(((ours - oracle).abs() <= tolerance).all()), f"{qtype.name} {cols}"


@pytest.mark.parametrize("qtype", QUANTIZED, ids=lambda t: t.name)
def test_equals_the_written_down_int8_arithmetic(qtype, make_weight, pools):
    cols = next(cols for cols in (160, 192, 384, 512) if cols % block_size(qtype) == 0)
    weight, x = make_weight(qtype, 5, cols), activations(6, cols)
    x[1] *= 1e-3
    x[2, :32] = 0
    expected = int8_linear(x, weight)
    for each in pools:
        assert torch.equal(linear(x, weight, each), expected), each
        assert torch.equal(linear(x[:2], weight, each), expected[:2]), each


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_same_bits_for_all_tiers_threads_and_batches(qtype, make_weight, pools):
    for cols in widths(qtype)[-2:]:
        weight, x = make_weight(qtype, 50, cols), activations(141, cols)
        expected = linear(x, weight, pools[0])
        for each in pools[1:]:
            assert torch.equal(linear(x, weight, each), expected), each
        for each in (pools[0], pools[-1]):
            for start, stop in ((0, 1), (1, 3), (3, 6), (6, 11), (11, 24), (24, 101)):
                assert torch.equal(linear(x[start:stop], weight, each), expected[start:stop]), (each, start, stop)
        part = linear(x[:9], weight.rows_slice(17, 38), pools[-1])
        assert torch.equal(part, expected[:9, 17:38])


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_unaligned_weights_that_end_at_a_page(qtype, make_weight, pools, guarded):
    for cols in widths(qtype):
        weight, x = make_weight(qtype, 19, cols), activations(6, cols)
        end = RawTensor(guarded.copy_to_end(weight.data), qtype, weight.shape)
        shifted = torch.empty(weight.nbytes + 1, dtype=torch.uint8)[1:]
        shifted.copy_(weight.data)
        odd = RawTensor(shifted, qtype, weight.shape)
        ids = torch.tensor([18, 0])
        x_end = guarded.copy_to_end(x.reshape(-1).view(torch.uint8)).view(torch.float32).reshape(6, cols)
        for each in pools[::3]:
            for rows in (1, 6):
                expected = linear(x[:rows], weight, each)
                assert torch.equal(linear(x_end[6 - rows :], end, each), linear(x[6 - rows :], weight, each))
                assert torch.equal(linear(x[:rows], odd, each), expected)
            assert torch.equal(dequantize_rows(end, ids, each), dequantize_rows(weight, ids, each))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_dequantize_rows_equals_gguf(qtype, make_weight, pools):
    for cols in widths(qtype):
        weight = make_weight(qtype, 23, cols)
        ids = torch.tensor([22, 0, 5, 5, 1])
        rows = weight.data.numpy().reshape(23, weight.row_bytes)
        expected = torch.from_numpy(decoded(rows, qtype)).reshape(23, cols)
        for each in pools:
            assert torch.equal(dequantize_rows(weight, ids, each), expected[ids])
    with pytest.raises(IndexError, match=r"ids\[0\] is 23"):
        dequantize_rows(weight, torch.tensor([23]), pools[0])
    with pytest.raises(IndexError, match="-1"):
        dequantize_rows(weight, torch.tensor([0, -1]), pools[0])


@pytest.mark.parametrize("qtype", [QuantType.F32, QuantType.BF16, QuantType.Q8_0], ids=lambda t: t.name)
def test_batched_linear_is_one_linear_per_matrix(qtype, make_weight, pools):
    weight, x = make_weight(qtype, 3, 21, 64), torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([linear(x[:, b].contiguous(), weight.select(b), pools[0]) for b in range(3)], dim=1)
    for each in pools:
        assert torch.equal(batched_linear(x, weight, each), expected)
        assert torch.equal(batched_linear(x[:1], weight, each), expected[:1])


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_not_a_number_stays_in_its_row(qtype, make_weight, pools):
    cols = 256
    weight, x = make_weight(qtype, 20, cols), activations(6, cols)
    clean = linear(x, weight, pools[0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        dirty = x.clone()
        dirty[3, 100] = bad
        for each in pools:
            out = linear(dirty, weight, each)
            assert not torch.isfinite(out[3]).any()
            assert torch.equal(out[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


def test_tiny_activations_count_as_zero(make_weight, pool):
    weight = make_weight(QuantType.Q8_0, 8, 64)
    assert torch.equal(linear(torch.full((1, 64), 1e-38), weight, pool), torch.zeros(1, 8))
    assert torch.equal(linear(torch.zeros(1, 64), weight, pool), torch.zeros(1, 8))


def test_empty_and_given_outputs(make_weight, pool):
    weight = make_weight(QuantType.Q4_K, 10, 256)
    assert linear(torch.empty(0, 256), weight, pool).shape == (0, 10)
    assert linear(torch.randn(2, 256), make_weight(QuantType.F32, 0, 256), pool).shape == (2, 0)
    assert torch.equal(linear(torch.empty(2, 0), make_weight(QuantType.F32, 3, 0), pool), torch.zeros(2, 3))
    x, out = activations(3, 256), torch.empty(3, 10)
    assert linear(x, weight, pool, out=out) is out
    assert torch.equal(out, linear(x, weight, pool))
    assert dequantize_rows(weight, torch.empty(0, dtype=torch.int64), pool).shape == (0, 256)


def test_bad_arguments_are_named(make_weight, pool):
    weight, x = make_weight(QuantType.Q8_0, 10, 64), activations(3, 64)
    with pytest.raises(TypeError, match=r"x must be torch\.float32"):
        linear(x.double(), weight, pool)
    with pytest.raises(ValueError, match=r"x must have shape \[any, 64\], got \[3, 32\]"):
        linear(x[:, :32].contiguous(), weight, pool)
    with pytest.raises(ValueError, match="x must be contiguous"):
        linear(activations(64, 3).T, weight, pool)
    with pytest.raises(ValueError, match="bias must have shape"):
        linear(x, weight, pool, bias=torch.zeros(9))
    with pytest.raises(ValueError, match="out must have shape"):
        linear(x, weight, pool, out=torch.empty(3, 11))
    with pytest.raises(ValueError, match="2 dimensions"):
        linear(x, weight.reshape((2, 5, 64)), pool)
    with pytest.raises(ValueError, match="Q8_K, which has no kernel"):
        linear(x, RawTensor(torch.zeros(292, dtype=torch.uint8), QuantType.Q8_K, (1, 256)), pool)
    square = make_weight(QuantType.Q8_0, 64, 64)
    with pytest.raises(ValueError, match="out must not be one of the inputs"):
        linear(x, square, pool, out=x)
    with pytest.raises(TypeError, match=r"ids must be torch\.int64"):
        dequantize_rows(weight, torch.zeros(1, dtype=torch.int32), pool)


def test_every_mxfp4_scale(pools):
    """All 256 exponents, subnormal and infinite results included, times all 16 codes."""
    blocks = np.zeros((256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17
    weight = RawTensor(torch.from_numpy(blocks.reshape(-1)), QuantType.MXFP4, (256, 32))
    with np.errstate(over="ignore"):
        expected = quants.dequantize(blocks, QuantType.MXFP4)
    for each in pools:
        ours = dequantize_rows(weight, torch.arange(256), each)
        assert (ours.numpy().view(np.uint32) == expected.view(np.uint32)).all()


def test_every_nvfp4_scale(pools):
    """All 256 codes of scales, those that are no numbers included, times all 16 codes of weights."""
    blocks = np.zeros((256, 36), dtype=np.uint8)
    blocks[:, :4] = np.arange(256)[:, None]
    blocks[:, 4:] = np.tile(np.arange(16) * 17, 2)
    weight = RawTensor(torch.from_numpy(blocks.reshape(-1)), QuantType.NVFP4, (256, 64))
    expected, x = quants.dequantize(blocks, QuantType.NVFP4), activations(6, 64)
    for each in pools:
        ours = dequantize_rows(weight, torch.arange(256), each)
        assert (ours.numpy().view(np.uint32) == expected.astype(np.float32).view(np.uint32)).all()
        assert torch.equal(linear(x, weight, each), int8_linear(x, weight))


def test_every_byte_of_tq1_0(pools):
    """Also those that no quantizer writes: five digits in a byte that has more than 243 values."""
    blocks = np.zeros((256, 54), dtype=np.uint8)
    blocks[:, :52] = np.arange(256)[:, None] + np.arange(52)
    blocks[:, 53] = 0x3C
    weight, x = RawTensor(torch.from_numpy(blocks.reshape(-1)), QuantType.TQ1_0, (256, 256)), activations(6, 256)
    expected = torch.from_numpy(quants.dequantize(blocks, QuantType.TQ1_0))
    for each in pools:
        assert torch.equal(dequantize_rows(weight, torch.arange(256), each), expected)
        assert torch.equal(linear(x, weight, each), int8_linear(x, weight))
