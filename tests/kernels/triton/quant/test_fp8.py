"""FP8 weights with block scales, against fp64 products with torch's own conversion of e4m3."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton.common import runtime

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ktransformers.kernels.triton.linear.linear import VECTOR_ROWS, linear
from ktransformers.kernels.triton.quant.dequant import WeightMatrix
from ktransformers.kernels.triton.quant.repack import GpuLayout, can_join_rows, can_repack, join_rows, repack_fp8
from ktransformers.kernels.types import Fp8Matrix, OwnType

FP8 = OwnType.F8_E4M3


def every_number(rows, cols):
    """All finite e4m3 numbers, in random places, and scales of blocks that differ."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)
    weight = codes[torch.randint(len(codes), (rows, cols), generator=generator)]
    weight.view(-1)[: len(codes)] = codes
    scales = torch.rand(-(-rows // 128), -(-cols // 128), generator=generator) + 0.5
    values = weight.view(torch.float8_e4m3fn).double()
    wide = scales.repeat_interleave(128, dim=0)[:rows].repeat_interleave(128, dim=1)[:, :cols]
    return Fp8Matrix(weight, scales), values * wide.double()


@pytest.mark.every(4)
@pytest.mark.parametrize(("rows", "cols"), [(136, 160), (130, 160), (24, 160), (136, 96)])
@pytest.mark.parametrize("tokens", [2, 5])
def test_fp8_linear(rows, cols, tokens, device):
    weight, values = every_number(rows, cols)
    is_repacked = can_repack(FP8, rows, cols)
    assert is_repacked == (rows % 8 == 0)
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).half().to(device)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(device)
    data, layout = repack_fp8(weight.to(device)), GpuLayout.PLANES if is_repacked else GpuLayout.ROWS
    out = linear(x, WeightMatrix(data, FP8, rows, cols, layout), bias, torch.empty(tokens, rows, device=device))
    exact = x.cpu().double()
    wanted = exact @ values.T + bias.cpu().double()
    # The GEMV path keeps fp32: sums of 160 products. The tile path rounds each weight to fp16's 11 bits.
    tolerance = 2**-16 if is_repacked and tokens <= VECTOR_ROWS else 2**-11 + 2**-16
    assert ((out.cpu().double() - wanted).abs() <= tolerance * (exact.abs() @ values.abs().T) + 1e-6).all()


def test_a_column_is_exact(device):
    weight, values = every_number(64, 32)
    x = torch.zeros(4, 32, dtype=torch.float16, device=device)
    columns = [0, 6, 17, 31]
    x[torch.arange(4), columns] = 1
    data, out = repack_fp8(weight.to(device)), torch.empty(4, 64, device=device)
    linear(x, WeightMatrix(data, FP8, 64, 32, GpuLayout.PLANES), out=out)
    assert torch.equal(out.cpu(), values[:, columns].float().T)


def test_refuses_what_does_not_fit():
    weight, _ = every_number(136, 160)
    with pytest.raises(ValueError, match="32s"):
        repack_fp8(Fp8Matrix(weight.values[:, :148].contiguous(), weight.scales))
    part = (repack_fp8(weight), 136)
    with pytest.raises(ValueError, match="cannot be joined"):  # a block of scales would lie across both
        join_rows([part, part], FP8, 160)
    assert not can_join_rows(FP8, [128, 1 << 26], 64)
