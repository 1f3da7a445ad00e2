"""Products of bf16: within bounds that follow from the arithmetic, and the same for a row in every step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ktransformers.kernels import cpu, reference
from ktransformers.kernels.cpu import Isa, MoeKernel, WorkerPool
from ktransformers.kernels.cpu.layer import GatedMlp, LayerBuffers, MlpLayer, Norm
from ktransformers.kernels.cpu.packing import can_pack
from ktransformers.kernels.cpu.topology import ThreadPlace
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import (
    Activation,
    ActivationSpec,
    ExpertWeights,
    Fp8Matrix,
    OwnType,
    PackedTensor,
    QuantType,
    RawTensor,
    WeightType,
)
from tests.support.checks.products import product

EMULATED = (Isa.AVX512_BF16_EMULATED, Isa.AMX_EMULATED)
TIERS = (*(isa for isa in cpu.available_isas() if isa in (Isa.AVX512_BF16, Isa.AMX)), *EMULATED)
TILE_TIERS = tuple(isa for isa in TIERS if isa in (Isa.AMX, Isa.AMX_EMULATED))
QUANTIZED: tuple[WeightType, ...] = (*sorted(cpu.PACKED_TYPES), OwnType.F8_E4M3)
HALF_ULP = 2.0**-8  # largest relative error of rounding to bf16
CUT = 2.0**-7 * 2 / 3  # and of unpacked weights, which are enlarged by 1 / 384 and cut
ROUND = 2.0**-24  # and of one fp32 operation
MANY = int(extension.MANY_TOKENS)


def roundings(isa: Isa, cols: int) -> int:
    """In fp32, of a product of `cols` columns: see csrc/kernels/bf16/tiles.inl and bf16/vector.inl."""
    return 17 + cols // 32 if isa in TILE_TIERS else 2 * cols


def random_rows(tokens: int, cols: int) -> torch.Tensor:
    return torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens))


def bf16_weight(rows: int, cols: int, seed: int = 0) -> RawTensor:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.1
    return RawTensor.from_tensor(values.to(torch.bfloat16))


def quantized_weight(make_weight, qtype: WeightType, rows: int, cols: int, seed: int = 0) -> RawTensor | Fp8Matrix:
    if isinstance(qtype, OwnType):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=generator)
        values[(values & 127) == 127] = 0x80
        return Fp8Matrix(values, torch.randn(-(-rows // 128), -(-cols // 128), generator=generator) * 0.01)
    return make_weight(qtype, rows, cols, seed=seed)


def pack_wanting(weight: RawTensor | Fp8Matrix, pool: WorkerPool, wants_bf16: bool = True) -> PackedTensor:
    packed = cpu.pack_fp8(weight, pool) if isinstance(weight, Fp8Matrix) else cpu.pack(weight, pool)
    return dataclasses.replace(packed, wants_bf16=wants_bf16)


def largest_of(weight: torch.Tensor) -> torch.Tensor:
    """Of every row of dequantized weights [N, K]: [N, 1]."""
    return weight.abs().amax(1, keepdim=True)


# ---- BF16 weights ----


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (48, 768), (5, 544), (33, 2048)])
def test_bf16_linear_is_near_fp64(isa: Isa, rows: int, cols: int) -> None:
    pool = WorkerPool(2, isa)
    weight = bf16_weight(rows, cols)
    packed = cpu.pack(weight, pool)
    assert packed.nbytes == -(-rows // 16) * 16 * cols * 2
    wide = reference.dequantize(weight).double()
    for tokens in (1, 3, 16, 17, 33, 130):
        x = random_rows(tokens, cols)
        error = (cpu.linear(x, packed, pool).double() - x.double() @ wide.T).abs()
        bound = (HALF_ULP + 1.01 * roundings(isa, cols) * ROUND) * (x.double().abs() @ wide.abs().T)
        assert (error <= bound + 2.0**-100).all(), tokens
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_a_row_is_the_same_in_every_step_and_split(isa: Isa) -> None:
    weight, bias = bf16_weight(70, 1056), torch.randn(70, generator=torch.Generator().manual_seed(3))
    x = random_rows(140, 1056)
    single = WorkerPool(1, isa)
    want = cpu.linear(x, cpu.pack(weight, single), single, bias)
    for pool in (single, WorkerPool(3, isa)):
        packed = cpu.pack(weight, pool)
        for tokens in (1, 2, 5, 6, 7, 15, 16, 17, 31, 32, 33, 48, 64, 129):
            assert torch.equal(cpu.linear(x[-tokens:].contiguous(), packed, pool, bias), want[-tokens:]), tokens
        pool.close()


def tile_oracle(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """TDPBF16PS by Intel's manual, for operands whose sums double precision holds exactly: x [T, K], w [N, K]."""
    out = np.zeros((len(x), len(w)), np.float32)
    for first in range(0, x.shape[1], 32):
        chains = np.zeros((2, *out.shape), np.float32)
        for column in range(first, first + 32):
            product = x[:, None, column].astype(np.float64) * w[None, :, column]
            chains[column % 2] = (chains[column % 2].astype(np.float64) + product).astype(np.float32)
        out += chains[0] + chains[1]
    return out


@pytest.mark.parametrize("isa", TILE_TIERS)
def test_tiles_round_as_their_definition_says(isa: Isa) -> None:
    """The same bits as the definition gives: on a machine with AMX this also holds the emulation against hardware."""
    generator = torch.Generator().manual_seed(1)
    # 8 bits of fraction under exponents from -3 to 3: products and sums of 96 fit in 53 bits, but not in 24.
    x, w = (
        ((torch.rand(n, 96, generator=generator) + 1) * 2.0 ** torch.randint(-3, 4, (n, 96), generator=generator))
        * (1 - 2 * torch.randint(0, 2, (n, 96), generator=generator))
        for n in (40, 32)
    )
    x, w = x.to(torch.bfloat16).float(), w.to(torch.bfloat16).float()
    pool = WorkerPool(1, isa)
    out = cpu.linear(x, cpu.pack(RawTensor.from_tensor(w.to(torch.bfloat16)), pool), pool)
    pool.close()
    assert np.array_equal(out.numpy(), tile_oracle(x.numpy(), w.numpy()))
    assert not torch.equal(out, (x.double() @ w.double().T).float())  # rounding took part


@pytest.mark.parametrize("isa", TIERS)
def test_subnormals_count_as_zeros_and_nan_and_infinity_show(isa: Isa) -> None:
    pool = WorkerPool(1, isa)
    values = torch.zeros(16, 64)
    values[0, 0], values[1, 1], values[2, 2] = 1e-39, 2.0**-70, 1.0
    packed = cpu.pack(RawTensor.from_tensor(values.to(torch.bfloat16)), pool)
    x = torch.zeros(4, 64)
    x[0, :3] = torch.tensor([2.0**100, 2.0**-70, 1e-39])  # subnormal weight, product and activation
    x[1, 2], x[2, 2], x[3, 2] = torch.inf, torch.nan, 2.5
    out = cpu.linear(x, packed, pool)
    pool.close()
    assert out[0].eq(0).all()
    assert out[1, 2] == torch.inf
    assert out[2].isnan().all()  # 0 * NaN
    assert out[3, 2] == 2.5


@pytest.mark.parametrize("isa", TIERS)
def test_activations_round_to_nearest_even(isa: Isa) -> None:
    pool = WorkerPool(1, isa)
    packed = cpu.pack(RawTensor.from_tensor(torch.eye(32).to(torch.bfloat16)), pool)
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 32), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    bits[:, ::2] &= ~0x7FFF  # ties
    exponent = (bits >> 23) & 0xFF
    x = torch.where((exponent > 0) & (exponent < 255), bits, 0x3F808000).view(torch.float32)
    for row in range(0, 64, 8):  # a row at a time has one number, for others' infinities times zero are NaN
        for column in (0, 1, 30, 31):
            one = torch.zeros(1, 32)
            one[0, column] = x[row, column]
            assert cpu.linear(one, packed, pool)[0, column] == x[row, column].to(torch.bfloat16).float()
    pool.close()


def test_re_laying_needs_instructions_and_whole_tiles() -> None:
    weight = bf16_weight(16, 64)
    scalar, emulated = WorkerPool(1, Isa.SCALAR), WorkerPool(1, Isa.AMX_EMULATED)
    assert not scalar.has_bf16
    assert emulated.has_bf16
    assert not can_pack(QuantType.BF16, 64, scalar.isa)
    with pytest.raises(ValueError, match="64 BF16 columns has no packed form on scalar"):
        cpu.pack(weight, scalar)
    with pytest.raises(ValueError, match="40 BF16 columns has no packed form"):
        cpu.pack(bf16_weight(16, 40), emulated)
    packed = cpu.pack(weight, emulated)
    with pytest.raises(ValueError, match="cannot be computed with on the tier scalar"):
        cpu.linear(random_rows(1, 64), packed, scalar)
    up, down = cpu.pack(bf16_weight(32, 64), emulated), cpu.pack(bf16_weight(64, 32), emulated)
    kernel = MoeKernel(ExpertWeights(None, [up], [down]), RELU, scalar)
    with pytest.raises(ValueError, match="cannot be computed with on the tier scalar"):
        kernel.forward(random_rows(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    for pool in (scalar, emulated):
        pool.close()


RELU = ActivationSpec(Activation.RELU)


# ---- quantized weights, where bf16 is wanted ----


@pytest.mark.every(5)
@pytest.mark.parametrize("qtype", QUANTIZED)
def test_unpacked_weights_are_near_and_equal_in_all_tiers(make_weight, qtype: WeightType) -> None:
    """One column is 1 and all others are 0: what comes out is the weight, rounded."""
    rows, cols = 33, 512
    weight = quantized_weight(make_weight, qtype, rows, cols)
    wide = reference.dequantize(weight).double()
    outs = []
    for isa in TIERS:
        pool = WorkerPool(2, isa)
        out = cpu.linear(torch.eye(cols), pack_wanting(weight, pool), pool).T.double()
        assert ((out - wide).abs() <= CUT * wide.abs() + 2.0**-14 * largest_of(wide)).all()
        assert torch.equal(out.to(torch.bfloat16).double(), out)
        outs.append(out)
        pool.close()
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("isa", TIERS)
def test_weights_that_bf16_holds_are_exact(isa: Isa) -> None:
    """All numbers of Q8_0 and all codes of MXFP4 under powers of two; errors of others have no sign on average."""
    pool = WorkerPool(1, isa)
    blocks = torch.zeros(16, 16, 34, dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0, 0x24], dtype=torch.uint8)  # 2^-6
    blocks[..., 2:] = torch.arange(16 * 16 * 32).view(16, 16, 32).to(torch.uint8)
    codes = torch.randint(0, 256, (16, 16, 17), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codes[..., 0] = 120
    for data, qtype in ((blocks, QuantType.Q8_0), (codes, QuantType.MXFP4)):
        weight = RawTensor(data.reshape(-1), qtype, (16, 512))
        assert torch.equal(cpu.linear(torch.eye(512), pack_wanting(weight, pool), pool).T, reference.dequantize(weight))
    blocks[..., :2] = torch.tensor([0x57, 0x25], dtype=torch.uint8)
    weight = RawTensor(blocks.reshape(-1), QuantType.Q8_0, (16, 512))
    want = reference.dequantize(weight).double()
    error = cpu.linear(torch.eye(512), pack_wanting(weight, pool), pool).T.double() / want - 1
    assert abs(float(error[want != 0].mean())) < 2.0**-11  # an eighth of half a last place
    pool.close()


@product(strength=1, isa=TIERS, qtype=QUANTIZED)
def test_quantized_linear_is_near_fp64(make_weight, isa: Isa, qtype: WeightType) -> None:
    pool = WorkerPool(2, isa)
    for rows, cols in ((48, 768), (21, 256), (16, 1024)):
        weight = quantized_weight(make_weight, qtype, rows, cols)
        packed = pack_wanting(weight, pool)
        wide = reference.dequantize(weight).double()
        magnitude = HALF_ULP + CUT + HALF_ULP * CUT + 1.02 * roundings(isa, cols) * ROUND
        for tokens in (MANY, 49, 130):
            x = random_rows(tokens, cols)
            error = (cpu.linear(x, packed, pool).double() - x.double() @ wide.T).abs()
            absolute = x.double().abs()
            bound = magnitude * (absolute @ wide.abs().T) + 1.01 * 2.0**-14 * absolute.sum(1, True) * largest_of(wide).T
            assert (error <= bound).all(), (rows, cols, tokens)
    pool.close()


@pytest.mark.every(5)
@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("qtype", QUANTIZED)
def test_few_tokens_stay_exact_and_many_are_alike(make_weight, isa: Isa, qtype: WeightType) -> None:
    pool = WorkerPool(2, isa)
    weight = quantized_weight(make_weight, qtype, 40, 768)
    wanting, plain = pack_wanting(weight, pool), pack_wanting(weight, pool, wants_bf16=False)
    x = random_rows(140, 768)
    few = x[: MANY - 1].contiguous()
    assert torch.equal(cpu.linear(few, wanting, pool), cpu.linear(few, plain, pool))
    want = cpu.linear(x, wanting, pool)
    assert not torch.equal(want, cpu.linear(x, plain, pool))
    for tokens in (MANY, 33, 48, 65, 129):
        assert torch.equal(cpu.linear(x[:tokens].contiguous(), wanting, pool), want[:tokens]), tokens
    pool.close()


def test_tiers_without_products_of_bf16_stay_exact(make_weight) -> None:
    weight = make_weight(QuantType.Q4_K, 32, 512)
    x = random_rows(MANY, 512)
    for isa in cpu.available_isas():
        pool = WorkerPool(1, isa)
        if not pool.has_bf16:
            wanting = cpu.linear(x, pack_wanting(weight, pool), pool)
            assert torch.equal(wanting, cpu.linear(x, pack_wanting(weight, pool, wants_bf16=False), pool))
        pool.close()


def test_a_nan_scale_shows() -> None:
    """One whose fraction is all ones, and a signaling one."""
    data = torch.full((32 * 34,), 1, dtype=torch.uint8)
    for row, low in ((3, 0xFF7F), (4, 0x017C)):
        data.view(-1, 34)[row, :2] = torch.tensor([low >> 8, low & 0xFF], dtype=torch.uint8)
    for isa in TIERS:
        pool = WorkerPool(1, isa)
        out = cpu.linear(torch.ones(MANY, 32), pack_wanting(RawTensor(data, QuantType.Q8_0, (32, 32)), pool), pool)
        assert out[:, 3:5].isnan().all()
        assert out.isnan().sum() == 2 * MANY
        pool.close()


# ---- experts ----


def make_experts(make_weight, kinds, hidden: int, width: int, count: int, pool: WorkerPool) -> ExpertWeights:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    parts = []
    for part, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        if kind is QuantType.BF16:
            parts.append([cpu.pack(bf16_weight(*shape, seed=9 * part + e), pool) for e in range(count)])
        else:
            made = (quantized_weight(make_weight, kind, *shape, seed=9 * part + e) for e in range(count))
            parts.append([pack_wanting(weight, pool) for weight in made])
    return ExpertWeights(*parts)


def by_linears(weights: ExpertWeights, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, pool) -> torch.Tensor:
    """Every expert on every row, by single kernels."""
    each = []
    for gate, up, down in zip(weights.gate, weights.up, weights.down, strict=True):
        inner = cpu.activate(ActivationSpec(), cpu.linear(x, gate, pool), cpu.linear(x, up, pool), pool)
        each.append(cpu.linear(inner, down, pool))
    stacked, rows = torch.stack(each), torch.arange(len(x))
    out = factors[:, 0, None] * stacked[ids[:, 0], rows]
    for k in range(1, ids.shape[1]):
        out = out + factors[:, k, None] * stacked[ids[:, k], rows]
    return out


KINDS = [
    (QuantType.BF16, QuantType.BF16, QuantType.BF16),
    (QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K),
    (QuantType.Q8_0, QuantType.IQ4_XS, QuantType.MXFP4),
    (OwnType.F8_E4M3, OwnType.F8_E4M3, OwnType.F8_E4M3),
    (QuantType.BF16, QuantType.Q5_K, QuantType.BF16),
    (QuantType.Q4_0, QuantType.BF16, QuantType.Q4_0),
]


@pytest.mark.every(3)
@product(strength=1, isa=TIERS, kinds=KINDS)
def test_experts_equal_their_linears(make_weight, isa: Isa, kinds: tuple[WeightType, ...]) -> None:
    experts, hidden, width, top_k = 3, 256, 256, 2
    pool = WorkerPool(3, isa)
    weights = make_experts(make_weight, kinds, hidden, width, experts, pool)
    kernel = MoeKernel(weights, ActivationSpec(), pool)
    for tokens in (1, 7, MANY, 200):
        generator = torch.Generator().manual_seed(tokens)
        x = random_rows(tokens, hidden)
        ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
        factors = torch.rand(tokens, top_k, generator=generator)
        assert torch.equal(kernel.forward(x, ids, factors), by_linears(weights, x, ids, factors, pool)), tokens
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_experts_with_few_rows_each_stay_exact(make_weight, isa: Isa) -> None:
    experts, tokens = 40, MANY
    pool = WorkerPool(2, isa)
    kinds = (QuantType.Q4_0, QuantType.Q4_0, QuantType.Q8_0)
    wanting = make_experts(make_weight, kinds, 64, 32, experts, pool)
    parts = (
        [dataclasses.replace(w, wants_bf16=False) for w in part] for part in (wanting.gate, wanting.up, wanting.down)
    )
    plain = ExpertWeights(*parts)
    x, ids = random_rows(tokens, 64), torch.arange(tokens)[:, None] % experts
    outs = [MoeKernel(w, ActivationSpec(), pool).forward(x, ids, torch.ones(tokens, 1)) for w in (wanting, plain)]
    assert torch.equal(*outs)
    few = torch.zeros(tokens, 1, dtype=torch.int64)  # one expert for all
    outs = [MoeKernel(w, ActivationSpec(), pool).forward(x, few, torch.ones(tokens, 1)) for w in (wanting, plain)]
    assert not torch.equal(*outs)
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_weights_spread_over_nodes_give_the_same_bits(make_weight, isa: Isa) -> None:
    outs = []
    for places in ([ThreadPlace(0), ThreadPlace(1), ThreadPlace(1)], [ThreadPlace(0)]):
        pool = WorkerPool(len(places), isa, places)
        weights = make_experts(make_weight, KINDS[4], 256, 256, 1, pool)
        x, ids = random_rows(40, 256), torch.zeros(40, 1, dtype=torch.int64)
        outs.append(MoeKernel(weights, ActivationSpec(), pool).forward(x, ids, torch.ones(40, 1)))
        pool.close()
    assert torch.equal(*outs)


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("qtype", [QuantType.BF16, *QUANTIZED])
def test_nothing_outside_the_matrix_is_read(make_weight, guarded, isa: Isa, qtype: WeightType) -> None:
    """The last bytes of weights and activations lie just before a page without access."""
    pool = WorkerPool(1, isa)
    if qtype is QuantType.BF16:
        packed = cpu.pack(bf16_weight(32, 256), pool)
    else:
        packed = pack_wanting(quantized_weight(make_weight, qtype, 32, 256), pool)
    inside = dataclasses.replace(packed, data=guarded.copy_to_end(packed.data))
    x = random_rows(MANY, 256)
    at_end = guarded.copy_to_end(x.view(torch.uint8).view(-1)).view(torch.float32).view(MANY, 256)
    assert torch.equal(cpu.linear(at_end, inside, pool), cpu.linear(x, packed, pool))
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("tokens", [3, 40])
def test_matrices_that_share_their_rows(make_weight, isa: Isa, tokens: int) -> None:
    """In one native call, some in bf16 and some not: the same bits as one by one."""
    pool = WorkerPool(2, isa)
    gate = pack_wanting(quantized_weight(make_weight, QuantType.Q4_K, 256, 256), pool)
    up = cpu.pack(bf16_weight(256, 256), pool)
    down = pack_wanting(quantized_weight(make_weight, QuantType.Q8_0, 256, 256), pool)
    norm, x = Norm(torch.rand(256, generator=torch.Generator().manual_seed(5)), 1e-6), random_rows(tokens, 256)
    for wishes in ((True, True), (True, False), (False, True)):
        parts = [dataclasses.replace(part, wants_bf16=wish) for part, wish in zip((gate, down), wishes, strict=True)]
        rows = x.clone()
        MlpLayer(norm, GatedMlp(parts[0], up, parts[1], ActivationSpec())).forward(rows, pool, LayerBuffers())
        normed = cpu.rms_norm(x, norm.weight, norm.eps, pool)
        inner = cpu.activate(ActivationSpec(), cpu.linear(normed, parts[0], pool), cpu.linear(normed, up, pool), pool)
        assert torch.equal(rows, x + cpu.linear(inner, parts[1], pool)), wishes
        rows = x.clone()
        MlpLayer(norm, GatedMlp(parts[1], parts[0], up, ActivationSpec())).forward(rows, pool, LayerBuffers())
        gate_rows, up_rows = cpu.linear(normed, parts[1], pool), cpu.linear(normed, parts[0], pool)
        inner = cpu.activate(ActivationSpec(), gate_rows, up_rows, pool)
        assert torch.equal(rows, x + cpu.linear(inner, up, pool)), wishes
    pool.close()
