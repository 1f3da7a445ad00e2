"""The worker pool: tiers, threads, errors, closing, forking, and no CPU time when idle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from ktransformers.errors import ConfigError
from ktransformers.kernels.cpu import Isa, WorkerPool, active_isa, available_isas, linear
from ktransformers.kernels.cpu.base import ISA_VARIABLE
from ktransformers.kernels.cpu.topology import ThreadPlace
from ktransformers.kernels.types import QuantType


def test_tiers_of_this_machine(monkeypatch):
    known = available_isas()
    assert known[0] is Isa.SCALAR
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert active_isa() is known[-1]
    for isa in known:
        monkeypatch.setenv(ISA_VARIABLE, isa.value)
        assert active_isa() is isa
        assert WorkerPool(1).isa is isa
    monkeypatch.setenv(ISA_VARIABLE, "mmx")
    with pytest.raises(ConfigError, match=r"KTRANSFORMERS_ISA=mmx: this machine has scalar"):
        active_isa()


def test_a_tier_that_the_machine_lacks():
    emulated = (Isa.AVX_VNNI_EMULATED, Isa.AVX512_BF16_EMULATED, Isa.AMX_EMULATED)
    missing = [isa for isa in Isa if isa not in (*available_isas(), *emulated)]
    for isa in missing:
        with pytest.raises(
            ValueError, match=r"(cannot run on this machine; it|is not in this build, which) has: scalar"
        ):
            WorkerPool(1, isa)


@pytest.mark.parametrize("count", [0, -1, 1025, 10**9])
def test_absurd_thread_counts(count):
    with pytest.raises(ValueError, match="num_threads must be between 1 and 1024"):
        WorkerPool(count)


def test_thread_count_must_be_a_number():
    for value in (2.0, "2", None, True):
        with pytest.raises(TypeError, match="num_threads must be an int"):
            WorkerPool(value)


def test_closing(make_weight):
    pool = WorkerPool(3)
    weight, x = make_weight(QuantType.F32, 40, 64), torch.randn(2, 64)
    linear(x, weight, pool)
    pool.close()
    pool.close()
    assert "closed" in repr(pool)
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        linear(x, weight, pool)


def test_an_exception_in_a_task_reaches_the_caller(make_weight):
    weight, x = make_weight(QuantType.F32, 400, 64), torch.randn(2, 64)
    for threads in (1, 4):
        pool = WorkerPool(threads)
        expected = linear(x, weight, pool)
        for failing in (0, 57, 99):
            with pytest.raises(RuntimeError, match=f"task {failing} failed"):
                pool.handle._run_failing(100, failing)
            assert torch.equal(linear(x, weight, pool), expected)
        pool.close()


def test_tasks_that_wait_for_others_of_their_job():
    """They go on once all of those are done, and none waits for ever for one that has thrown."""
    for threads in (1, 2, 5):
        pool = WorkerPool(threads)
        for count in (0, 1, 3, 200):
            assert pool.handle._run_both(count, -1) == count
        for failing in (0, 57, 99):
            with pytest.raises(RuntimeError, match=f"task {failing} failed"):
                pool.handle._run_both(100, failing)
            assert pool.handle._run_both(100, -1) == 100
        pool.close()


def test_others_take_what_a_stopped_thread_leaves():
    """A thread that is taken away in the midst of a task holds up that task alone: all others are done meanwhile."""
    pool = WorkerPool(2)
    for count in (2, 3, 500):
        assert pool.handle._run_counted(count, 1, [1]) == [count - 1, 1]
    pool.close()


def test_of_many_threads_a_stopped_one_has_a_task_at_most():
    pool = WorkerPool(5)
    for stopped in range(5):
        counts = pool.handle._run_counted(1000, stopped, [stopped])
        assert sum(counts) == 1000
        assert counts[stopped] <= 1
    pool.close()


def test_no_job_waits_for_a_thread_that_does_not_begin(make_weight):
    weight, x = make_weight(QuantType.F32, 640, 64), torch.randn(2, 64)
    pool = WorkerPool(2)
    expected = linear(x, weight, pool)
    pool.handle._hold(1, True)
    assert pool.handle._run_counted(300, -1, []) == [300, 0]
    assert torch.equal(linear(x, weight, pool), expected)
    pool.handle._hold(1, False)
    assert pool.handle._run_counted(300, -1, [1])[1] > 0
    pool.close()


def test_threads_on_efficiency_cores_rest_in_steps_of_few_rows(make_weight):
    places = [ThreadPlace(0), ThreadPlace(0, is_slow=True)]
    pool = WorkerPool(2, places=places)
    weight, x = make_weight(QuantType.F32, 640, 64), torch.randn(2, 64)
    pool.slow_rest = True
    pool.begin_step(8)
    assert pool.handle._run_counted(300, -1, []) == [300, 0]
    expected = linear(x, weight, pool)
    pool.begin_step(9)
    assert pool.handle._run_counted(300, -1, [1])[1] > 0
    with pytest.raises(RuntimeError, match="task 0 failed"):
        pool.handle._run_failing(300, 0)
    pool.slow_rest = False
    pool.begin_step(1)
    assert pool.handle._run_counted(300, -1, [1])[1] > 0
    assert torch.equal(linear(x, weight, pool), expected)
    pool.close()


def test_tasks_that_a_cancelled_job_left_to_a_thread_that_rests_are_forgotten():
    pool = WorkerPool(3, places=[ThreadPlace(0), ThreadPlace(0), ThreadPlace(0, is_slow=True)])
    pool.handle._hold(2, True)
    with pytest.raises(RuntimeError, match="task 0 failed"):
        pool.handle._run_failing(300, 0)
    pool.handle.rest_slow(True)
    assert sum(pool.handle._run_counted(7, -1, [])) == 7
    pool.handle._hold(2, False)
    pool.close()


def test_a_slow_thread_changes_no_bit(make_weight):
    weight, x = make_weight(QuantType.Q4_K, 640, 256), torch.randn(3, 256)
    pool = WorkerPool(2)
    expected = linear(x, weight, pool)
    pool.handle._slow_down(1, 50)
    assert torch.equal(linear(x, weight, pool), expected)
    pool.close()


def test_short_jobs_one_after_the_other(make_weight):
    """Many, so that threads are met in every state: about to sleep, asleep, late for the job before."""
    pool = WorkerPool(2)
    weight, x = make_weight(QuantType.F32, 640, 64), torch.randn(1, 64)
    expected = linear(x, weight, pool)
    for _ in range(5000):
        assert torch.equal(linear(x, weight, pool), expected)
    pool.close()


def test_calls_from_many_threads_at_once(make_weight):
    pools = [WorkerPool(2), WorkerPool(3)]
    weight, x = make_weight(QuantType.Q8_0, 200, 256), torch.randn(8, 256)
    expected = linear(x, weight, pools[0])
    wrong = []

    def work(pool):
        wrong.extend(i for i in range(50) if not torch.equal(linear(x, weight, pool), expected))

    threads = [threading.Thread(target=work, args=(pools[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for pool in pools:
        pool.close()


def test_many_pools_come_and_go(make_weight):
    weight, x = make_weight(QuantType.F32, 64, 32), torch.randn(3, 32)
    expected = linear(x, weight, WorkerPool(1))
    for _ in range(40):
        pool = WorkerPool(4)
        assert torch.equal(linear(x, weight, pool), expected)
        del pool
    assert threading.active_count() >= 1


def task_cpu_ticks():
    """CPU time of every thread of this process, in clock ticks (utime + stime of /proc/self/task/*/stat)."""
    ticks = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        ticks[task] = int(fields[11]) + int(fields[12])
    return ticks


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")
def test_an_idle_pool_uses_no_cpu(make_weight):
    before = set(os.listdir("/proc/self/task"))
    pool = WorkerPool(4)
    workers = set(os.listdir("/proc/self/task")) - before
    assert len(workers) == 3
    weight, x = make_weight(QuantType.F32, 640, 256), torch.randn(4, 256)
    linear(x, weight, pool)
    start = task_cpu_ticks()
    # The main thread burns half a second of its own CPU time; spinning workers would collect about as much each.
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    used = task_cpu_ticks()
    tick = os.sysconf("SC_CLK_TCK")
    assert sum(used[w] - start[w] for w in workers) <= 0.05 * tick
    pool.close()
    assert not workers & set(os.listdir("/proc/self/task"))


FORK = """
import os, torch
from ktransformers.kernels.cpu import WorkerPool, linear
from ktransformers.kernels.types import RawTensor
x, weight = torch.ones(2, 64), RawTensor.from_tensor(torch.ones(64, 64))
pool = WorkerPool(3)
linear(x, weight, pool)
child = os.fork()
if child == 0:
    try:
        linear(x, weight, pool)
    except RuntimeError as error:
        assert "fork" in str(error), error
        own = WorkerPool(2)
        ok = bool((linear(x, weight, own) == 64).all())
        pool.close()
        del pool
        os._exit(0 if ok else 3)
    os._exit(4)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
linear(x, weight, pool)
print("done")
"""

EXIT = """
import torch
from ktransformers.kernels.cpu import WorkerPool, linear, MoeKernel
from ktransformers.kernels.types import ExpertWeights, ActivationSpec
from ktransformers.kernels.types import RawTensor
weight = RawTensor.from_tensor(torch.ones(64, 64))
pools = [WorkerPool(4) for _ in range(3)]
kernel = MoeKernel(ExpertWeights([weight], [weight], [weight]), ActivationSpec(), pools[0])
for pool in pools:
    linear(torch.ones(2, 64), weight, pool)
print("done")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [FORK, EXIT], ids=["fork", "exit"])
def test_fork_and_exit_in_a_fresh_process(program):
    # Python 3.12 warns about any fork() of a process with threads, which is what this test is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
    assert result.stderr == ""
