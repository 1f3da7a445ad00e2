"""Products with quantized weights, against fp64 products with the values that gguf gives."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional

from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.types import Activation, GroupType, QuantType
from tests.support.triton_kernels.quant_cases import (
    GRID_TYPES,
    TILE_TYPES,
    TYPES,
    pack_for_cpu,
    random_matrix,
    random_tile_type,
)

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ktransformers.kernels.triton.linear.linear import (
    VECTOR_ROWS,
    Workspace,
    _gemv_plan,
    _tile_plan,
    gated_linear,
    linear,
    linear_pair,
)
from ktransformers.kernels.triton.quant import repack as repack
from ktransformers.kernels.triton.quant.dequant import WeightMatrix
from ktransformers.kernels.triton.quant.repack import GpuLayout

# Errors are measured against sum_k |x w|. The vector kernel keeps weights in fp32 within 2^-14 |s| (test_dequant), and
# the mean |w| of random bits is at least 2 |s|: 2^-15. The tile kernel rounds each weight to x's type, 11 bits (fp16)
# or 8 (bf16): half a unit of the last place each. fp32 sums of a few hundred products add less than 2^-16 to both.
VECTOR = 2**-15 + 2**-16
ROUNDED = {torch.float16: 2**-11 + 2**-16, torch.bfloat16: 2**-8 + 2**-16}


def check(out, x, values, bias, tolerance):
    x, values = x.cpu().double(), values.double()
    wanted = x @ values.T + (0 if bias is None else bias.cpu().double())
    assert ((out.cpu().double() - wanted).abs() <= tolerance * (x.abs() @ values.abs().T) + 1e-6).all()


@pytest.mark.every(5)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_packed_weights(qtype, tokens, device):
    raw, values = random_matrix(qtype, 72, 512)
    weight = repack.repack(raw.to(device), qtype, 72, 512)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(1)).half().to(device)
    bias = torch.randn(72, generator=torch.Generator().manual_seed(2)).to(device)
    out = torch.full((tokens, 72), torch.nan, device=device)
    assert linear(x, WeightMatrix(weight, qtype, 72, 512, GpuLayout.PLANES), bias, out) is out
    check(out, x, values, bias, VECTOR if tokens <= VECTOR_ROWS else ROUNDED[torch.float16])


@pytest.mark.every(3)
@pytest.mark.parametrize("qtype", GRID_TYPES, ids=lambda t: t.name)
def test_weights_with_a_grid(qtype, device):
    """Few rows as they stream, more rows rounded."""
    raw, values = random_matrix(qtype, 20, 512)
    weight = pack_for_cpu(raw, qtype, 20, 512).to(device)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).half().to(device)
    bias = torch.randn(20, generator=torch.Generator().manual_seed(2)).to(device)
    space = Workspace.allocate(device, 8)
    for tokens in (1 + int(qtype) % VECTOR_ROWS, 5):
        out = torch.full((tokens, 20), torch.nan, device=device)
        linear(x[:tokens], WeightMatrix(weight, qtype, 20, 512, GpuLayout.CPU_PACKED), bias, out, workspace=space)
        check(out, x[:tokens], values, bias, VECTOR if tokens <= VECTOR_ROWS else ROUNDED[torch.float16])
    assert not space.counters.any()
    with pytest.raises(ValueError, match="in the CPU's tiles alone"):
        linear(x, WeightMatrix(weight, qtype, 20, 512))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_weights_in_ggml_layout(qtype, device):
    raw, values = random_matrix(qtype, 9, 256)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).half().to(device)
    out = linear(x, WeightMatrix(raw.to(device), qtype, 9, 256), out=torch.empty(2, 9, device=device))
    check(out, x, values, None, ROUNDED[torch.float16])


@pytest.mark.exhaustive
@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("qtype", "tokens"),
    [(t, 1) for t in TILE_TYPES]
    + [(t, m) for t in (QuantType.Q2_K, GroupType.I4_128_F16_Z) for m in (3, 5)]
    + [(GroupType.NVFP4_F32, 2)],
)
def test_weights_in_the_layout_of_the_cpu_kernels(qtype, tokens, device):
    cols = 256 if qtype is QuantType.Q2_K or tokens > 1 else 768  # several steps, the last in part
    data, values = random_tile_type(qtype, 40, cols)
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).half().to(device)
    out = torch.full((tokens, 40), torch.nan, device=device)
    linear(x, WeightMatrix(data.to(device), qtype, 40, cols, GpuLayout.CPU_PACKED), out=out)
    check(out, x, values, None, VECTOR if tokens <= VECTOR_ROWS else ROUNDED[torch.float16])


@pytest.mark.parametrize("tokens", [2, 20])
def test_bf16_and_a_width_of_odd_blocks(tokens, device):
    if tokens > VECTOR_ROWS and device.type == "cpu":
        pytest.skip("the interpreter multiplies the bits of bf16 in tl.dot")
    raw, values = random_matrix(QuantType.Q8_0, 16, 352)
    weight = repack.repack(raw.to(device), QuantType.Q8_0, 16, 352)
    x = torch.randn(tokens, 352, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    out = linear(x, WeightMatrix(weight, QuantType.Q8_0, 16, 352, GpuLayout.PLANES))
    assert out.dtype == torch.bfloat16
    # The result is rounded to bf16, 2^-9 of |out| <= sum |x w|; the interpreter cuts off: twice as much for both.
    check(out, x, values, None, 2 * (ROUNDED[torch.bfloat16] + 2**-9))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_joined_matrices_are_the_matrix_of_all_rows(qtype, device):
    raws = [random_matrix(qtype, rows, 512, seed)[0].to(device) for seed, rows in enumerate((16, 24))]
    parts = [(repack.repack(raw, qtype, len(raw), 512), len(raw)) for raw in raws]
    whole = repack.repack(torch.cat(raws), qtype, 40, 512)
    assert torch.equal(repack.join_rows(parts, qtype, 512), whole)
    twice = torch.stack([raws[0], raws[0].flip(0)], dim=1).flatten(0, 1)
    pair = [parts[0], (repack.repack(raws[0].flip(0), qtype, 16, 512), 16)]
    joined = repack.join_rows(pair, qtype, 512, interleaved=True)
    assert torch.equal(joined, repack.repack(twice, qtype, 32, 512))
    with pytest.raises(ValueError, match="are not 24 rows"):
        repack.join_rows(parts, qtype, 512, interleaved=True)


@pytest.mark.every(3)
@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("cols", [512, 2048])
def test_two_matrices_of_two_types_in_one_launch(tokens, cols, device):
    types, rows = (QuantType.Q4_K, QuantType.Q6_K), (40, 24)
    cases = [random_matrix(qtype, count, cols) for qtype, count in zip(types, rows, strict=True)]
    packed = [repack.repack(case[0].to(device), *each, cols) for case, *each in zip(cases, types, rows, strict=True)]
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).half().to(device)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(device)
    space = Workspace.allocate(device, 8)
    out = torch.full((tokens, 64), torch.nan, device=device)
    matrices = [WeightMatrix(*case, cols, GpuLayout.PLANES) for case in zip(packed, types, rows, strict=True)]
    assert linear_pair(x, (matrices[0], matrices[1]), bias, out, workspace=space) is out
    tolerance = VECTOR if tokens <= VECTOR_ROWS else ROUNDED[torch.float16]
    check(out, x, torch.cat([values for _, values in cases]), bias, tolerance)
    assert not space.counters.any()


@pytest.mark.every(3)
@pytest.mark.parametrize("tokens", [1, 4, 6])
@pytest.mark.parametrize("kind", [Activation.SILU, Activation.GELU_TANH], ids=lambda k: k.name)
def test_gate_up_and_activation_in_one_launch(tokens, kind, device):
    raw, values = random_matrix(QuantType.Q4_K, 64, 1024)
    weight = repack.repack(raw.to(device), QuantType.Q4_K, 64, 1024)
    x = (torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(1)) / 8).half().to(device)
    out = torch.full((tokens, 32), torch.nan, device=device)
    matrix = WeightMatrix(weight, QuantType.Q4_K, 64, 1024, GpuLayout.PLANES)
    assert gated_linear(x, matrix, kind, out=out, workspace=Workspace.allocate(device, 8)) is out
    wide, values = x.cpu().double(), values.double()
    gate, up = wide @ values[0::2].T, wide @ values[1::2].T
    size = wide.abs() @ values.abs().T
    act = functools.partial(functional.gelu, approximate="tanh") if kind is Activation.GELU_TANH else functional.silu
    tolerance = VECTOR if tokens <= VECTOR_ROWS else ROUNDED[torch.float16]
    # |act'| <= 1.13 and |act(g)| <= |g|: what the two products are off by, and a few ulps of fp32 for the rest.
    bound = tolerance * (1.13 * size[:, 0::2] * up.abs() + gate.abs() * size[:, 1::2]) + 1e-6 * (1 + up.abs())
    bound = bound + 1.13 * tolerance**2 * size[:, 0::2] * size[:, 1::2]
    assert ((out.cpu().double() - act(gate) * up).abs() <= bound).all()


@pytest.mark.exhaustive
def test_a_row_does_not_depend_on_the_others_and_a_workspace_can_be_used_again(device):
    raw, _ = random_matrix(QuantType.Q4_K, 64, 1024)
    data = repack.repack(raw.to(device), QuantType.Q4_K, 64, 1024)
    weight = WeightMatrix(data, QuantType.Q4_K, 64, 1024, GpuLayout.PLANES)
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(1)).half().to(device)
    space = Workspace.allocate(device, 8)
    whole = linear(x, weight, workspace=space)
    for row in range(4):
        alone = linear(x[row : row + 1], weight, workspace=space)
        assert torch.equal(alone[0], whole[row])
    assert not space.counters.any()
    many = linear(torch.cat([x, x]), weight, workspace=space)
    assert torch.equal(many[:4], many[4:])
    assert not space.counters.any()


def test_rows_with_a_stride_and_no_rows(device):
    raw, values = random_matrix(QuantType.Q4_0, 8, 64)
    wide = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).half().to(device)
    x = wide[:, 32:]
    check(linear(x, WeightMatrix(raw.to(device), QuantType.Q4_0, 8, 64)), x, values, None, 2 * ROUNDED[torch.float16])
    assert linear(x[:0], WeightMatrix(raw.to(device), QuantType.Q4_0, 8, 64)).shape == (0, 8)


def test_refuses_what_does_not_fit(device):
    raw, _ = random_matrix(QuantType.Q4_0, 8, 64)
    weight = WeightMatrix(raw.to(device), QuantType.Q4_0, 8, 64)
    x = torch.zeros(2, 64, dtype=torch.float16, device=device)
    with pytest.raises(TypeError, match="float16 or bfloat16"):
        linear(x.float(), weight)
    with pytest.raises(ValueError, match=r"\[T, 64\]"):
        linear(x[:, :32].contiguous(), weight)
    with pytest.raises(ValueError, match="bias"):
        linear(x, weight, bias=x[0])
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        linear(torch.zeros(2, 66, dtype=torch.float16, device=device)[:, :64], weight)
    with pytest.raises(ValueError, match="out must be"):
        linear(x, weight, out=torch.empty(2, 9, device=device))
    small = Workspace(torch.empty(1, device=device), torch.zeros(1, dtype=torch.int32, device=device))
    wide = torch.zeros(2, 512, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="workspace"):
        linear(
            wide,
            WeightMatrix(random_matrix(QuantType.Q4_0, 8, 512)[0].to(device), QuantType.Q4_0, 8, 512),
            workspace=small,
        )
    with pytest.raises(ValueError, match="layout ROWS"):
        gated_linear(x, weight, Activation.SILU)


def test_a_workspace_suffices_for_every_matrix():
    for tokens in (1, 2, 4, 5, 16, 17, 33, 64, 65, 128, 129, 300, 512, 513):
        space = Workspace.allocate("cpu", tokens)
        for rows in (8, 72, 576, 1056, 2048, 7168, 33792, 151936):
            for cols in (256, 1536, 7168, 18432):
                _, _, split, _ = _gemv_plan(rows, cols)
                assert split * VECTOR_ROWS * rows <= space.parts.numel() or split == 1
                for is_ahead in (True, False):
                    block_m, block_n, _, split, _ = _tile_plan(tokens, rows, cols, is_ahead)
                    if split > 1:
                        space.check(split * tokens * rows, -(-tokens // block_m) * -(-rows // block_n))
