"""Slots of a GPU over experts of a store: what is uploaded, held, let go of, and what stays in RAM.

Nothing is computed on the GPU, whose memory is the CPU's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.cache.hot_experts import HotExperts
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.weights.quantize.write import quantize
from tests.support.checks.stored_experts import Stored, build, make_layer

pytest.importorskip("triton")

from ktransformers.operators.experts.gpu_slots import HotPool, kind_of
from tests.operators.experts.test_gpu_slots import DEVICE, LateCopies
from tests.support.engines.inline_device import InlineDriver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its copies are made by the CPU")

Experts = set[tuple[int, int]]

E, GPU_SLOTS, RAM_SLOTS = 16, 4, 8


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


class Rig:
    """Two layers of one store."""

    def __init__(self, stored: Stored) -> None:
        self.stored, self.store = stored, stored.store
        assert kind_of(stored.kernels[0]) == kind_of(stored.resident[0])
        self.copies, self.policy = LateCopies(), HotExperts(2, E, GPU_SLOTS, max_uploads=2)
        self.pool = HotPool(DEVICE, stored.kernels, self.policy, self.copies, InlineDriver(), max_rows=8)

    def step(self, layer: int, experts: list[int]) -> None:
        """The CPU computes what has no slot by the map of this step."""
        there = [expert for expert in experts if self.pool.mapped[layer, expert] < 0]
        if there:
            kernel, ids = self.stored.kernels[layer], torch.tensor([there])
            kernel.forward(torch.ones(1, kernel.hidden_size), ids, torch.ones(ids.shape))
        self.pool.picks[layer, experts] += 1
        self.pool.launched()
        self.pool.finished(1)

    def on_gpu(self) -> Experts:
        return {(layer, expert) for layer, expert in np.argwhere(self.pool.mapped >= 0).tolist()}

    def in_ram(self) -> Experts:
        return set(self.store.handle._held())

    def check_bytes(self) -> None:
        self.policy.check_integrity()
        for layer, expert in self.on_gpu():
            slot, host = self.policy.slot_of[layer, expert], self.pool.hosts[layer]
            (addresses,) = host.read([expert])
            for address, part in zip(addresses, self.pool.matrices, strict=True):
                data = part.data[slot].numpy().tobytes()
                assert data == ctypes.string_at(address, len(data))
            host.release(expert, is_kept=True)


def make_weight(kind: QuantType, rows: int, cols: int, seed: int) -> RawTensor:
    values = np.random.default_rng(seed).standard_normal((rows, cols), np.float32)
    return RawTensor(torch.from_numpy(quantize(values, kind)).reshape(-1), kind, (rows, cols))


@pytest.fixture
def rig(workers: WorkerPool, tmp_path: Path) -> Iterator[Rig]:
    layers = [make_layer(make_weight, workers, experts=E, seed=seed) for seed in range(2)]
    made = Rig(build(tmp_path / "experts", layers, workers, RAM_SLOTS, top_k=2))
    yield made
    made.pool.drain()
    made.store.close()


def test_slots_are_filled_past_ram(rig: Rig) -> None:
    """More of a layer than may be held at once, so in batches; none of them stay in RAM."""
    scores = np.zeros((2, E))
    scores[1, [3, 7, 8, 12]] = 1.0
    assert rig.store.max_held(1) == 4
    rig.pool.begin(scores)
    assert rig.on_gpu() == {(1, 3), (1, 7), (1, 8), (1, 12)}
    assert rig.in_ram() == set()
    rig.check_bytes()


def test_uploads_are_held_until_they_have_landed(rig: Rig) -> None:
    rig.pool.begin()
    assert rig.on_gpu() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for _ in range(3):  # the third one's launch knows of the second
        rig.step(0, [9])
    assert rig.copies.left
    assert len(rig.on_gpu()) == GPU_SLOTS - 1
    for expert in range(2, 16):  # all else goes through RAM
        rig.step(1, [expert])
        assert (0, 9) in rig.in_ram()
    rig.copies.arrive()
    rig.step(0, [9])
    assert (0, 9) in rig.on_gpu()
    rig.check_bytes()
    assert rig.policy.totals.uploads == 1


def test_what_is_on_the_gpu_leaves_ram(rig: Rig) -> None:
    """The store is not asked for it any more, so that it is worth less and less there."""
    rig.pool.begin()
    for _ in range(4):
        rig.step(0, [9])
        rig.copies.arrive()
    assert (0, 9) in rig.on_gpu() & rig.in_ram()
    asked = rig.store.stats()
    others = list(range(2, 16)) * 3
    for expert in others:
        rig.step(0, [9])
        rig.step(1, [expert])
    now = rig.store.stats()
    assert now.hits + now.misses - asked.hits - asked.misses == len(others)  # none of them for expert 9
    assert (0, 9) in rig.on_gpu() - rig.in_ram()
    rig.step(0, [9])
    assert rig.store.stats().misses == now.misses


def test_what_is_not_in_ram_does_not_come(rig: Rig) -> None:
    """Its upload is given up before anything goes for it; later it comes."""
    rig.pool.begin()
    before = rig.on_gpu()
    for _ in range(2):
        rig.step(0, [9])
    for expert in range(2, 2 + RAM_SLOTS):  # as a large step would, of which the policy learns nothing
        kernel = rig.stored.kernels[1]
        for _ in range(3):
            kernel.forward(torch.ones(1, kernel.hidden_size), torch.tensor([[expert]]), torch.ones(1, 1))
    assert (0, 9) not in rig.in_ram()
    rig.pool.launched()
    rig.pool.finished(0)
    assert rig.on_gpu() == before
    assert rig.policy.totals.uploads == 0
    assert not rig.copies.left
    rig.step(0, [9])
    rig.pool.launched()
    rig.copies.arrive()
    rig.pool.launched()
    assert (0, 9) in rig.on_gpu()
    rig.check_bytes()


def test_draining_lets_go_of_all(rig: Rig) -> None:
    rig.pool.begin()
    for _ in range(3):
        rig.step(0, [9, 10])
    assert len(rig.copies.left) == 2 * 3
    rig.pool.drain()
    assert not rig.copies.left
    assert {(0, 9), (0, 10)} == {(layer, expert) for layer, expert in np.argwhere(rig.policy.slot_of >= 0).tolist()} - {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }
    for expert in (9, 10):
        with pytest.raises(ValueError, match="is not held"):
            rig.store.release(0, expert)


def test_slots_of_experts_in_files_are_not_lent(rig: Rig) -> None:
    rig.pool.begin()
    rig.pool.lend(2)
    with pytest.raises(RuntimeError, match="are not lent"):
        rig.pool.take_back()
