"""Sorting of pairs and mixtures of quantized experts, against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.types import (
    FORK_TYPES,
    Activation,
    ActivationSpec,
    ExpertWeights,
    OwnType,
    QuantType,
    RawTensor,
)
from tests.support.triton_kernels.quant_cases import pack_for_cpu, pack_fp8_for_cpu, random_fp8, random_matrix

if runtime.triton is None:
    pytest.skip("triton is not installed", allow_module_level=True)


from ktransformers.kernels.triton.experts.align import AlignedPairs, max_blocks, moe_align
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeEpilogue, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe, moe_blocks, moe_sum
from ktransformers.kernels.triton.experts.workspace import MoeWorkspace, block_rows
from ktransformers.kernels.triton.quant import repack as repack
from ktransformers.kernels.triton.quant.repack import GpuLayout


def routing(tokens, top_k, num_experts, device, seed=0):
    """Distinct experts per token; every third id is num_experts, which counts for nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32)
    ids.view(-1)[::3] = num_experts
    weights = torch.rand(tokens, top_k, generator=generator)
    return ids.to(device), weights.to(device)


@pytest.mark.parametrize("with_slots", [False, True])
@pytest.mark.parametrize("tokens", [3, 700])  # 1400 pairs are more than one chunk
def test_align(with_slots, tokens, device):
    ids, _ = routing(tokens, 2, 5, device)
    slots = torch.tensor([3, -1, 0, 1, 2], dtype=torch.int32, device=device) if with_slots else None
    aligned = moe_align(ids, 5, 16, slots)
    flat, wanted, wanted_slots = ids.flatten().tolist(), [], []
    for expert in range(5):
        slot = expert if slots is None else int(slots[expert])
        pairs = [p for p, e in enumerate(flat) if e == expert and slot >= 0]
        assert int(aligned.counts[expert]) == len(pairs)
        blocks = -(-len(pairs) // 16)
        wanted += pairs + [len(flat)] * (16 * blocks - len(pairs))
        wanted_slots += [slot] * blocks
    assert len(wanted_slots) <= max_blocks(len(flat), 5, 16) == aligned.block_slots.numel()
    wanted += [len(flat)] * (aligned.pair_ids.numel() - len(wanted))
    wanted_slots += [-1] * (aligned.block_slots.numel() - len(wanted_slots))
    assert aligned.pair_ids.tolist() == wanted
    assert aligned.block_slots.tolist() == wanted_slots


def make(qtype, num, rows, cols, layout, device):
    """ExpertMatrices and the values [num, rows, cols]."""
    if qtype is OwnType.F8_E4M3:
        return make_fp8(num, rows, cols, layout, device)
    raws, values = zip(*(random_matrix(qtype, rows, cols, seed) for seed in range(num)), strict=True)
    data = torch.stack(raws).to(device)
    if layout == GpuLayout.PLANES:
        data = repack.repack(data, qtype, rows, cols)
    if layout == GpuLayout.CPU_PACKED:
        data = torch.stack([pack_for_cpu(raw, qtype, rows, cols) for raw in data.cpu()]).to(device)
    return ExpertMatrices(data, qtype, rows, cols, layout), torch.stack(values).double()


def make_fp8(num, rows, cols, layout, device):
    """As `make`."""
    matrices, values = zip(*(random_fp8(rows, cols, seed) for seed in range(num)), strict=True)
    if layout == GpuLayout.CPU_PACKED:
        data = [pack_fp8_for_cpu(one) for one in matrices]
    else:
        assert repack.can_repack(OwnType.F8_E4M3, rows, cols) == (layout == GpuLayout.PLANES)
        data = [repack.repack_fp8(one) for one in matrices]
    made = ExpertMatrices(torch.stack(data).to(device), OwnType.F8_E4M3, rows, cols, layout)
    return made, torch.stack(values).double()


def reference(x, ids, weights, gate, up, down):
    """The result and the sum of the magnitudes that went into it."""
    out, size = torch.zeros(x.shape[0], down.shape[1]).double(), torch.zeros(x.shape[0], down.shape[1]).double()
    for t, row in enumerate(x.cpu().double()):
        for j, e in enumerate(ids[t].tolist()):
            if e < len(up):
                hidden = functional.silu(gate[e] @ row) * (up[e] @ row)
                out[t] += float(weights[t, j]) * (down[e] @ hidden)
                # An error of the two products, relative to the sum of their magnitudes, passes through silu (slope
                # below 1.1, |silu(g)| <= |g|) and the product.
                g, u = gate[e].abs() @ row.abs(), up[e].abs() @ row.abs()
                size[t] += float(weights[t, j]) * (down[e].abs() @ (2.1 * g * u))
    return out, size


MIXED = (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K)
LOW = (QuantType.Q2_K, QuantType.Q3_K, QuantType.IQ4_XS)
SMALL = (QuantType.Q8_0, QuantType.Q4_0, QuantType.Q8_0)
FLOATS = (QuantType.BF16, QuantType.F16, QuantType.BF16)
BF16, FP8 = (QuantType.BF16,) * 3, (OwnType.F8_E4M3,) * 3
GRIDS = (QuantType.IQ2_XXS, QuantType.IQ1_M, QuantType.IQ3_S)  # block-wise int16 of one order, then of the other
THREES = (QuantType.IQ3_S, QuantType.IQ3_XXS, QuantType.IQ2_XS)
FOURS = (QuantType.IQ4_NL, QuantType.IQ4_NL, QuantType.IQ4_NL)
APART = (QuantType.IQ3_XXS, QuantType.IQ4_XS, QuantType.IQ2_S)  # gate and up take block-wise int16 in different loops


@pytest.mark.every(320)
@pytest.mark.parametrize(
    ("tokens", "layout", "types", "width", "inner"),
    [
        (1, GpuLayout.PLANES, MIXED, 256, 256),
        (3, GpuLayout.PLANES, SMALL, 96, 64),
        (2, GpuLayout.ROWS, MIXED, 256, 256),
        (33, GpuLayout.PLANES, SMALL, 96, 64),
        (2, GpuLayout.CPU_PACKED, MIXED, 256, 256),
        (2, GpuLayout.CPU_PACKED, LOW, 256, 256),
        (33, GpuLayout.CPU_PACKED, LOW, 256, 256),
        *((m, GpuLayout.CPU_PACKED, (t, t, QuantType.IQ4_XS), 256, 256) for t in sorted(FORK_TYPES) for m in (2, 33)),
        (2, GpuLayout.ROWS, FLOATS, 100, 72),
        (3, GpuLayout.CPU_PACKED, BF16, 96, 32),
        (1, GpuLayout.PLANES, FP8, 160, 160),
        (33, GpuLayout.PLANES, FP8, 160, 160),
        (2, GpuLayout.CPU_PACKED, FP8, 160, 136),
        (2, GpuLayout.CPU_PACKED, GRIDS, 256, 256),
        (1, GpuLayout.CPU_PACKED, THREES, 256, 256),
        (3, GpuLayout.CPU_PACKED, FOURS, 96, 32),
        (1, GpuLayout.CPU_PACKED, APART, 256, 256),
        (1, GpuLayout.CPU_PACKED, (*GRIDS[:2], QuantType.Q6_K), 256, 256),  # in blocks
    ],
)
def test_experts(tokens, layout, types, width, inner, device):
    num, top_k = 4, 2
    gate, gate_values = make(types[0], num, inner, width, layout, device)
    up, up_values = make(types[1], num, inner, width, layout, device)
    down, down_values = make(types[2], num, width, inner, layout, device)
    ids, weights = routing(tokens, top_k, num, device)
    # Random scales of some types make weights up to 160: results stay in the range of fp16.
    size = 0.02 / max(1.0, float(gate_values.abs().max()) / 16)
    x = (torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)) * size).half().to(device)
    space = MoeWorkspace.allocate(x, top_k, num, up, down)
    out = torch.full((tokens, width), torch.nan, device=device)
    for _ in range(2):  # the second call finds the workspace as the first left it
        moe(RoutedRows(x, ids, weights), MoeMatrices(gate, up, down), out, workspace=space)
    wanted, size = reference(x, ids, weights, gate_values, up_values, down_values)
    # fp16: weights of three products are rounded to 11 bits (2^-11 each at most), the hidden values too, and the parts.
    # Digits are off by 2^-15 of the largest of 32, which is 2^-11 of all terms if it is at most 16 times their mean.
    assert ((out.cpu().double() - wanted).abs() <= 5 * 2**-11 * size + 1e-6).all()
    assert not space.counters.any()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "qtype",
    [QuantType.IQ2_XS, pytest.param(QuantType.IQ4_XS, marks=pytest.mark.exhaustive), QuantType.Q4_K],
    ids=lambda t: t.name,
)
def test_experts_that_come_in_turns_are_those_that_are_there(qtype, device):
    """Of the CPU's tiles, through a buffer for two experts, overwritten between turns: the same bits."""
    tokens, num, top_k, width = 33, 4, 2, 256
    held = [make(qtype, num, width, width, GpuLayout.CPU_PACKED, device)[0] for _ in range(3)]
    ids, weights = routing(tokens, top_k, num, device)
    x = (torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)) * 0.02).half().to(device)
    rows = RoutedRows(x, ids, weights)
    wanted = moe(rows, MoeMatrices(*held))
    space = MoeWorkspace.allocate(x, top_k, num, held[1], held[2])
    block = block_rows(ids.numel(), num)
    slots = torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=device)
    moe_align(ids, num, block, slots, space.aligned)
    blocks = [-(-count // block) for count in space.aligned.counts.tolist()]
    buffers = [torch.zeros_like(one.data[:2]) for one in held]
    turns = [ExpertMatrices(data, qtype, width, width, GpuLayout.CPU_PACKED) for data in buffers]
    for turn in range(2):
        for buffer, one in zip(buffers, held, strict=True):
            buffer.copy_(one.data[2 * turn : 2 * turn + 2])
        span = (sum(blocks[: 2 * turn]), sum(blocks[: 2 * turn + 2]))
        assert span[1] > span[0]
        moe_blocks(rows, MoeMatrices(*turns), space, span, num)
    assert torch.equal(moe_sum(ids, torch.empty_like(x), space, num), wanted)


OAI = ActivationSpec(Activation.SWIGLU_OAI, alpha=1.5, limit=0.75)


def random_biases(num, inner, width, device):
    generator = torch.Generator().manual_seed(4)
    return tuple((torch.randn(num, n, generator=generator) / 2).to(device) for n in (inner, inner, width))


def reference_oai(x, ids, weights, matrices, biases):
    """As `reference`, of gpt_oss's clamped experts with biases."""
    (gate, up, down), (gate_bias, up_bias, down_bias) = matrices, [bias.cpu().double() for bias in biases]
    out, size = torch.zeros(x.shape[0], down.shape[1]).double(), torch.zeros(x.shape[0], down.shape[1]).double()
    for t, row in enumerate(x.cpu().double()):
        for j, e in enumerate(ids[t].tolist()):
            if e < len(up):
                g = (gate[e] @ row + gate_bias[e]).clamp(max=OAI.limit)
                u = (up[e] @ row + up_bias[e]).clamp(-OAI.limit, OAI.limit)
                hidden = g * torch.sigmoid(OAI.alpha * g) * (u + 1)
                out[t] += float(weights[t, j]) * (down[e] @ hidden + down_bias[e])
                # x sigmoid(alpha x) has slopes below 1.1 for alpha >= 1, and |u + 1| <= limit + 1; then rounding.
                of_gate, of_up = gate[e].abs() @ row.abs(), up[e].abs() @ row.abs()
                wide = 1.1 * of_gate * (OAI.limit + 1) + g.abs() * of_up + hidden.abs()
                size[t] += float(weights[t, j]) * (down[e].abs() @ wide + (down[e] @ hidden + down_bias[e]).abs())
    return out, size


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("tokens", "layout"),
    [
        (1, GpuLayout.PLANES),
        (3, GpuLayout.PLANES),
        (33, GpuLayout.PLANES),
        (2, GpuLayout.ROWS),
        (3, GpuLayout.CPU_PACKED),
    ],
)
def test_experts_of_gpt_oss(tokens, layout, device):
    """MXFP4, biases and the clamped activation. Widths are no multiples of 64; limits cut a good part of the values."""
    num, top_k, width, inner = 4, 2, 96, 32
    shapes = ((inner, width), (inner, width), (width, inner))
    made = [make(QuantType.MXFP4, num, rows, cols, layout, device) for rows, cols in shapes]
    matrices, values = [one for one, _ in made], [value for _, value in made]
    ids, weights = routing(tokens, top_k, num, device)
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).half().to(device)
    epilogue = MoeEpilogue(OAI, random_biases(num, inner, width, device))
    out = torch.full((tokens, width), torch.nan, device=device)
    moe(RoutedRows(x, ids, weights), MoeMatrices(*matrices, epilogue), out)
    wanted, size = reference_oai(x, ids, weights, values, epilogue.biases)
    # Numbers of MXFP4 are numbers of fp16: what is rounded to 11 bits is hidden values and parts, once each.
    assert ((out.cpu().double() - wanted).abs() <= 2 * 2**-11 * size + 1e-6).all()


@pytest.mark.parametrize("kind", [Activation.GELU, Activation.RELU2], ids=lambda k: k.name)
@pytest.mark.parametrize("tokens", [1, 33])
def test_other_activations_without_biases(tokens, kind, device):
    shapes = ((32, 64), (32, 64), (64, 32))
    made = [make(QuantType.Q8_0, 2, rows, cols, GpuLayout.PLANES, device) for rows, cols in shapes]
    matrices, (gate, up, down) = [one for one, _ in made], [value for _, value in made]
    x = (torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)) / 8).half().to(device)
    ids, weights = torch.zeros(tokens, 1, dtype=torch.int32, device=device), torch.ones(tokens, 1, device=device)
    out = torch.empty(tokens, 64, device=device)
    moe(RoutedRows(x, ids, weights), MoeMatrices(*matrices, MoeEpilogue(ActivationSpec(kind))), out)
    act = functional.gelu if kind is Activation.GELU else lambda v: torch.relu(v) ** 2
    wide = x.cpu().double()
    g, u = wide @ gate[0].T, wide @ up[0].T
    wanted = (act(g) * u) @ down[0].T
    # Slopes: gelu's below 1.2, relu2's is 2 |g|.
    slope = 1.2 if kind is Activation.GELU else 2 * g.abs()
    of_gate, of_up = wide.abs() @ gate[0].abs().T, wide.abs() @ up[0].abs().T
    size = (slope * of_gate * u.abs() + act(g).abs() * of_up + (act(g) * u).abs()) @ down[0].abs().T
    assert ((out.cpu().double() - wanted).abs() <= 3 * 2**-11 * size + 1e-6).all()


def test_biases_of_experts(device):
    """Those that are missing beside others are zero; none at all are none; others' are refused."""
    raw = [RawTensor.from_tensor(torch.zeros(4, 8)) for _ in range(3)]
    down = [RawTensor.from_tensor(torch.zeros(8, 4)) for _ in range(3)]
    assert MoeEpilogue.of(ExpertWeights(raw, raw, down), OAI, device) == MoeEpilogue(OAI)
    bias = torch.ones(3, 8)
    made = MoeEpilogue.of(ExpertWeights(raw, raw, down, down_bias=bias), OAI, device).biases
    assert [tuple(one.shape) for one in made] == [(3, 4), (3, 4), (3, 8)]
    assert [float(one.sum()) for one in made] == [0, 0, 24]
    with pytest.raises(ValueError, match=r"\[2, 4\]"):
        MoeEpilogue(OAI, made).check(2, 4, 8)
    with pytest.raises(TypeError, match="float32"):
        MoeEpilogue(OAI, tuple(one.half() for one in made)).check(3, 4, 8)


def test_a_token_without_experts_and_no_tokens(device):
    matrix, _ = make(QuantType.Q4_0, 2, 32, 32, GpuLayout.PLANES, device)
    x = torch.ones(2, 32, dtype=torch.float16, device=device)
    ids = torch.tensor([[2, 2], [2, 7]], dtype=torch.int32, device=device)
    weights = torch.ones(2, 2, device=device)
    rows, experts = RoutedRows(x, ids, weights), MoeMatrices(matrix, matrix, matrix)
    assert not moe(rows, experts).any()
    assert moe(rows.of(slice(0)), experts).shape == (0, 32)


def test_refuses_what_does_not_fit(device):
    matrix, _ = make(QuantType.Q4_0, 2, 32, 32, GpuLayout.PLANES, device)
    narrow, _ = make(QuantType.Q4_0, 2, 32, 64, GpuLayout.PLANES, device)
    x = torch.ones(2, 32, dtype=torch.float16, device=device)
    ids, weights = torch.zeros(2, 2, dtype=torch.int32, device=device), torch.ones(2, 2, device=device)
    rows, experts = RoutedRows(x, ids, weights), MoeMatrices(matrix, matrix, matrix)
    with pytest.raises(TypeError, match="int32"):
        moe(RoutedRows(x, ids.long(), weights), experts)
    with pytest.raises(ValueError, match=r"\[2, k\]"):
        moe(RoutedRows(x, ids[:1], weights[:1]), experts)
    with pytest.raises(ValueError, match="down must fit"):
        moe(rows, MoeMatrices(matrix, matrix, narrow))
    with pytest.raises(ValueError, match="pairs"):
        moe(rows, experts, workspace=MoeWorkspace.allocate(x[:1], 2, 2, matrix, matrix))
    with pytest.raises(ValueError, match="power of two"):
        moe_align(ids, 2, 24)
    with pytest.raises(ValueError, match="AlignedPairs"):
        moe_align(ids, 2, 16, out=AlignedPairs.allocate(99, 2, 16, ids.device))
