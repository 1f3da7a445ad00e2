"""FP8 weights with block scales: near fp64, by a bound that follows from the arithmetic; equal bits in every tier."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import cpu, reference
from ktransformers.kernels.cpu import Isa, MoeKernel, WorkerPool
from ktransformers.kernels.cpu.topology import ThreadPlace
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, Fp8Matrix, OwnType, QuantType, RawTensor
from tests.support.checks.products import thinned

TIERS = (*cpu.available_isas(), Isa.AMX_EMULATED)
SHAPES = [(16, 128), (128, 256), (5, 4), (33, 132), (200, 384), (129, 1028), (272, 60)]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 130)
ROUND = 2.0**-24  # largest relative error of one fp32 operation


def random_fp8(rows: int, cols: int, seed: int = 0) -> Fp8Matrix:
    """Any code that is a number, subnormals included, under scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=generator)
    values[(values & 127) == 127] = 0x80
    scales = torch.randn(-(-rows // 128), -(-cols // 128), generator=generator) * 0.01
    return Fp8Matrix(values, scales)


def random_rows(tokens: int, cols: int) -> torch.Tensor:
    return torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens))


# One tier for each shape is enough, because the next test says that all give the same bits.
@pytest.mark.parametrize(("isa", "rows", "cols"), thinned(((i, *shape) for i in TIERS for shape in SHAPES), strength=1))
def test_linear_is_near_fp64(isa: Isa, rows: int, cols: int) -> None:
    pool = WorkerPool(2, isa)
    weight = random_fp8(rows, cols)
    packed = cpu.pack_fp8(weight, pool)
    wide = reference.dequantize(weight).double()
    # A product passes 32 fused steps, 2 sums, the scale and a sum per 128 columns; the oracle rounds value times scale.
    steps = 32 + 2 + 1 + -(-cols // 128) + 1
    for tokens in TOKENS:
        x = random_rows(tokens, cols)
        error = (cpu.linear(x, packed, pool).double() - x.double() @ wide.T).abs()
        assert (error <= 1.01 * steps * ROUND * (x.double().abs() @ wide.abs().T)).all(), tokens
    pool.close()


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_every_tier_thread_count_and_number_of_tokens_gives_the_same_bits(rows: int, cols: int) -> None:
    weight, x = random_fp8(rows, cols, seed=1), random_rows(max(TOKENS), cols)
    first = WorkerPool(1, Isa.SCALAR)
    packed = cpu.pack_fp8(weight, first)
    want = cpu.linear(x, packed, first)
    first.close()
    for isa in TIERS:
        for threads in (1, 3):
            pool = WorkerPool(threads, isa)
            assert torch.equal(cpu.pack_fp8(weight, pool).data, packed.data), isa
            for tokens in TOKENS:
                assert torch.equal(cpu.linear(x[-tokens:].contiguous(), packed, pool), want[-tokens:]), (isa, tokens)
            pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_all_codes_are_exact(isa: Isa) -> None:
    """One column is 1 and all others are 0: what comes out is the weight, for every code that is a number."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = codes[(codes & 127) != 127]  # 254 numbers
    values = torch.zeros(256, 128, dtype=torch.uint8)
    for column in range(4):  # every place in a line
        values[:254, 40 + column] = codes.roll(column)
    weight = Fp8Matrix(values, torch.tensor([[0.5], [-3.0]]))
    pool = WorkerPool(1, isa)
    packed = cpu.pack_fp8(weight, pool)
    wanted = reference.dequantize(weight)
    for tokens in (1, 3, 20):
        for column in range(4):
            x = torch.zeros(tokens, 128)
            x[:, 40 + column] = 1
            assert torch.equal(cpu.linear(x, packed, pool), wanted[:, 40 + column].expand(tokens, -1))
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_small_integers_are_exact(isa: Isa) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-8, 9, (144, 516), generator=generator).float().to(torch.float8_e4m3fn).view(torch.uint8)
    weight = Fp8Matrix(values, torch.full((2, 5), 0.25))
    x = torch.randint(-9, 10, (19, 516), generator=generator).float()
    pool = WorkerPool(2, isa)
    bias = torch.randint(-9, 10, (144,), generator=generator).float()
    packed = cpu.pack_fp8(weight, pool)
    assert torch.equal(cpu.linear(x, packed, pool, bias), reference.linear(x, weight, bias))
    assert torch.equal(cpu.linear(x[:1], packed, pool, bias), reference.linear(x[:1], weight, bias))
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_shows(isa: Isa, code: int) -> None:
    weight = random_fp8(160, 260)
    weight.values[37, 259] = code
    pool = WorkerPool(1, isa)
    packed = cpu.pack_fp8(weight, pool)
    for tokens in (1, 9):
        out = cpu.linear(random_rows(tokens, 260), packed, pool)
        assert out[:, 32:48].isnan().all()  # the tile of row 37
        assert not out[:, :32].isnan().any()
        assert not out[:, 48:].isnan().any()
    pool.close()


def test_subnormal_and_infinite_scales_and_activations() -> None:
    weight = random_fp8(16, 256)
    weight.scales[0, 0], weight.scales[0, 1] = 1e-42, 2.0**119
    x = random_rows(3, 256)
    x[:, 128:] *= 2.0**-119
    outs = []
    for isa in TIERS:
        pool = WorkerPool(1, isa)
        packed = cpu.pack_fp8(weight, pool)
        outs.append(cpu.linear(x, packed, pool))
        assert cpu.linear(torch.full((1, 256), torch.inf), packed, pool).isfinite().sum() == 0
        pool.close()
    assert all(torch.equal(out, outs[0]) for out in outs)
    wide = x.double() @ reference.dequantize(weight).double().T
    torch.testing.assert_close(outs[0].double(), wide, rtol=0, atol=1e-3)


@pytest.mark.every(4)
@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("hidden", [256, 200])
def test_experts_equal_their_linears(isa: Isa, hidden: int) -> None:
    experts, width, top_k = 5, 272, 2
    pool = WorkerPool(3, isa)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = (
        [cpu.pack_fp8(random_fp8(*shape, seed=10 * part + e), pool) for e in range(experts)]
        for part, shape in enumerate(shapes)
    )
    kernel = MoeKernel(ExpertWeights(gate, up, down), ActivationSpec(), pool)
    for tokens in (1, 3, 40, 300):
        x = random_rows(tokens, hidden)
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
        weights = torch.rand(tokens, top_k, generator=generator)
        each = torch.stack(
            [
                cpu.linear(
                    cpu.activate(ActivationSpec(), cpu.linear(x, gate[e], pool), cpu.linear(x, up[e], pool), pool),
                    down[e],
                    pool,
                )
                for e in range(experts)
            ]
        )
        terms = [weights[:, k, None] * each[ids[:, k], torch.arange(tokens)] for k in range(top_k)]
        assert torch.equal(kernel.forward(x, ids, weights), terms[0] + terms[1])
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
def test_projections_of_several_types(isa: Isa) -> None:
    """Kernels that take quantized activations stand beside FP8, which takes none."""
    pool = WorkerPool(2, isa)
    q8 = torch.randint(0, 256, (64 * 2 * 34,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    q8.view(-1, 34)[:, 1] = 0x20
    quantized = cpu.pack(RawTensor(q8, QuantType.Q8_0, (64, 64)), pool)
    fp8 = cpu.pack_fp8(random_fp8(64, 64), pool)
    x, ids = random_rows(30, 64), torch.zeros(30, 1, dtype=torch.int64)
    for gate, up, down in ((fp8, quantized, fp8), (quantized, fp8, quantized), (fp8, fp8, quantized)):
        out = MoeKernel(ExpertWeights([gate], [up], [down]), ActivationSpec(), pool).forward(x, ids, torch.ones(30, 1))
        inner = cpu.activate(ActivationSpec(), cpu.linear(x, gate, pool), cpu.linear(x, up, pool), pool)
        assert torch.equal(out, cpu.linear(inner, down, pool))
    pool.close()


def test_weights_spread_over_nodes_give_the_same_bits() -> None:
    spread = WorkerPool(3, places=[ThreadPlace(0), ThreadPlace(1), ThreadPlace(1)])
    single = WorkerPool(1)
    weights = [random_fp8(*shape) for shape in ((272, 200), (272, 200), (200, 272))]
    x, ids = random_rows(40, 200), torch.zeros(40, 1, dtype=torch.int64)
    outs = []
    for pool in (spread, single):
        gate, up, down = ([cpu.pack_fp8(weight, pool)] for weight in weights)
        outs.append(MoeKernel(ExpertWeights(gate, up, down), ActivationSpec(), pool).forward(x, ids, torch.ones(40, 1)))
        pool.close()
    assert torch.equal(*outs)


def test_re_laying_costs_at_most_three_percent() -> None:
    for rows, cols in ((2048, 7168), (7168, 2048), (1536, 7168), (576, 7168), (24576, 1536), (256, 2048)):
        assert cpu.packed_nbytes(OwnType.F8_E4M3, rows, cols) <= 1.03 * rows * cols


def test_what_is_no_fp8_matrix_is_refused() -> None:
    values, scales = torch.zeros(130, 256, dtype=torch.uint8), torch.ones(2, 2)
    with pytest.raises(TypeError, match="uint8 values and fp32 scales"):
        Fp8Matrix(values.float(), scales)
    with pytest.raises(ValueError, match=r"scales must be contiguous \[2, 2\], got \[1, 2\]"):
        Fp8Matrix(values, scales[:1])
    with pytest.raises(ValueError, match="K a multiple of 4"):
        Fp8Matrix(torch.zeros(4, 6, dtype=torch.uint8), torch.ones(1, 1))
    with pytest.raises(IndexError, match="begins with a block"):
        Fp8Matrix(values, scales).rows_slice(16, 130)
    pool = WorkerPool(1)
    with pytest.raises(TypeError, match="made by pack or pack_fp8, got Fp8Matrix"):
        cpu.linear(torch.zeros(1, 256), Fp8Matrix(values, scales), pool)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out must have shape"):
        cpu.pack_fp8(Fp8Matrix(values, scales), pool, out=torch.empty(3, dtype=torch.uint8))
    pool.close()


def test_nothing_outside_the_matrix_is_read(guarded) -> None:
    """The last bytes of codes, scales, lines and activations lie just before a page without access."""
    for isa in TIERS:
        pool = WorkerPool(1, isa)
        weight = random_fp8(21, 68)
        values = guarded.copy_to_end(weight.values.view(-1)).view(21, 68)
        packed = cpu.pack_fp8(Fp8Matrix(values, weight.scales), pool)
        inside = type(packed)(guarded.copy_to_end(packed.data), packed.qtype, packed.shape)
        for tokens in (1, 5):
            x = random_rows(tokens, 68)
            at_end = guarded.copy_to_end(x.view(torch.uint8).view(-1)).view(torch.float32).view(tokens, 68)
            assert torch.equal(cpu.linear(at_end, inside, pool), cpu.linear(x, packed, pool))
        pool.close()
