"""Records that are held outside of calls: pinned, bounded, read when they are lacking, and let go of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.types import RawTensor
from tests.support.checks.stored_experts import Stored, build, bytes_of, make_layer, matrices_of

MakeWeight = Callable[..., RawTensor]

EXPERTS, SLOTS, MOST = 32, 12, 8  # MOST: of guests: 2 x 16, but an eighth of 2 x 32 records at most


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


@pytest.fixture
def made(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> Iterator[Stored]:
    layers = [make_layer(make_weight, pool, experts=EXPERTS, seed=seed) for seed in range(2)]
    stored = build(tmp_path / "experts", layers, pool, SLOTS, top_k=4)
    assert stored.store.max_held(0) == stored.store.max_held(1) == MOST
    yield stored
    stored.store.close()


def use(kernel: MoeKernel, experts: list[int], rows: int = 1) -> torch.Tensor:
    ids = torch.tensor([experts] * rows)
    return kernel.forward(torch.ones(rows, kernel.hidden_size), ids, torch.ones(ids.shape))


def held(made: Stored) -> set[tuple[int, int]]:
    return set(made.store.handle._held())


def has_bytes_of(made: Stored, address: int, layer: int, expert: int) -> bool:
    """Whether the record there is the expert's."""
    parts = made.store.layout(layer).parts
    given = matrices_of(made.resident[layer].weights)
    return all(
        ctypes.string_at(address + part.offset, part.nbytes) == bytes_of(one[expert].data)
        for part, one in zip(parts, given, strict=True)
    )


def test_a_record_is_held_where_it_is(made: Stored) -> None:
    store, (first, _) = made.store, made.kernels
    assert store.hold(0, 3) is None  # it is not read for that
    assert store.stats().bytes_read == 0
    use(first, [3])
    stats = store.stats()
    address = store.hold(0, 3)
    assert address is not None
    begin, nbytes = store.memory
    assert nbytes == SLOTS * store.layout(0).nbytes
    assert begin <= address <= begin + nbytes - store.layout(0).nbytes
    for _ in range(3):  # more than all slots, and picks that are worth more
        for start in range(4, EXPERTS, 4):
            use(first, list(range(start, start + 4)))
            assert (0, 3) in held(made)
    assert has_bytes_of(made, address, 0, 3)
    store.release(0, 3)
    assert (0, 3) in held(made)
    for start in range(4, EXPERTS, 4):
        use(first, list(range(start, start + 4)))
    assert (0, 3) not in held(made)
    assert store.stats().hits == stats.hits  # to hold is no use


def test_no_more_are_held_than_calls_can_spare(made: Stored) -> None:
    """Of both layers together; calls of any size go on meanwhile."""
    store, kernels = made.store, made.kernels
    for layer in range(2):
        use(kernels[layer], [0, 1, 2, 3, 4, 5])
    taken = [(layer, expert) for layer in range(2) for expert in range(6) if store.hold(layer, expert) is not None]
    assert len(taken) == MOST
    assert store.hold(*taken[0]) is None
    with pytest.raises(ValueError, match="more than may be held"):
        store.read(0, [9])
    for layer, kernel in enumerate(kernels):
        wanted = made.resident[layer]
        assert torch.equal(use(kernel, [20, 21, 22, 23]), use(wanted, [20, 21, 22, 23]))
        prompt = list(range(EXPERTS))
        assert torch.equal(use(kernel, prompt, 5), use(wanted, prompt, 5))
    assert set(taken) <= held(made)
    for one in taken:
        store.release(*one)
    with pytest.raises(ValueError, match="is not held"):
        store.release(*taken[0])
    assert len(store.read(0, range(MOST))) == MOST


def test_records_are_read_and_can_leave_at_once(made: Stored) -> None:
    store = made.store
    use(made.kernels[1], [5])
    for layer in range(2):
        for start in range(0, EXPERTS, MOST):
            experts = list(range(start, start + MOST))
            addresses = store.read(layer, experts)
            assert len(set(addresses)) == MOST
            for expert, address in zip(experts, addresses, strict=True):
                assert has_bytes_of(made, address, layer, expert)
                store.release(layer, expert, is_kept=False)
    assert held(made) == set()  # so that others fill the slots
    store.fill(wait=True)
    assert len(held(made)) == SLOTS


def test_reads_that_fail(made: Stored) -> None:
    store = made.store
    store.handle._fail_next(1)
    with pytest.raises(ReadError, match=f"{made.path} cannot be read"):
        store.read(0, range(MOST))
    addresses = store.read(0, range(MOST))  # nothing is held of the first time
    assert all(has_bytes_of(made, address, 0, expert) for expert, address in enumerate(addresses))


def test_what_cannot_be_asked(made: Stored) -> None:
    for expert in (-1, EXPERTS):
        with pytest.raises(ValueError, match=f"layer 0 has no expert {expert}"):
            made.store.hold(0, expert)
    assert made.store.read(0, [1])
    made.store.close()  # held or not
    for call in (lambda: made.store.hold(0, 1), lambda: made.store.read(0, [2]), lambda: made.store.memory):
        with pytest.raises(RuntimeError, match="this ExpertStore is closed"):
            call()
