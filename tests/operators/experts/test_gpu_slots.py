"""Experts of which some have slots on a GPU, against all of them on the CPU and all of them on the GPU.

The GPU is Triton's interpreter on torch's CPU, computing in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ktransformers.cache.hot_experts import HotExperts
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, StreamShape
from ktransformers.operators.device import Device
from tests.operators.experts.test_streamed import E, H, K, all_on_gpu, check, make_kernel
from tests.support.engines.inline_device import EagerCopies, InlineDriver

pytest.importorskip("triton")

from ktransformers.kernels.types import QuantType
from ktransformers.operators.experts.gpu_slots import HotLayer, HotPool, kind_of
from ktransformers.operators.usage import ExpertUsage

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

T = 5
DEVICE = Device("cuda:0", torch.device("cpu"), torch.float32, is_gpu=True)


class LateCopies(EagerCopies):
    """A copy is made when `arrive` is called, if the compute stream is past the mark that it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[int, int, int]] = []
        self.num_arrived = 0

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self.left.append((target, source, nbytes))

    def arrive(self) -> None:
        for target, source, nbytes in self.left:
            EagerCopies._copy(self, target, source, nbytes)
        self.num_arrived += len(self.left)
        self.left.clear()

    def synchronize(self, mark: int) -> None:
        if mark > self.num_arrived:
            self.arrive()

    def is_done(self, mark: int) -> bool:
        return self.num_arrived >= mark


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with_threads = WorkerPool(2)
    yield with_threads
    with_threads.close()


class Rig:
    """Two layers of one kind, and what their operators do in a step."""

    def __init__(self, pool: WorkerPool, num_slots: int, is_oai: bool = False) -> None:
        qtype = QuantType.MXFP4 if is_oai else QuantType.Q4_0
        self.kernels = [make_kernel(pool, seed, qtype, is_oai) for seed in (1, 2)]
        assert kind_of(self.kernels[0]) == kind_of(self.kernels[1])
        self.driver, self.copies = InlineDriver(), LateCopies()
        self.policy = HotExperts(2, E, num_slots, max_uploads=2)
        self.pool = HotPool(DEVICE, self.kernels, self.policy, self.copies, self.driver, max_rows=8)
        for part in self.pool.matrices:
            part.data.fill_(0x7E)  # NaN as fp16, wherever a copy is missing
        self.usage = ExpertUsage(2, E, torch.device("cpu"))
        self.cpu = AsyncCpuExperts(pool, StreamShape(16, K, H, torch.float32), self.driver)
        self.numbers = [self.cpu.add_layer(kernel) for kernel in self.kernels]
        self.layers: list[HotLayer] = [self.pool.layer(number, None) for number in range(2)]

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(len(ids))
        here, there = self.layers[layer].split(ids, layer, self.usage, slots)
        self.cpu.submit(self.numbers[layer], x, there, weights)
        parts = self.layers[layer].launch(x, here, weights)
        return parts.sum_onto(self.cpu.collect(torch.empty(len(x), H)), x)

    def step(self, ids: torch.Tensor, layer: int = 0) -> None:
        """A step of one layer, whose results nobody looks at."""
        self.run(layer, torch.zeros(len(ids), H), ids, torch.ones(ids.shape))
        self.pool.launched()
        self.pool.finished(len(ids))


def inputs(seed: int = 0, rows: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every fifth id is E, which counts for nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, H, generator=generator)
    ids = torch.rand(rows, E, generator=generator).argsort(1)[:, :K].contiguous()
    ids.view(-1)[::5] = E
    return x, ids, torch.rand(rows, K, generator=generator)


@pytest.mark.parametrize("is_oai", [False, True], ids=["plain", "biases"])
def test_some_here_and_some_there(pool: WorkerPool, is_oai: bool) -> None:
    rig = Rig(pool, num_slots=6, is_oai=is_oai)
    x, ids, weights = inputs()
    rig.pool.begin()
    assert (rig.pool.slot_of >= 0).sum(1).tolist() == [3, 3]
    for layer, kernel in enumerate(rig.kernels):
        check(rig.run(layer, x, ids, weights), kernel, x, ids, weights)
    rig.cpu.close()


def test_nothing_has_a_slot_before_the_beginning(pool: WorkerPool) -> None:
    """The CPU's result, as it is without slots, bit for bit."""
    rig = Rig(pool, num_slots=6)
    x, ids, weights = inputs()
    assert torch.equal(rig.run(0, x, ids, weights), rig.kernels[0].forward(x, ids, weights))
    rig.pool.launched()
    rig.pool.finished(T)
    assert rig.policy.totals.steps == 0
    rig.cpu.close()


def test_with_slots_for_all_it_is_the_whole_placement(pool: WorkerPool) -> None:
    """Bit for bit: one order of sums, on a CPU's part of nothing."""
    rig = Rig(pool, num_slots=2 * E)
    rig.pool.begin()
    x, ids, weights = inputs()
    assert torch.equal(rig.run(1, x, ids, weights), all_on_gpu(rig.kernels[1], x, ids, weights))
    rig.cpu.close()


def picked(expert: int) -> torch.Tensor:
    return torch.tensor([[expert, E]])


def test_an_expert_changes_places_between_steps(pool: WorkerPool) -> None:
    """The one that goes is gone from the next step on, its place is written behind the steps that may read it, and the
    one that comes is there once its bytes are. Every result is right meanwhile."""
    rig = Rig(pool, num_slots=4)
    rig.pool.begin()
    assert rig.pool.slot_of[0].tolist() == [0, 1, -1, -1, -1, -1]
    x, ids, weights = inputs(3)
    for _ in range(3):  # the third one's launch knows of the second
        rig.step(picked(4))
    (going,) = rig.copies.left[0][0:1]
    assert going == rig.pool.matrices[0].data.data_ptr() + 0 * rig.pool.hosts[0].projections[0].nbytes
    assert rig.pool.slot_of[0].tolist() == [-1, 1, -1, -1, -1, -1]
    check(rig.run(0, x, ids, weights), rig.kernels[0], x, ids, weights)
    rig.step(picked(4))
    assert rig.pool.slot_of[0].tolist() == [-1, 1, -1, -1, -1, -1]  # nobody waits for it
    rig.copies.arrive()
    rig.step(picked(4))
    assert rig.pool.slot_of[0].tolist() == [-1, 1, -1, -1, 0, -1]
    check(rig.run(0, x, ids, weights), rig.kernels[0], x, ids, weights)
    assert rig.policy.totals.uploads == 1
    rig.policy.check_integrity()
    rig.cpu.close()


def test_a_replayed_graph_sees_the_new_map(pool: WorkerPool) -> None:
    """What a graph keeps are addresses: map and slots stay where they are."""
    rig = Rig(pool, num_slots=4)
    rig.pool.begin()
    before = [rig.pool.slot_of.data_ptr(), *(part.data.data_ptr() for part in rig.pool.matrices)]
    for _ in range(3):
        rig.step(picked(5), layer=1)
        rig.copies.arrive()
    rig.step(picked(5), layer=1)
    assert rig.pool.slot_of[1, 5] >= 0
    assert [rig.pool.slot_of.data_ptr(), *(part.data.data_ptr() for part in rig.pool.matrices)] == before
    rig.cpu.close()


def test_counts_are_exact(pool: WorkerPool) -> None:
    """Those with a slot are counted on the GPU, the others where they run; padding is neither."""
    rig = Rig(pool, num_slots=6)
    rig.pool.begin()
    _, ids, _ = inputs(7)
    slots = torch.tensor([0, -1, 1, 2, -1])
    here, there = rig.layers[0].split(ids, 0, rig.usage, slots)
    rig.usage.fetch(T, range(T))
    real = ids[slots >= 0]
    want = np.bincount(real.flatten().numpy(), minlength=E + 1)[:E]
    assert rig.pool.picks[0].tolist() == want.tolist()
    has_slot = (rig.pool.slot_of[0] >= 0).numpy()
    assert rig.usage.counts[0].tolist() == np.where(has_slot, want, 0).tolist()
    assert torch.equal(rig.usage.ids()[K][0], here)
    assert torch.equal(torch.where(here >= 0, here, there).long(), ids)
    assert ((here >= 0) ^ (there < E) | (ids == E)).all()
    rig.usage.forget(0, T)
    rig.usage.fetch(T, range(T))
    assert (rig.usage.ids()[K][0] == -1).all()
    rig.cpu.close()


def test_large_steps_teach_nothing(pool: WorkerPool) -> None:
    rig = Rig(pool, num_slots=6)
    rig.pool.begin()
    for _ in range(4):
        rig.step(picked(4).expand(9, K).contiguous())
    assert rig.policy.totals.steps == 0
    rig.step(picked(4))
    rig.step(picked(4))
    assert rig.policy.totals.reads == 1  # of the step before the last, and of that alone
    rig.cpu.close()


def test_layers_of_other_kinds(pool: WorkerPool) -> None:
    one: MoeKernel = make_kernel(pool, 0, QuantType.Q8_0)
    assert kind_of(one) != kind_of(make_kernel(pool, 0, QuantType.Q4_0))
