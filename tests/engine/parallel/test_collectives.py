"""Sums over processes: which way they go, in which order shares are added, and that memory is not reused too early.

Stand-ins for torch's kernels, on threads, do what those do on GPUs: a barrier, reads of the others' memory, a barrier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo
from typing_extensions import override

from ktransformers.engine.parallel.tensor_parallel import collectives as collectives_module
from ktransformers.engine.parallel.tensor_parallel.collectives import (
    Collectives,
    GroupCollectives,
    SymmetricCollectives,
    SymmetricWay,
    TorchKernels,
    _SymmetricMemory,
    open_collectives,
    symmetric_way,
)
from ktransformers.engine.parallel.tensor_parallel.group import TensorGroup

CPU = torch.device("cpu")
CAPACITY = 1 << 20
ONE_SHOT, TWO_SHOT = SymmetricWay.ONE_SHOT, SymmetricWay.TWO_SHOT


class Gathering(TorchKernels):
    """A stand-in that gathers, too, as ours does."""

    can_gather = True

    @override
    def gather(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        self._kernels.gather(memory, out)


class StandIn:
    """The kernels of one rank. buffers: of all ranks. calls: names of what was called."""

    def __init__(self, rank: int, buffers: list[torch.Tensor], barrier: threading.Barrier):
        self._rank, self._buffers, self._barrier = rank, buffers, barrier
        self.calls: list[str] = []

    def _shares(self, memory: torch.Tensor) -> list[torch.Tensor]:
        begin, end = memory.storage_offset(), memory.storage_offset() + memory.numel()
        return [buffer[begin:end].view(memory.shape) for buffer in self._buffers]

    def _summed(self, memory: torch.Tensor) -> torch.Tensor:
        self._barrier.wait(60)
        shares = self._shares(memory)
        total = shares[0].clone()
        for share in shares[1:]:
            total += share
        self._barrier.wait(60)
        return total

    def gather(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        self.calls.append("gather")
        self._barrier.wait(60)
        out.copy_(torch.cat(self._shares(memory), dim=1))
        self._barrier.wait(60)

    def one_shot_all_reduce(self, memory: torch.Tensor, op: str, name: str) -> torch.Tensor:
        self.calls.append("one_shot")
        assert (op, name) == ("sum", "world")
        return self._summed(memory)

    def one_shot_all_reduce_out(self, memory: torch.Tensor, op: str, name: str, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.one_shot_all_reduce(memory, op, name))

    def two_shot_all_reduce_(self, memory: torch.Tensor, op: str, name: str) -> torch.Tensor:
        self.calls.append("two_shot")
        return memory.copy_(self._summed(memory))


class Refusing(Collectives):
    """What is not to be asked, or counts that it is."""

    def __init__(self) -> None:
        self.shares: list[torch.Tensor] = []

    @override
    def memory(self, num_rows: int, width: int) -> torch.Tensor | None:
        raise AssertionError("not asked")

    @override
    def add(self, share: torch.Tensor, out: torch.Tensor) -> None:
        self.shares.append(share)

    @override
    def gather(self, share: torch.Tensor, out: torch.Tensor) -> None:
        self.shares.append(share)


class World:
    """SymmetricCollectives of some ranks, each on a thread of its own."""

    def __init__(self, size: int, capacity: int = CAPACITY):
        buffers = [torch.full((capacity,), float("nan")) for _ in range(size)]
        barrier = threading.Barrier(size)
        self.kernels = [StandIn(rank, buffers, barrier) for rank in range(size)]
        self.otherwise = [Refusing() for _ in range(size)]
        self.sums = [
            SymmetricCollectives(buffers[rank], Gathering(self.kernels[rank], "world", size), self.otherwise[rank])
            for rank in range(size)
        ]

    def run(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """What `work` makes of each rank."""
        with ThreadPoolExecutor(len(self.sums)) as threads:
            return list(threads.map(work, range(len(self.sums))))


def shares_of(size: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=generator) for _ in range(size)]


def added(sums: Collectives, share: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(share.shape, dtype=dtype)
    sums.add(share, out)
    return out


def in_order(shares: list[torch.Tensor]) -> torch.Tensor:
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total


@pytest.mark.parametrize(
    ("nbytes", "size", "way"),
    [
        (4, 2, ONE_SHOT),
        (8 * 5120 * 4, 8, ONE_SHOT),
        (1 << 20, 4, ONE_SHOT),
        ((1 << 20) + 4, 2, TWO_SHOT),
        (64, 3, TWO_SHOT),  # torch adds in one pass in the order of ranks for powers of two
    ],
)
def test_the_way_goes_by_size(nbytes: int, size: int, way: SymmetricWay) -> None:
    assert symmetric_way(nbytes, size) is way


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_bits_of_the_ranks_in_order(size: int, rows: int) -> None:
    world, shares = World(size), shares_of(size, rows, 5120)
    got = world.run(lambda rank: added(world.sums[rank], shares[rank].clone()))
    assert all(torch.equal(one, in_order(shares)) for one in got)
    way = symmetric_way(4 * rows * 5120, size)
    assert {tuple(kernels.calls) for kernels in world.kernels} == {("one_shot",) if way is ONE_SHOT else ("two_shot",)}


@pytest.mark.parametrize("rows", [2, 200])
def test_a_share_in_the_buffer_is_not_copied_there(rows: int) -> None:
    world, shares = World(2), shares_of(2, rows, 2048)

    def work(rank: int) -> torch.Tensor:
        memory = world.sums[rank].memory(rows, 2048)
        assert memory is not None
        memory.copy_(shares[rank])
        return added(world.sums[rank], memory)

    assert all(torch.equal(one, in_order(shares)) for one in world.run(work))


def test_sums_one_after_another_do_not_disturb_each_other() -> None:
    """Results stay as they are when the memory of shares serves other ones, of either way."""
    world, rounds = World(2), [shares_of(2, rows, 1024) for rows in (1, 700, 5, 300)]

    def work(rank: int) -> torch.Tensor:
        results = [added(world.sums[rank], shares[rank].clone()) for shares in rounds]
        return torch.cat(results)

    want = torch.cat([in_order(shares) for shares in rounds])
    assert all(torch.equal(one, want) for one in world.run(work))


def test_what_memory_is_too_small_for_goes_the_other_way() -> None:
    world = World(1, capacity=100)
    assert world.sums[0].memory(10, 10) is not None
    assert world.sums[0].memory(11, 10) is None
    large, half = torch.zeros(101), torch.zeros(4, dtype=torch.bfloat16)
    for share in (large, half):
        world.sums[0].add(share, share)
    assert len(world.otherwise[0].shares) == 2
    assert not world.kernels[0].calls


@pytest.mark.parametrize("rows", [0, 1, 700])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_sum_of_products_is_rounded_once(rows: int, in_memory: bool) -> None:
    """Each rank's product is its x times a number; the sum is rounded to the type of x."""
    world, factors = World(2), (1.001, 2.003)
    groups = [TensorGroup(rank, 2) for rank in range(2)]
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for group, sums in zip(groups, world.sums, strict=True):
        group._collectives = sums

    def work(rank: int) -> torch.Tensor:
        def product(part: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
            made = part.float() * factors[rank]
            assert memory is not None
            return memory.copy_(made) if in_memory else made

        return groups[rank].sum_product(x, 128, product)

    got = world.run(work)
    want = (x.float() * factors[0] + x.float() * factors[1]).to(torch.bfloat16)
    assert all(torch.equal(one, want) for one in got)


@pytest.mark.parametrize(("rows", "capacity", "calls"), [(3, 3000, 1), (3, 2000, 2), (5, 1000, 5), (0, 1000, 0)])
def test_shares_side_by_side(rows: int, capacity: int, calls: int) -> None:
    """In as many launches as the buffer needs; a product writes there itself where all of it fits."""
    world, shares = World(2, capacity), shares_of(2, rows, 1000)
    groups = [TensorGroup(rank, 2) for rank in range(2)]
    for group, sums in zip(groups, world.sums, strict=True):
        group._collectives = sums
    where: list[bool] = []

    def work(rank: int) -> torch.Tensor:
        def product(part: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
            where.append(memory is not None)
            return shares[rank].clone() if memory is None else memory.copy_(shares[rank])

        return groups[rank].gather_product(torch.zeros(rows, 4), 1000, product)

    assert all(torch.equal(one, torch.cat(shares, dim=1)) for one in world.run(work))
    assert [kernels.calls.count("gather") for kernels in world.kernels] == [calls, calls]
    assert where == [rows * 1000 <= capacity] * 2


def test_a_row_that_memory_is_too_small_for_is_gathered_the_other_way() -> None:
    world = World(1, capacity=10)
    world.sums[0].gather(torch.zeros(1, 11), torch.zeros(1, 11))
    assert len(world.otherwise[0].shares) == 1


def test_nothing_is_added_before_processes_have_met() -> None:
    group, x = TensorGroup(0, 2), torch.ones(3, 4)
    assert torch.equal(group.sum(x), torch.ones(3, 4))
    assert torch.equal(group.sum_product(x, 4, lambda part, memory: part * 2), torch.full((3, 4), 2.0))
    assert torch.equal(group.gather_product(x, 4, lambda part, memory: part * 2), torch.full((3, 8), 2.0))


@pytest.mark.parametrize(
    ("num_values", "size", "says"),
    [
        (64, 1, "there is one process"),
        (0, 2, "no memory was reserved for them"),
        (64, 2, "GPU 0 has no access to the memory of GPU 1"),
    ],
)
def test_one_line_says_why_sums_are_those_of_nccl(
    num_values: int, size: int, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collectives_module, "_agreed", lambda reason, device, size: reason)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    with caplog.at_level(logging.INFO):
        made = open_collectives(num_values, torch.device("cuda:0"), 0, size)
    assert isinstance(made, GroupCollectives)
    assert [record.getMessage() for record in caplog.records] == [f"sums over GPUs are NCCL's: {says}"]


def test_a_first_sum_that_is_wrong_is_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of GPUs whose barrier works and whose memory is another one's."""
    world = World(1)  # of a rank whose sums are of one share, where there are to be two
    world.sums[0]._kernel = TorchKernels(world.kernels[0], "world", 1)
    monkeypatch.setattr(GroupCollectives, "gather", lambda sums, share, out: None)
    monkeypatch.setattr(collectives_module, "_agreed", lambda reason, device, size: reason)
    monkeypatch.setattr(collectives_module, "_why_not_symmetric", lambda num_values, rank, size: None)
    monkeypatch.setattr(
        collectives_module, "_allocated", lambda *args: _SymmetricMemory(world.sums[0]._buffer, torch.empty(0))
    )
    monkeypatch.setattr(collectives_module, "_kernels", lambda *args: {"these": lambda: world.sums[0]._kernel})
    with caplog.at_level(logging.INFO):
        made = collectives_module._fastest(64, CPU, 0, 2)
    assert isinstance(made, GroupCollectives)
    assert [record.getMessage() for record in caplog.records] == [
        "sums over GPUs are not made by these: a first sum was wrong",
        "sums over GPUs are NCCL's: a first sum was wrong",
    ]


def test_a_first_sum_that_is_right() -> None:
    world = World(2)
    checked = collectives_module._checked
    assert world.run(lambda rank: checked(world.sums[rank], CPU, rank, 2)) == world.sums


@pytest.mark.parametrize("part", ["_why_not_symmetric", "_allocated", "_kernels", "_compiled"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_cannot_go_on_lets_nobody_wait(
    part: str, failing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks over gloo, one of which fails: neither comes to the part behind, where it would wait for the other."""
    store, local = HashStore(), threading.local()
    parts = ["_why_not_symmetric", "_allocated", "_kernels", "_compiled", "_checked"]
    called: list[str] = []

    def does(name: str, *args: object) -> object:
        called.append(name)
        if name == part and local.rank == failing:
            if name == parts[0]:
                return "made up"
            raise RuntimeError("made up\nwith a trace")
        if name == "_kernels":
            return {"these": lambda: None}
        return None if name == parts[0] else _SymmetricMemory(torch.empty(1), torch.empty(1))

    def all_gather(found: list[torch.Tensor], mine: torch.Tensor) -> None:
        local.group.allgather([found], [mine]).wait()

    def opened(rank: int) -> Collectives:
        local.rank, local.group = rank, ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        return collectives_module._fastest(64, CPU, rank, 2)

    for name in parts:
        monkeypatch.setattr(collectives_module, name, partial(does, name))
    monkeypatch.setattr(collectives_module.distributed, "all_gather", all_gather)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(2) as threads:
        assert all(isinstance(made, GroupCollectives) for made in threads.map(opened, range(2)))
    assert sorted(called) == sorted(2 * parts[: parts.index(part) + 1])
    who = "GPU 1: " if failing else ""
    said = [f"sums over GPUs are not made by these: {who}made up"] if part == "_compiled" else []
    assert [record.getMessage() for record in caplog.records] == [*said, f"sums over GPUs are NCCL's: {who}made up"]
