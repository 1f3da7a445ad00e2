"""Re-laying in pieces while loading: the same bytes as in one go."""

from __future__ import annotations

import pytest
import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import Isa, WorkerPool
from ktransformers.kernels.types import ExpertWeights, Fp8Matrix, PackedTensor, QuantType, RawTensor
from ktransformers.operators.base import OperatorConfig
from ktransformers.operators.linear import packed as module
from ktransformers.operators.linear.packed import CpuProducts
from ktransformers.weights.quantize.write import quantize


@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0])
@pytest.mark.parametrize("rows", [16, 100, 257])
def test_pieces_make_the_whole(qtype: QuantType, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).numpy()
    weight = RawTensor(torch.from_numpy(quantize(values, qtype)).reshape(-1), qtype, (rows, 512))
    pool = WorkerPool(1)
    whole = cpu.pack(weight, pool)
    monkeypatch.setattr(module, "_PIECE", 40 * weight.row_bytes)  # 32 rows at a time
    made = module.pack_matrix(weight, pool)
    assert isinstance(made, PackedTensor)
    assert torch.equal(made.data, whole.data)
    assert made.shape == (rows, 512)
    pool.close()


@pytest.mark.parametrize("rows", [16, 300, 513])
def test_pieces_of_fp8_make_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 127, (rows, 260), dtype=torch.uint8, generator=generator)
    weight = Fp8Matrix(values, torch.rand(-(-rows // 128), 3, generator=generator))
    pool = WorkerPool(1)
    whole = cpu.pack_fp8(weight, pool)
    monkeypatch.setattr(module, "_PIECE", 300 * 260)  # 256 rows at a time
    made = module.pack_matrix(weight, pool)
    assert isinstance(made, PackedTensor)
    assert torch.equal(made.data, whole.data)
    assert made.shape == (rows, 260)
    pool.close()


def test_unquantized_weights_stay_where_they_are() -> None:
    weight = RawTensor.from_tensor(torch.zeros(16, 32))
    assert module.pack_matrix(weight, WorkerPool(1)) is weight


@pytest.mark.parametrize("isa", [Isa.AMX_EMULATED, Isa.AVX512_BF16_EMULATED])
def test_bf16_is_re_laid_where_it_can_be_multiplied(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(100, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight = RawTensor.from_tensor(values)
    pool, scalar = WorkerPool(1, isa), WorkerPool(1, Isa.SCALAR)
    monkeypatch.setattr(module, "_PIECE", 40 * weight.row_bytes)
    made = module.pack_matrix(weight, pool)
    assert isinstance(made, PackedTensor)
    assert torch.equal(made.data, cpu.pack(weight, pool).data)
    assert module.pack_matrix(weight, scalar) is weight
    narrow = RawTensor.from_tensor(values[:, :40])
    assert module.pack_matrix(narrow, pool) is narrow
    assert module.pack_matrix(weight, pool, CpuProducts(takes_bf16=False)) is weight
    experts = ExpertWeights(None, [weight, weight], [RawTensor.from_tensor(values.T.contiguous())] * 2)
    repack_on_device = module.pack_experts(experts, pool)
    assert [type(part[1]) for part in (repack_on_device.up, repack_on_device.down)] == [
        PackedTensor,
        RawTensor,
    ]  # 100 columns: no whole tiles
    assert module.pack_experts(experts, pool, CpuProducts(takes_bf16=False)).up is experts.up
    for used in (pool, scalar):
        used.close()


def test_the_wish_for_bf16_comes_from_the_rule_or_the_default() -> None:
    for default, wanted in (("int8", [False, False, True]), ("bf16", [True, False, True])):
        config = OperatorConfig(None, cpu_prefill=default)
        assert [CpuProducts.of("a", config, given).wants_bf16 for given in (None, "int8", "bf16")] == wanted
    with pytest.raises(UnsupportedError, match=r"a\.b: cpu_prefill 'fp4' is not one of int8, bf16"):
        CpuProducts.of("a.b", OperatorConfig(None), "fp4")
    weight = RawTensor(torch.zeros(16 * 34, dtype=torch.uint8), QuantType.Q8_0, (16, 32))
    pool = WorkerPool(1)
    made = [module.pack_matrix(weight, pool, CpuProducts(wants_bf16=wish)) for wish in (False, True)]
    assert [isinstance(one, PackedTensor) and one.wants_bf16 for one in made] == [False, True]
    repack_on_device = module.pack_experts(ExpertWeights(None, [weight], [weight]), pool, CpuProducts(wants_bf16=True))
    assert [
        isinstance(part[0], PackedTensor) and part[0].wants_bf16
        for part in (repack_on_device.up, repack_on_device.down)
    ] == [
        True,
        True,
    ]
    pool.close()


def test_experts_that_are_to_be_pinned_leave_their_file() -> None:
    """Those that stay as they are: copied, side by side, on pages of their own."""
    parts = [[RawTensor.from_tensor(torch.randn(rows, 48).half()) for _ in range(3)] for rows in (8, 8, 16)]
    weights, pool = ExpertWeights(*parts), WorkerPool(1)
    assert module.pack_experts(weights, pool).up is weights.up
    made = module.pack_experts(weights, pool, is_pinned=True)
    for old, new in zip(parts, (made.gate, made.up, made.down), strict=True):
        assert new is not None
        addresses = [weight.data.data_ptr() for weight in new]
        assert addresses[0] % 4096 == 0
        assert addresses == [addresses[0] + i * new[0].nbytes for i in range(3)]
        for before, after in zip(old, new, strict=True):
            assert isinstance(after, RawTensor)
            assert torch.equal(before.data, after.data)
            assert before.data.data_ptr() != after.data.data_ptr()
    pool.close()


def test_experts_are_re_laid_in_a_few_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in one each, whose threads would write into the same huge pages and wait for one another."""
    experts, rows, cols = 24, 64, 512
    values = torch.randn(experts * rows, cols, generator=torch.Generator().manual_seed(1)).numpy()
    whole = RawTensor(
        torch.from_numpy(quantize(values, QuantType.Q8_0)).reshape(-1), QuantType.Q8_0, (experts, rows, cols)
    )
    weights = [whole.select(expert) for expert in range(experts)]
    pool = WorkerPool(2)
    before = pool.handle.num_jobs
    made = module.pack_experts(ExpertWeights(None, weights, weights), pool)
    assert pool.handle.num_jobs - before <= 4
    for at_once in (1, 7, 24):
        monkeypatch.setattr(module, "_PIECE", at_once * weights[0].nbytes)
        monkeypatch.setattr(module, "_SHARE", 1)
        pieces = module.pack_experts(ExpertWeights(None, weights, weights), pool)
        for one, other, weight in zip(made.up, pieces.up, weights, strict=True):
            assert isinstance(one, PackedTensor)
            assert isinstance(other, PackedTensor)
            assert torch.equal(one.data, other.data)
            assert torch.equal(one.data, cpu.pack(weight, pool).data)
    pool.close()


def takes(key: str, default: str, given: str | None = None) -> bool:
    return CpuProducts.of(key, OperatorConfig(None, cpu_bf16=default), cpu_bf16=given).takes_bf16


def test_routers_and_attention_are_multiplied_in_fp32() -> None:
    for key in (
        "model.layers.3.self_attn.q_proj",
        "transformer.h.0.attn.c_attn",
        "a.mlp.gate",
        "a.mlp.gate.wg",
        "b.router",
    ):
        assert not takes(key, "bf16"), key
    for key in ("a.mlp.gate_proj", "a.mlp.experts", "lm_head", "a.mlp.shared_expert_gate"):
        assert takes(key, "bf16"), key
        assert not takes(key, "fp32"), key
    assert takes("a.self_attn.q_proj", "fp32", "bf16")  # a rule file is taken at its word
    with pytest.raises(UnsupportedError, match=r"a\.b: cpu_bf16 'int8' is not one of bf16, fp32"):
        takes("a.b", "bf16", "int8")
