"""The ring of records, and what single kernels write into it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.cpu.expert_counts import ExpertCounts
from ktransformers.kernels.cpu.profile import PARTS, PoolProfile, set_scope
from ktransformers.kernels.cpu.router import RouterSpec, route
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, RawTensor
from ktransformers.scheduler.records import counts_in
from tests.support.checks import native_records
from tests.support.checks.native_records import Experts, Op, records_in

HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 5, 2


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


def weights(*shape: int) -> RawTensor:
    return RawTensor.from_tensor(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))))


def experts_of(pool: WorkerPool, layer: int = -1) -> MoeKernel:
    gate, up, down = ([weights(*shape)] * EXPERTS for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)))
    return MoeKernel(ExpertWeights(gate, up, down), ActivationSpec(), pool, layer)


def run_experts(kernel: MoeKernel, ids: torch.Tensor) -> torch.Tensor:
    x = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(1))
    return kernel.forward(x, ids, torch.full(ids.shape, 0.5))


def test_parts_have_the_numbers_that_records_state() -> None:
    assert PARTS == native_records.PARTS


def test_writers_do_not_disturb_each_other_while_the_ring_is_drained(pool: WorkerPool) -> None:
    """Records of different sizes run around a small ring many times; each arrives whole and once, or is counted."""
    threads, each = 4, 4000
    profile = PoolProfile(pool, 4096)
    found: list[native_records.Record] = []
    writer = threading.Thread(target=profile._native._write_ops, args=(threads, each))
    writer.start()
    while writer.is_alive():
        found += records_in(profile.drain())
    writer.join()
    found += records_in(profile.drain())
    assert profile.drain() == b""
    assert len(found) + profile.num_dropped == threads * (each + each // 5)
    ops = [record for record in found if isinstance(record, Op)]
    for thread in range(threads):
        rows = [op.rows for op in ops if op.layer == thread]
        assert rows == sorted(set(rows))  # in the order in which they were written
    assert all(op.bytes == 3 * op.rows + op.layer for op in ops)
    calls = [record for record in found if isinstance(record, Experts)]
    assert calls
    for call in calls:
        (expert,) = {ids[0] for ids in call.ids.values()}
        assert call.counts == [call.rows if i == expert else 0 for i in range(11)]


def test_a_full_ring_drops_what_comes_later_and_is_usable_again(pool: WorkerPool) -> None:
    profile = PoolProfile(pool, 4096)
    profile._native._write_ops(1, 200)
    first = records_in(profile.drain())
    assert 0 < len(first) < 240
    assert profile.num_dropped == 240 - len(first)
    profile.begin_step(7, 3, [])
    (begun,) = records_in(profile.drain())
    assert isinstance(begun, native_records.StepBegin)
    assert (begun.step, begun.rows, begun.num_keep) == (7, 3, 0)


@pytest.mark.parametrize("size", [0, 4095, 2048, 12288])
def test_sizes_that_a_ring_cannot_have(pool: WorkerPool, size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        PoolProfile(pool, size)


def test_a_pool_keeps_its_ring(pool: WorkerPool) -> None:
    PoolProfile(pool, 4096).stop()
    with pytest.raises(ValueError, match="4096"):
        PoolProfile(pool, 8192)


def test_nothing_is_recorded_before_and_after(pool: WorkerPool) -> None:
    x, weight = torch.randn(2, HIDDEN), torch.ones(HIDDEN)
    cpu.rms_norm(x, weight, 1e-6, pool)
    profile = PoolProfile(pool, 4096)
    assert profile.drain() == b""
    cpu.rms_norm(x, weight, 1e-6, pool)
    profile.stop()
    cpu.rms_norm(x, weight, 1e-6, pool)
    assert [type(record) for record in records_in(profile.drain())] == [Op]


def test_an_operation_says_what_it_read_and_how_long_it_took(pool: WorkerPool) -> None:
    profile = PoolProfile(pool)
    x, weight = torch.randn(3, 256), weights(4096, 256)
    before = time.monotonic_ns()
    cpu.linear(x, weight, pool)
    after = time.monotonic_ns()
    (op,) = records_in(profile.drain())
    assert isinstance(op, Op)
    assert (op.part, op.op, op.device, op.rows, op.layer) == ("linear", 0, 0, 3, -1)
    assert op.bytes == 4096 * 256 * 4
    assert before <= op.begin_ns <= op.begin_ns + op.duration_ns <= after
    assert (op.num_jobs, op.num_threads) == (1, 2)
    assert 0 < op.busy_ns <= 2 * op.duration_ns
    assert op.wait_ns <= op.duration_ns


def test_scopes_name_layers_and_parts_of_this_thread(pool: WorkerPool) -> None:
    profile = PoolProfile(pool)
    x, weight = torch.randn(2, HIDDEN), weights(16, HIDDEN)
    assert set_scope(4, "lm_head") == (-1, "other")
    cpu.linear(x, weight, pool)
    other = threading.Thread(target=cpu.linear, args=(x, weight, pool))
    other.start()
    other.join()
    route(torch.randn(2, 16), RouterSpec(top_k=2), pool)
    assert set_scope(-1, "other") == (4, "lm_head")
    found = [(op.layer, op.part) for op in records_in(profile.drain()) if isinstance(op, Op)]
    assert found == [(4, "lm_head"), (-1, "linear"), (4, "lm_head")]
    with pytest.raises(KeyError):
        set_scope(0, "attic")


@pytest.mark.parametrize("rows", [1, 7, 40, 256])
def test_experts_tell_who_was_chosen_and_what_each_phase_took(pool: WorkerPool, rows: int) -> None:
    kernel, profile = experts_of(pool, layer=9), PoolProfile(pool)
    ids = torch.randint(0, EXPERTS + 1, (rows, TOP_K), generator=torch.Generator().manual_seed(rows))
    run_experts(kernel, ids)
    call, *ops = records_in(profile.drain())
    assert isinstance(call, Experts)
    assert (call.layer, call.rows) == (9, rows)
    assert call.counts == [int((ids == expert).sum()) for expert in range(EXPERTS)]
    assert call.ids == {i: [-1 if e == EXPERTS else e for e in row] for i, row in enumerate(ids.tolist())}
    touched = sum(count > 0 for count in call.counts)
    assert all(isinstance(op, Op) and (op.part, op.layer, op.rows) == ("experts", 9, rows) for op in ops)
    nbytes = {op.op: op.bytes for op in ops if isinstance(op, Op)}
    matrix = 4 * HIDDEN * INNER
    assert {phase: nbytes[phase] for phase in (1, 2, 3)} == {1: 0, 2: 2 * touched * matrix, 3: touched * matrix}
    ends = [op.begin_ns + op.duration_ns for op in ops if isinstance(op, Op)]
    assert all(end <= op.begin_ns for end, op in zip(ends, ops[1:], strict=False) if isinstance(op, Op))


def test_of_many_rows_only_those_that_are_wanted_are_told(pool: WorkerPool) -> None:
    kernel, profile = experts_of(pool), PoolProfile(pool)
    ids = torch.randint(0, EXPERTS, (257, TOP_K), generator=torch.Generator().manual_seed(2))
    profile.begin_step(1, 257, [256, 3, 1000])
    run_experts(kernel, ids)
    profile.end_step(1)
    _, call, *_ = records_in(profile.drain())
    assert isinstance(call, Experts)
    assert sum(call.counts) == 257 * TOP_K
    assert call.ids == {row: ids[row].tolist() for row in (256, 3)}


def test_counts_of_experts_are_exact(pool: WorkerPool) -> None:
    """Two kernels of one layer, and what ran elsewhere, add up."""
    counts, kernels = ExpertCounts(), [experts_of(pool, layer=3), experts_of(pool, layer=3)]
    for kernel in kernels:
        counts.watch(kernel)
    want, touched = [0] * EXPERTS, 0
    for i in range(20):
        ids = torch.randint(0, EXPERTS + 1, (1 + i, TOP_K), generator=torch.Generator().manual_seed(i))
        run_experts(kernels[i % 2], ids)
        used = [int((ids == expert).sum()) for expert in range(EXPERTS)]
        want = [a + b for a, b in zip(want, used, strict=True)]
        touched += sum(count > 0 for count in used)
    assert counts.totals() == (sum(want), 20, touched)
    counts.add(3, [0, 5, 0, 0, 1], calls=0)
    assert counts.totals() == (sum(want) + 6, 20, touched + 2)
    got = [0] * EXPERTS
    for layer, expert, rows in counts_in(counts.take()):
        assert layer == 3
        got[expert] += rows
    assert got == [n + (0, 5, 0, 0, 1)[i] for i, n in enumerate(want)]
    assert counts.take() == b""


def test_what_others_count_is_a_call_of_layers_that_run_nowhere_else(pool: WorkerPool) -> None:
    """Layer 0 is on a GPU; layer 1 has some of its experts there and calls the kernel for the others."""
    counts, kernel = ExpertCounts(), experts_of(pool, layer=1)
    counts.watch(kernel)
    before, now = torch.zeros(2, EXPERTS, dtype=torch.int64), torch.zeros(2, EXPERTS, dtype=torch.int64)
    for step in range(1, 4):
        run_experts(kernel, torch.tensor([[0, 1]]))
        now[0, [0, 2]] += 1
        now[1, 3] += 1
        counts.follow(now, before)
        assert torch.equal(before, now)
        assert counts.totals() == (5 * step, 2 * step, 5 * step)


def test_experts_that_are_out_of_range_are_not_counted(pool: WorkerPool) -> None:
    counts, kernel = ExpertCounts(), experts_of(pool)
    counts.watch(kernel)
    with pytest.raises(IndexError):
        run_experts(kernel, torch.tensor([[0, EXPERTS + 1]]))
    assert counts.totals() == (0, 0, 0)
    with pytest.raises(ValueError, match="layers"):
        counts.add(1 << 16, [1])


def test_recording_takes_no_memory_from_the_heap(pool: WorkerPool) -> None:
    if extension.num_allocations() < 0:
        pytest.skip("allocations are not counted on this system")
    kernel, profile = experts_of(pool), PoolProfile(pool)
    ids = torch.tensor([[0, 1], [2, 3]])
    run_experts(kernel, ids)
    before = extension.num_allocations()
    for _ in range(10):
        run_experts(kernel, ids)
    assert extension.num_allocations() == before
    profile.stop()
