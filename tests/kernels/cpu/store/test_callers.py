"""Whoever calls experts can call those of a store: whole layers, and a GPU's stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_counts import ExpertCounts
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.cpu.layer import MoeLayer, Norm
from ktransformers.kernels.cpu.router import RouterSpec
from ktransformers.kernels.extension import extension
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, EnqueueMethod, StreamShape
from ktransformers.kernels.types import QuantType, RawTensor
from tests.support.checks.stored_experts import Stored, build, make_layer
from tests.support.engines.fake_stream import FakeDriver

EXPERTS, TOP_K, HIDDEN = 8, 2, 256


@pytest.fixture
def made(make_weight: Callable[..., RawTensor], tmp_path: Path) -> Iterator[Stored]:
    pool = WorkerPool(2)
    layers = [make_layer(make_weight, pool, experts=EXPERTS, seed=seed) for seed in range(3)]
    stored = build(tmp_path / "experts", layers, pool, slots=6, top_k=TOP_K)
    stored.store.handle._slow_down(5)
    yield stored
    stored.store.close()
    pool.close()


def test_whole_layers(made: Stored, make_weight: Callable[..., RawTensor]) -> None:
    pool, buffers = made.resident[0].pool, extension.LayerBuffers()
    counted = [ExpertCounts(), ExpertCounts()]
    pairs = []
    for number in range(3):
        norm, router = Norm(torch.rand(HIDDEN), 1e-6), make_weight(QuantType.F32, EXPERTS, HIDDEN, seed=50 + number)
        kernels = (made.resident[number], made.kernels[number])
        pairs.append([MoeLayer(norm, router, RouterSpec(TOP_K), kernel, layer=number) for kernel in kernels])
        for counts, kernel in zip(counted, kernels, strict=True):
            counts.watch(kernel)
    for seed in range(12):
        rows = torch.randn((1, 3, 40)[seed % 3], HIDDEN, generator=torch.Generator().manual_seed(seed))
        ours, theirs = rows.clone(), rows.clone()
        for resident, stored in pairs:
            assert torch.equal(stored.forward(ours, pool, buffers), resident.forward(theirs, pool, buffers))
            assert torch.equal(ours, theirs)
    assert counted[0].totals() == counted[1].totals()
    assert counted[0].take() == counted[1].take()


def test_a_warm_layer_takes_no_memory_from_the_heap(made: Stored) -> None:
    if extension.num_allocations() < 0:
        pytest.skip("allocations are not counted on this system")
    arguments = torch.ones(1, HIDDEN), torch.tensor([[1, 2]]), torch.ones(1, TOP_K)
    for kernel in made.kernels:
        kernel.forward(*arguments)
    before = extension.num_allocations()
    for kernel in made.kernels:
        kernel.forward(*arguments)
    assert extension.num_allocations() == before


@pytest.mark.parametrize("method", EnqueueMethod)
def test_a_stream(made: Stored, method: EnqueueMethod) -> None:
    driver = FakeDriver()
    shape = StreamShape(8, TOP_K, HIDDEN, torch.float32)
    experts = AsyncCpuExperts(made.resident[0].pool, shape, driver, method)
    for kernel in made.kernels:
        experts.add_layer(kernel)

    def call(layer: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1 + seed % 8, HIDDEN, generator=generator)
        ids = torch.randint(0, EXPERTS + 1, (len(x), TOP_K), generator=generator)
        weights, out = torch.rand(len(x), TOP_K, generator=generator), torch.empty_like(x)
        experts.submit(layer, x, ids, weights)
        experts.collect(out)
        return out, made.resident[layer].forward(x, ids, weights)

    rounds = [call(seed % 3, seed) for seed in range(30)]
    driver.synchronize()
    experts.check()
    assert all(torch.equal(got, want) for got, want in rounds)
    made.store.handle._fail_next(1)
    call(0, 7)
    call(1, 7)
    driver.synchronize()
    with pytest.raises(ReadError, match=f"{made.path} cannot be read"):
        experts.check()
    got, want = call(0, 7)
    driver.synchronize()
    experts.check()
    assert torch.equal(got, want)
    experts.close()
    driver.stop()
