"""Large steps whose experts lie on the GPU in part: the same bits as copied ones give, and no copy of what is there.

The GPU is Triton's interpreter on torch's CPU, computing in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.cache.hot_experts import HotExperts
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, StreamShape
from ktransformers.operators.experts.split import Split
from tests.operators.experts.test_gpu_slots import LateCopies
from tests.operators.experts.test_streamed import (
    DEVICE,
    RATES,
    E,
    H,
    K,
    all_on_gpu,
    check,
    inputs,
    make_kernel,
)
from tests.support.engines.inline_device import EagerCopies, InlineDriver, LazyCopies

pytest.importorskip("triton")

from ktransformers.kernels.types import QuantType
from ktransformers.operators.experts import streamed as module
from ktransformers.operators.experts.gpu_slots import HotPool
from ktransformers.operators.experts.host_experts import HostExperts
from ktransformers.operators.experts.staging import Staging, StagingSize
from ktransformers.operators.experts.streamed import ExpertPrefill, PrefillLayer, PrefillShape
from tests.operators.experts.test_streamed import INNER

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

LAYERS = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with_threads = WorkerPool(2)
    yield with_threads
    with_threads.close()


class Rig:
    """Layers of one kind, streamed to a GPU that has slots for some of their experts. copies: of what is streamed."""

    def __init__(self, pool: WorkerPool, copies: EagerCopies, num_slots: int = 0, is_oai: bool = False) -> None:
        qtype = QuantType.MXFP4 if is_oai else QuantType.Q8_0
        self.kernels = [make_kernel(pool, seed, qtype, is_oai) for seed in range(LAYERS)]
        self.nbytes = HostExperts(self.kernels[0].weights).expert_nbytes
        self.copies, self.driver = copies, InlineDriver()
        staging = Staging(StagingSize(3, 2 * (self.nbytes + 3 * 256)), torch.device("cpu"), copies)
        self.staged = [buffer.data for buffer in staging._buffers]
        for data in self.staged:
            data.fill_(0x7E)  # NaN as fp16, wherever a copy is missing
        self.cpu = AsyncCpuExperts(pool, StreamShape(16, K, H, torch.float32), self.driver)
        self.prefill = ExpertPrefill(DEVICE, PrefillShape(E, K, H, INNER, 16), staging, self.cpu, self.driver)
        self.prefill.rates, self.prefill.threshold = RATES, 2
        self.layers = [PrefillLayer(self.prefill, self.prefill.add_layer(kernel)) for kernel in self.kernels]
        self.uploads = LateCopies()
        if num_slots:
            policy = HotExperts(LAYERS, E, num_slots, max_uploads=2)
            self.pool = HotPool(DEVICE, self.kernels, policy, self.uploads, self.driver, max_rows=8)
            for part in self.pool.matrices:
                part.data.fill_(0x7E)
            for number, layer in enumerate(self.layers):
                self.pool.layer(number, layer)

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.layers[layer].collect(self.layers[layer].submit(x, ids, weights), x)

    def held(self, layer: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.pool.mapped[layer] >= 0).tolist())

    @property
    def split(self) -> Split:
        assert self.prefill.last_split is not None
        return self.prefill.last_split

    def close(self) -> None:
        self.cpu.close()


def choosing(monkeypatch: pytest.MonkeyPatch, on_gpu: tuple[int, ...]) -> None:
    """The GPU gets these experts, from slots where it can."""

    def choose(counts: Any, rates: Any, there: Any, ahead: float, overhead: float, held: Any) -> Split:
        kept = tuple(there) if set(there) <= set(on_gpu) else ()
        mine = tuple(e for e in held if e in on_gpu)
        return Split(kept, tuple(e for e in on_gpu if e not in kept and e not in mine), 0.0, mine)

    monkeypatch.setattr(module, "choose_split", choose)


@pytest.mark.parametrize("is_oai", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("kind", [EagerCopies, LazyCopies])
def test_slots_give_the_bits_that_copies_give(
    kind: type[EagerCopies], is_oai: bool, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's experts are the same in both; with slots fewer bytes pass, those of two of the four experts."""
    on_gpu = (0, 1, 3, 4)
    choosing(monkeypatch, on_gpu)
    copying, holding = Rig(pool, kind(), is_oai=is_oai), Rig(pool, kind(), num_slots=4, is_oai=is_oai)
    holding.pool.begin()
    assert [holding.held(layer) for layer in range(LAYERS)] == [(0, 1), (0, 1)]
    for turn in range(2):
        for layer in range(LAYERS):
            x, ids, weights = inputs(10 * turn + layer)
            got, want = (rig.run(layer, x, ids, weights) for rig in (holding, copying))
            assert torch.equal(got, want)
            assert (holding.split.held, copying.split.held) == ((0, 1), ())
            assert set(holding.split.on_gpu) == set(copying.split.on_gpu) == set(on_gpu)
            is_gpu = torch.isin(ids, torch.tensor(on_gpu))
            on_cpu = holding.kernels[layer].forward(x, torch.where(is_gpu, E, ids), weights)
            assert torch.equal(
                got, all_on_gpu(holding.kernels[layer], x, torch.where(is_gpu, ids, E), weights) + on_cpu
            )
    assert copying.copies.num_bytes >= 2 * LAYERS * 4 * copying.nbytes
    assert holding.copies.num_bytes < copying.copies.num_bytes
    assert holding.copies.num_bytes <= 2 * LAYERS * 3 * holding.nbytes  # two, and one at most that was a guess
    holding.close()
    copying.close()


def test_the_choosers_own_split(pool: WorkerPool) -> None:
    """All that has a slot is computed there, and nothing of it is copied, ahead of the choice or behind it."""
    rig = Rig(pool, EagerCopies(), num_slots=2 * 3)
    rig.pool.begin()
    for turn in range(3):
        for layer in range(LAYERS):
            x, ids, weights = inputs(turn + 5 * layer)
            check(rig.run(layer, x, ids, weights), rig.kernels[layer], x, ids, weights)
            assert rig.split.held == rig.held(layer) == (0, 1, 2)
            assert not set(rig.split.passing) & {0, 1, 2}
    rig.close()


def test_with_slots_for_all_nothing_is_copied(pool: WorkerPool) -> None:
    rig = Rig(pool, EagerCopies(), num_slots=LAYERS * E)
    rig.pool.begin()
    for layer in range(LAYERS):
        x, ids, weights = inputs(layer)
        assert torch.equal(rig.run(layer, x, ids, weights), all_on_gpu(rig.kernels[layer], x, ids, weights))
    assert rig.copies.num_copies == 0
    rig.close()


def picks(rig: Rig, layer: int, expert: int) -> None:
    """A small step: the pool counts what its kernel would have counted."""
    rig.pool.picks[layer, expert] += 1
    rig.pool.launched()
    rig.pool.finished(1)


def test_an_expert_on_its_way_is_not_used(pool: WorkerPool) -> None:
    """Neither the one that comes, before its bytes are there, nor the one that goes, whose slot they are to fill."""
    rig = Rig(pool, EagerCopies(), num_slots=4)
    rig.pool.begin()
    x, ids, weights = inputs(3)
    for _ in range(3):
        picks(rig, 0, 4)
    assert len(rig.uploads.left) == 3
    (going,) = {0, 1} - set(rig.held(0))
    assert rig.pool.slot_of[0].tolist() == rig.pool.mapped[0].tolist()  # the device's, and the host's
    check(rig.run(0, x, ids, weights), rig.kernels[0], x, ids, weights)
    assert not {going, 4} & set(rig.split.held)
    first = rig.pool.matrices[0].data.clone()
    rig.uploads.arrive()
    assert not torch.equal(first, rig.pool.matrices[0].data)
    check(rig.run(0, x, ids, weights), rig.kernels[0], x, ids, weights)
    assert not {going, 4} & set(rig.split.held)  # landed, but the map does not say so yet
    picks(rig, 0, 4)
    check(rig.run(0, x, ids, weights), rig.kernels[0], x, ids, weights)
    assert 4 in rig.split.held
    rig.close()


class Order(LateCopies):
    """Notes what waits for what: a mark of the compute stream is the number of products launched before it."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.waited: list[int] = []

    def compute_mark(self) -> int:
        return self.products

    def wait(self, mark: int) -> None:
        self.waited.append(mark)


def test_uploads_wait_for_a_large_step_that_reads_the_slots(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(pool, EagerCopies(), num_slots=4)
    order = Order()
    rig.pool._copies = order
    rig.pool.begin()
    multiply = module.moe_blocks

    def counted(*given: Any, **more: Any) -> None:
        order.products += 1
        multiply(*given, **more)

    monkeypatch.setattr(module, "moe_blocks", counted)
    picks(rig, 0, 4)
    picks(rig, 0, 4)
    before = order.products
    rig.run(0, *inputs(3))
    assert order.products > before
    rig.pool.launched()  # of the large step: decides on the uploads of the one before
    assert order.left
    assert order.waited == [order.products]
    rig.close()


def test_a_group_copied_ahead_that_has_a_slot_meanwhile(pool: WorkerPool) -> None:
    """Each expert is computed once, whichever of its two places is taken."""
    rig = Rig(pool, EagerCopies(), num_slots=4)
    x, ids, weights = inputs(1)
    for layer in range(LAYERS):
        rig.run(layer, x, ids, weights)  # what has most rows is known
    rig.run(0, x, ids, weights)
    ahead = {expert for group in rig.prefill._ahead[1] for expert in group.experts}
    assert ahead & {0, 1}
    rig.pool.begin()
    check(rig.run(1, x, ids, weights), rig.kernels[1], x, ids, weights)
    assert len(set(rig.split.on_gpu)) == len(rig.split.on_gpu)
    rig.close()
