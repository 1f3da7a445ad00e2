"""A MoeKernel with a store gives the bits of one with all experts in memory, whatever is there and comes when."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu import ExpertStore, MoeKernel, WorkerPool, has_bf16, pack_fp8
from ktransformers.kernels.cpu.profile import PoolProfile
from ktransformers.kernels.types import Activation, ActivationSpec, ExpertWeights, Fp8Matrix, QuantType, RawTensor
from tests.support.checks import native_records
from tests.support.checks.products import product
from tests.support.checks.stored_experts import Layer, Stored, build, make_layer

MakeWeight = Callable[..., RawTensor]

EXPERTS, TOP_K = 8, 3

# (gate and up, down), whether packed: block layout and tiles, codes that are looked up, groups, floats.
KINDS = [
    ((QuantType.Q8_0, QuantType.Q8_0), True),
    ((QuantType.Q8_0, QuantType.Q4_0), False),
    ((QuantType.Q4_K, QuantType.Q6_K), True),
    ((QuantType.Q5_K, QuantType.Q5_K), False),
    ((QuantType.IQ2_XS, QuantType.IQ4_XS), True),
    ((QuantType.MXFP4, QuantType.MXFP4), True),
    ((QuantType.F32, QuantType.F16), False),
]
BUDGETS = {"one wave": TOP_K + 2, "half": EXPERTS, "all": 2 * EXPERTS}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(3)
    yield made
    made.close()


def call(tokens: int, hidden: int, seed: int, top_k: int = TOP_K, experts: int = EXPERTS) -> tuple[torch.Tensor, ...]:
    """Hidden states, ids of which some are skipped, weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.randint(0, experts + 1, (tokens, top_k), generator=generator)
    return x, ids, torch.rand(tokens, top_k, generator=generator)


def assert_equal(made: Stored, layer: int, tokens: int, seed: int, top_k: int = TOP_K) -> None:
    kernel, resident = made.kernels[layer], made.resident[layer]
    arguments = call(tokens, kernel.hidden_size, seed, top_k, kernel.num_experts)
    assert torch.equal(kernel.forward(*arguments), resident.forward(*arguments)), (layer, tokens, seed)


@product(2, kinds=KINDS, has_gate=[True, False], is_straight=[False, True], budget=list(BUDGETS))
def test_equals_experts_in_memory(
    kinds: tuple[tuple[QuantType, QuantType], bool],
    has_gate: bool,
    is_straight: bool,
    budget: str,
    make_weight: MakeWeight,
    pool: WorkerPool,
    tmp_path: Path,
) -> None:
    layers = [
        make_layer(make_weight, pool, kinds[0], EXPERTS, (256, 512), seed, has_gate, kinds[1]) for seed in range(2)
    ]
    spec = ActivationSpec() if has_gate else ActivationSpec(Activation.RELU2)
    made = build(tmp_path / "experts", layers, pool, BUDGETS[budget], TOP_K, spec, is_straight)
    made.store.handle._slow_down(5)
    for seed, tokens in enumerate((1, 1, 2, 5, 17, 64, 1, 700)):
        for layer in range(2):
            assert_equal(made, layer, tokens, seed)
    made.store.close()


def test_block_types_of_the_program_itself(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    """FP8 with its scales is in records only as the kernels take it; so are matrices that many rows take as bf16."""
    generator = torch.Generator().manual_seed(3)

    def fp8(rows: int, cols: int) -> list[object]:
        codes = torch.randint(0, 120, (EXPERTS, rows, cols), dtype=torch.uint8, generator=generator)
        scales = torch.rand(EXPERTS, -(-rows // 128), -(-cols // 128), generator=generator) * 0.01
        return [pack_fp8(Fp8Matrix(*one), pool) for one in zip(codes, scales, strict=True)]

    quantized = make_layer(make_weight, pool, (QuantType.Q4_K, QuantType.Q4_K), EXPERTS, (256, 512))
    weights = ExpertWeights(fp8(96, 256), fp8(96, 256), fp8(256, 96))  # type: ignore[arg-type]
    layers = [Layer(weights, weights)]
    if has_bf16(pool.isa):
        wanting = [
            [dataclasses.replace(one, wants_bf16=True) for one in part]
            for part in (  # type: ignore[type-var]
                quantized.resident.gate or (),
                quantized.resident.up,
                quantized.resident.down,
            )
        ]
        layers.append(Layer(quantized.raw, ExpertWeights(*wanting)))  # type: ignore[arg-type]
    for layer in layers:
        made = build(tmp_path / "experts", [layer], pool, TOP_K + 2, TOP_K)
        for seed, tokens in enumerate((1, 7, 64, 300)):
            assert_equal(made, 0, tokens, seed)
        made.store.close()


def test_biases_stay_in_memory(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    layer = make_layer(make_weight, pool, (QuantType.F32, QuantType.F32), EXPERTS, (40, 64))
    generator = torch.Generator().manual_seed(5)
    biases = [torch.randn(EXPERTS, size, generator=generator) for size in (40, 40, 64)]
    spec = ActivationSpec(Activation.SWIGLU_OAI)
    made = build(tmp_path / "experts", [layer], pool, TOP_K + 2, TOP_K, spec)
    resident = dataclasses.replace(layer.resident, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2])
    kernel = MoeKernel(ExpertWeights(None, [], [], *biases), spec, pool, 0, (made.store, 0))
    for tokens in (1, 9):
        arguments = call(tokens, 64, tokens)
        assert torch.equal(kernel.forward(*arguments), MoeKernel(resident, spec, pool).forward(*arguments))
    made.store.close()


def test_two_planes_of_activations_and_other_thread_counts(make_weight: MakeWeight, tmp_path: Path) -> None:
    for threads, planes in ((1, 1), (1, 2), (4, 2)):
        pool = WorkerPool(threads, planes=planes)
        layer = make_layer(make_weight, pool, (QuantType.Q4_K, QuantType.Q8_0), EXPERTS, (96, 256))
        made = build(tmp_path / "experts", [layer], pool, TOP_K + 2, TOP_K)
        for tokens in (1, 12, 200):
            assert_equal(made, 0, tokens, tokens)
        made.store.close()
        pool.close()


def test_layers_of_other_sizes_have_slots_of_their_own(
    make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path
) -> None:
    kinds = [QuantType.Q4_0, QuantType.Q8_0, QuantType.Q4_0, QuantType.F16]
    layers = [make_layer(make_weight, pool, (one, one), EXPERTS, (64, 256), seed) for seed, one in enumerate(kinds)]
    made = build(tmp_path / "experts", layers, pool, 40, TOP_K)
    stats = made.store.stats()
    assert stats.slot_nbytes <= made.store.budget_nbytes
    assert stats.num_records == 4 * EXPERTS
    for seed in range(12):
        for layer in range(4):
            assert_equal(made, layer, 1 + seed % 4, seed)
    made.store.close()


@pytest.mark.parametrize("is_straight", [False, True])
def test_random_calls_of_a_slow_disk(
    is_straight: bool,
    make_weight: MakeWeight,
    pool: WorkerPool,
    tmp_path: Path,
    random_cases: Callable[[int, int], int],
) -> None:
    """Records arrive in any order while others are computed; the store fills itself beside that."""
    layers = [make_layer(make_weight, pool, experts=16, shape=(512, 768), seed=seed) for seed in range(3)]
    made = build(tmp_path / "experts", layers, pool, 20, 4, is_straight=is_straight)
    made.store.handle._slow_down(30)
    made.store.fill()
    generator = torch.Generator().manual_seed(11)
    for seed in range(random_cases(60, 2000)):
        tokens = int(torch.randint(1, 9, (1,), generator=generator)) if seed % 10 else 150
        assert_equal(made, seed % 3, tokens, seed, top_k=4)
    stats = made.store.stats()
    assert stats.hits > 0
    assert stats.misses > 0
    assert stats.num_slots == 20
    made.store.close()


@pytest.mark.parametrize("num_pools", [1, 2])
def test_two_threads_call_two_layers(num_pools: int, make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    """With pools of their own both are in the midst of a call, and each holds slots that the other could do with."""
    layers = [make_layer(make_weight, pool, experts=EXPERTS, seed=seed) for seed in range(2)]
    made = build(tmp_path / "experts", layers, pool, TOP_K + 2, TOP_K)
    made.store.handle._slow_down(10)
    other = WorkerPool(2)
    if num_pools == 2:
        made.kernels[1] = MoeKernel(ExpertWeights(None, [], []), ActivationSpec(), other, 1, (made.store, 1))
    done: list[int] = []

    def many(layer: int) -> None:
        for seed in range(60):
            assert_equal(made, layer, (1, 2, 3, 40)[seed % 4], seed)
        done.append(layer)

    threads = [threading.Thread(target=many, args=(layer,)) for layer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]
    made.store.close()
    other.close()


def wait_for_misses(store: ExpertStore, count: int) -> None:
    while store.stats().misses < count:
        pass


def test_a_profile_shows_the_wait(make_weight: MakeWeight, tmp_path: Path) -> None:
    pool = WorkerPool(2)
    made = build(tmp_path / "experts", [make_layer(make_weight, pool)], pool, 8, TOP_K)
    profile = PoolProfile(pool)
    made.store.handle._hold(True)
    thread = threading.Thread(target=assert_equal, args=(made, 0, 2, 1))
    thread.start()
    wait_for_misses(made.store, 1)
    made.store.handle._hold(False)
    thread.join()
    profile.stop()
    ops = [one for one in native_records.records_in(profile.drain()) if isinstance(one, native_records.Op)]
    assert {one.layer for one in ops if one.part == "wait_disk"} == {0}
    assert made.store.stats().waited_seconds > 0
    made.store.close()
    pool.close()
