"""Slots that fill in the background give way to calls; calls of probes read a few records for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType, RawTensor
from tests.support.checks.stored_experts import Stored, build, make_layer

MakeWeight = Callable[..., RawTensor]

HOUR = 3600 * 10**9
PIECES = 3
"""Of a record that comes from a model's own file: gate, up and down."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


@pytest.fixture
def made(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> Iterator[Stored]:
    """16 records, with slots for 12 of them. No thread begins a piece but those that a test lets pass."""
    layers = [make_layer(make_weight, pool, seed=seed) for seed in range(2)]
    stored = build(tmp_path / "experts", layers, pool, slots=12, is_straight=True)
    stored.store.handle._hold(True)
    yield stored
    stored.store.close()


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        pass


def call(made: Stored, layer: int, expert: int) -> threading.Thread:
    """A call that has asked for what it lacks, with threads of its own."""
    before, right = made.store.stats(), made.resident[layer]
    given = torch.ones(1, right.hidden_size), torch.tensor([[expert]]), torch.ones(1, 1)
    wanted = right.forward(*given)

    def run() -> None:
        with closing(WorkerPool(1)) as pool:
            kernel = MoeKernel(ExpertWeights(None, [], []), ActivationSpec(), pool, layer, (made.store, layer))
            assert torch.equal(kernel.forward(*given), wanted)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: made.store.stats().hits + made.store.stats().misses > before.hits + before.misses)
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def test_a_call_is_read_before_what_is_being_filled(made: Stored) -> None:
    made.store.fill()
    made.store.handle._pass(1)  # the first matrix of expert 0 of layer 0
    until(lambda: made.store.stats().bytes_read > 0)
    waiting = call(made, 1, 5)
    made.store.handle._pass(PIECES)
    assert ends(waiting)
    stats = made.store.stats()
    assert (stats.misses, stats.num_filled) == (1, 0)
    assert made.store.handle._held() == [(1, 5)]
    made.store.handle._hold(False)
    made.store.fill(wait=True)
    stats = made.store.stats()
    assert stats.num_filled == stats.num_slots - 1


def test_nothing_is_filled_while_calls_read(made: Stored) -> None:
    """Whatever time passes between them: an hour has to be quiet."""
    made.store.handle._set_quiet(HOUR)
    calls = [call(made, 0, 7)]
    made.store.fill()
    made.store.handle._hold(False)
    calls += [call(made, layer, expert) for layer in range(2) for expert in range(4)]
    assert all(map(ends, calls))
    assert made.store.stats().num_filled == 0
    assert made.store.stats().misses == 9


def test_a_call_has_what_it_needs_of_a_record_that_is_being_filled(made: Stored) -> None:
    made.store.fill()
    made.store.handle._pass(1)
    until(lambda: made.store.stats().bytes_read > 0)
    made.store.handle._set_quiet(HOUR)
    other, same = call(made, 1, 5), call(made, 0, 0)
    made.store.handle._pass(2 * PIECES - 1)
    assert ends(other)
    assert ends(same)
    assert made.store.stats().num_filled == 1


def test_a_record_that_is_held_is_not_left_to_the_background(made: Stored) -> None:
    made.store.fill()
    made.store.handle._pass(1)
    until(lambda: made.store.stats().bytes_read > 0)
    made.store.handle._set_quiet(HOUR)
    other = call(made, 1, 5)
    made.store.handle._hold(False)
    assert ends(other)
    made.store.read(0, [0])
    made.store.release(0, 0)


def test_closing_ends_a_fill(made: Stored) -> None:
    filling = threading.Thread(target=lambda: made.store.fill(wait=True))
    filling.start()
    made.store.handle._pass(1)
    until(lambda: made.store.stats().bytes_read > 0)
    made.store.close()
    assert ends(filling)
    assert made.store.stats().num_filled == 0


def test_a_fill_that_fails_while_a_call_waits_for_its_record(made: Stored) -> None:
    """It is read again: the one that failed was not the call's."""
    made.store.fill()
    made.store.handle._pass(1)
    until(lambda: made.store.stats().bytes_read > 0)
    other, same = call(made, 1, 5), call(made, 0, 0)
    made.store.handle._pass(PIECES)
    assert ends(other)
    made.store.handle._fail_next(1)
    made.store.handle._hold(False)
    assert ends(same)
    assert made.store.stats().read_errors == 1
    made.store.fill(wait=True)
    assert made.store.stats().num_slots == len(made.store.handle._held())


@pytest.mark.parametrize("is_straight", [False, True])
def test_probes_read_eight_records_of_a_kind(
    make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path, *, is_straight: bool
) -> None:
    """Whatever they touch. Of three layers the first and the last are alike; expert e is expert e % 8 of the first."""
    kinds = [(QuantType.Q8_0, QuantType.Q8_0), (QuantType.Q4_K, QuantType.Q6_K), (QuantType.Q8_0, QuantType.Q8_0)]
    layers = [
        make_layer(make_weight, pool, kind, experts=16, shape=(256, 256), seed=seed) for seed, kind in enumerate(kinds)
    ]
    made = build(tmp_path / "experts", layers, pool, slots=24, top_k=4, is_straight=is_straight)
    several = torch.arange(64).reshape(16, 4) % 16
    rows, weights = torch.randn(16, 256), torch.rand(16, 4)

    def forward(layer: int, ids: torch.Tensor) -> torch.Tensor:
        return made.kernels[layer].forward(rows[: len(ids)], ids, weights[: len(ids)])

    made.store.probe(True)
    for _ in range(2):
        for layer, alike in ((0, 0), (1, 1), (2, 0)):
            for ids in (several, several[1:2], several[3:4]):
                right = made.resident[alike].forward(rows[: len(ids)], ids % 8, weights[: len(ids)])
                assert torch.equal(forward(layer, ids), right)
    stats = made.store.stats()
    assert (stats.hits, stats.misses) == (0, 0)
    assert not any(scores.any() for scores in made.store.scores().values())
    read = 8 * sum(made.store.layout(layer).nbytes for layer in range(2))
    assert stats.bytes_read == read if not is_straight else read * 0.9 < stats.bytes_read < read * 1.5  # whole blocks
    made.store.probe(False)
    assert made.store.handle._held() == []
    for layer in range(3):
        right = made.resident[layer].forward(rows, several, weights)
        assert torch.equal(forward(layer, several), right)
    assert made.store.stats().misses == 3 * 16
    made.store.close()
