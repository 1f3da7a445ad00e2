"""Block formats as numbers, in both layouts, against gguf.quants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants

from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.types import GroupType, OwnType, QuantType, block_size
from tests.support.triton_kernels.quant_cases import (
    FLOATS,
    TILE_TYPES,
    TYPES,
    pack_for_cpu,
    pack_fp8_for_cpu,
    random_fp8,
    random_matrix,
    random_tile_type,
)

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ktransformers.kernels.triton.quant import repack as repack
from ktransformers.kernels.triton.quant.dequant import WeightMatrix, dequantize
from ktransformers.kernels.triton.quant.repack import GpuLayout

# Every kind of code, of scale and of group, with zero points and without; the others are left to `--exhaustive`.
SOME = ("I4_32_F16", "I8_32_BF16_Z", "I4_128_F32_Z", "F8_128_BF16", "MXFP8", "NVFP4_F32")
GROUPS = [pytest.param(t, marks=() if t.name in SOME else pytest.mark.exhaustive) for t in GroupType]


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_ggml_layout_up_to_one_rounding(qtype, device):
    raw, values = random_matrix(qtype, 10, 512)
    raw = raw.to(device)
    # A GPU fuses s * q - m into one operation, so fp32 may differ in the last bit of the larger product. The
    # interpreter cuts bf16 off instead of rounding: one unit of its 8 bits.
    allowed = {torch.float32: 2**-23, torch.float16: 2**-11 + 2**-23, torch.bfloat16: 2**-7}
    largest = values.abs().amax()
    for dtype, unit in allowed.items():
        out = torch.empty(10, 512, dtype=dtype, device=device)
        assert dequantize(WeightMatrix(raw, qtype, 10, 512), out) is out
        error = (out.float().cpu() - values).abs()
        assert (error <= unit * values.abs() + 2**-23 * largest).all()


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_packed_layout_holds_the_same_numbers(qtype, device):
    raw, values = random_matrix(qtype, 24, 512)
    packed = repack.repack(raw.to(device), qtype, 24, 512)
    assert packed.shape == (repack.repacked_nbytes(qtype, 24, 512),)
    assert packed.numel() <= 1.03 * raw.numel()
    got = dequantize(WeightMatrix(packed, qtype, 24, 512, GpuLayout.PLANES)).cpu()
    # (1 + u / 256) 256 s - (256 s + m) in fp32: two roundings at 256 |s| (1 + 31 / 256) + |m|, that is below 512 |s|,
    # so 2 * 2^-24 * 512 |s| = 2^-14 |s|; |s| is at most 0.01 * 127 here (fp16 d below 0.01, 7-bit scales).
    assert (got - values).abs().max() <= 2**-14 * 1.27


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_the_layout_of_the_cpu_kernels_holds_the_same_numbers(qtype, device):
    cols = 512 if qtype in (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K) else 480
    raw, values = random_matrix(qtype, 20, cols)
    packed = pack_for_cpu(raw, qtype, 20, cols).to(device)
    got = dequantize(WeightMatrix(packed, qtype, 20, cols, GpuLayout.CPU_PACKED)).cpu()
    assert (got - values).abs().max() <= 2**-14 * 1.27  # as above


@pytest.mark.parametrize("qtype", [*TILE_TYPES, *GROUPS], ids=lambda t: t.name)
def test_types_that_have_the_layout_of_the_cpu_kernels_alone(qtype, device):
    cols = (
        256 if block_size(qtype) == 256 else 384 if block_size(qtype) == 128 else 320 if qtype.name == "NVFP4" else 96
    )
    data, values = random_tile_type(qtype, 20, cols)
    got = dequantize(WeightMatrix(data.to(device), qtype, 20, cols, GpuLayout.CPU_PACKED)).cpu()
    # (1 + u / 256) 256 s - (256 s + m): as above, with the minima and zero points that these types have, below 512 s.
    assert (got - values).abs().max() <= 2**-14 * max(1.27, values.abs().max())


def test_packing_of_many_matrices_is_that_of_each(device):
    raws = torch.stack([random_matrix(QuantType.Q6_K, 8, 256, seed)[0] for seed in range(3)]).to(device)
    together = repack.repack(raws, QuantType.Q6_K, 8, 256)
    assert together.shape == (3, raws[0].numel())
    for one, row in zip(raws, together, strict=True):
        assert torch.equal(repack.repack(one, QuantType.Q6_K, 8, 256), row)


def test_a_width_that_is_no_multiple_of_the_tile(device):
    raw, values = random_matrix(QuantType.Q4_0, 8, 96)
    packed = repack.repack(raw.to(device), QuantType.Q4_0, 8, 96)
    assert torch.equal(dequantize(WeightMatrix(raw.to(device), QuantType.Q4_0, 8, 96)).cpu(), values)
    assert (
        dequantize(WeightMatrix(packed, QuantType.Q4_0, 8, 96, GpuLayout.PLANES)).cpu() - values
    ).abs().max() <= 2**-14 * 0.01


def test_refuses_what_does_not_fit(device):
    raw, _ = random_matrix(QuantType.Q4_K, 12, 256)
    assert not repack.can_repack(QuantType.Q4_K, 12, 256)
    with pytest.raises(ValueError, match="no repacked form"):
        repack.repack(raw, QuantType.Q4_K, 12, 256)
    with pytest.raises(ValueError, match="whole matrices"):
        repack.repack(raw, QuantType.Q4_K, 16, 256)
    with pytest.raises(ValueError, match="no GPU kernel"):
        WeightMatrix(raw, QuantType.F32, 12, 256)
    with pytest.raises(ValueError, match="pack it first"):
        WeightMatrix(raw, QuantType.Q2_K, 12, 256)
    with pytest.raises(ValueError, match="contiguous matrices"):
        WeightMatrix(raw, QuantType.Q4_K, 11, 256)
    with pytest.raises(TypeError, match="uint8"):
        WeightMatrix(raw.float(), QuantType.Q4_K, 12, 256)


@pytest.mark.parametrize("layout", GpuLayout, ids=lambda x: x.name)
def test_every_exponent_and_code_of_mxfp4(layout, device):
    """Exact, down to subnormal numbers of fp32 and up to the last exponent with which all fit into it."""
    codes = (np.arange(16) | np.roll(np.arange(16), 5) << 4).astype(np.uint8)
    blocks = np.concatenate(
        [np.arange(256).clip(0, 252).astype(np.uint8)[:, None], np.broadcast_to(codes, (256, 16))], axis=1
    )
    raw = torch.from_numpy(blocks.reshape(32, 8 * 17))
    values = torch.from_numpy(quants.dequantize(raw.numpy(), QuantType.MXFP4))
    data = raw.to(device)
    if layout == GpuLayout.PLANES:
        data = repack.repack(data, QuantType.MXFP4, 32, 256)
    if layout == GpuLayout.CPU_PACKED:
        data = pack_for_cpu(raw, QuantType.MXFP4, 32, 256).to(device)
    got = dequantize(WeightMatrix(data, QuantType.MXFP4, 32, 256, layout)).cpu()
    assert torch.equal(got, values)


@pytest.mark.parametrize("qtype", FLOATS, ids=lambda t: t.name)
def test_floats_as_they_lie(qtype, device):
    raw, values = random_matrix(qtype, 10, 72)
    assert torch.equal(dequantize(WeightMatrix(raw.to(device), qtype, 10, 72)).cpu(), values)


@pytest.mark.parametrize("cols", [64, 96])
def test_bf16_in_the_layout_of_the_cpu_kernels(cols, device):
    raw, values = random_matrix(QuantType.BF16, 20, cols)
    data = pack_for_cpu(raw, QuantType.BF16, 20, cols).to(device)
    assert torch.equal(dequantize(WeightMatrix(data, QuantType.BF16, 20, cols, GpuLayout.CPU_PACKED)).cpu(), values)


@pytest.mark.parametrize(("rows", "cols"), [(136, 160), (24, 288), (20, 132)])
def test_fp8_in_the_layout_of_the_cpu_kernels(rows, cols, device):
    matrix, values = random_fp8(rows, cols)
    data = pack_fp8_for_cpu(matrix).to(device)
    assert torch.equal(dequantize(WeightMatrix(data, OwnType.F8_E4M3, rows, cols, GpuLayout.CPU_PACKED)).cpu(), values)
    if cols % 32 == 0:
        layout = GpuLayout.PLANES if repack.can_repack(OwnType.F8_E4M3, rows, cols) else GpuLayout.ROWS
        got = dequantize(WeightMatrix(repack.repack_fp8(matrix).to(device), OwnType.F8_E4M3, rows, cols, layout))
        assert torch.equal(got.cpu(), values)
