"""Reads that fail, files that change, and what a store leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.types import RawTensor
from tests.support.checks.stored_experts import Stored, build, make_layer

MakeWeight = Callable[..., RawTensor]

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about this process")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


@pytest.fixture
def made(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> Iterator[Stored]:
    """Two layers, the second of which lies behind the first in the file. Records of 60 KiB."""
    layers = [make_layer(make_weight, pool, seed=seed) for seed in range(2)]
    stored = build(tmp_path / "experts", layers, pool, slots=8)
    yield stored
    stored.store.close()


def forward(made: Stored, layer: int, experts: list[int]) -> None:
    kernel = made.kernels[layer]
    x, ids = torch.ones(1, kernel.hidden_size), torch.tensor([experts])
    weights = torch.ones(ids.shape)
    assert torch.equal(kernel.forward(x, ids, weights), made.resident[layer].forward(x, ids, weights))


def test_a_file_that_is_cut_short(made: Stored) -> None:
    forward(made, 1, [3])
    about, data = made.path.stat(), made.path.read_bytes()
    os.truncate(made.path, about.st_size - 5 * made.store.layout(1).nbytes)
    forward(made, 1, [3])  # what is in memory goes on
    for _ in range(2):
        with pytest.raises(
            ReadError, match=rf"{made.path} has \d+ bytes and had {about.st_size} .*load the model again"
        ):
            forward(made, 1, [3, 7])
    with made.path.open("r+b") as file:
        file.write(data)
    os.utime(made.path, ns=(about.st_atime_ns, about.st_mtime_ns))
    forward(made, 1, [3, 7])
    forward(made, 0, [0, 1, 2])
    assert made.store.stats().read_errors >= 2


def test_a_file_that_is_written_to(made: Stored) -> None:
    about = made.path.stat()
    with made.path.open("r+b") as file:
        file.seek(100)
        old = file.read(1)
        file.seek(100)
        file.write(bytes([old[0] ^ 1]))
    os.utime(made.path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))  # clocks of file systems are coarse
    with pytest.raises(ReadError, match=f"{made.path} was written to since it was opened"):
        forward(made, 0, [0])
    with made.path.open("r+b") as file:
        file.seek(100)
        file.write(old)
    os.utime(made.path, ns=(about.st_atime_ns, about.st_mtime_ns))
    forward(made, 0, [0])


def test_a_file_that_is_deleted_or_replaced_goes_on_serving(made: Stored) -> None:
    other = made.path.with_name("other")
    other.write_bytes(b"no experts")
    os.replace(other, made.path)
    forward(made, 0, [0, 4])
    made.path.unlink()
    forward(made, 1, [1, 5])


@pytest.mark.parametrize("layer", [0, 1])
def test_one_read_fails(made: Stored, layer: int) -> None:
    made.store.handle._fail_next(1)
    with pytest.raises(ReadError, match=f"{made.path} cannot be read"):
        forward(made, layer, [0, 1, 2])
    for number in (1 - layer, layer):
        forward(made, number, [0, 1, 2])
    assert made.store.stats().read_errors == 1


def test_reads_fail_in_a_prompt_and_while_filling(made: Stored) -> None:
    kernel = made.kernels[0]
    x, ids, weights = torch.ones(40, kernel.hidden_size), torch.arange(40)[:, None] % 8, torch.ones(40, 1)
    made.store.handle._fail_next(3)
    with pytest.raises(ReadError):
        kernel.forward(x, ids, weights)
    made.store.handle._fail_next(0)
    assert torch.equal(kernel.forward(x, ids, weights), made.resident[0].forward(x, ids, weights))
    errors = made.store.stats().read_errors
    made.store.handle._fail_next(1 << 30)
    made.store.fill(wait=True)
    assert made.store.stats().read_errors >= errors
    made.store.handle._fail_next(0)
    made.store.fill(wait=True)
    assert len(made.store.handle._held()) == 8
    forward(made, 1, [0, 1, 2])


def test_two_calls_wait_for_the_same_read(made: Stored) -> None:
    """It fails for both; neither keeps the slot."""
    made.store.handle._hold(True)
    made.store.handle._fail_next(1)
    other, errors = WorkerPool(2), list[str]()

    def run(pool: WorkerPool) -> None:
        from ktransformers.kernels.cpu import MoeKernel
        from ktransformers.kernels.types import ActivationSpec, ExpertWeights

        kernel = MoeKernel(ExpertWeights(None, [], []), ActivationSpec(), pool, 0, (made.store, 0))
        try:
            kernel.forward(torch.ones(1, 256), torch.tensor([[5]]), torch.ones(1, 1))
        except ReadError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(pool,)) for pool in (made.kernels[0].pool, other)]
    for thread in threads:
        thread.start()
    while made.store.stats().misses < 2:
        pass
    made.store.handle._hold(False)
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    forward(made, 0, [5])
    other.close()


def test_closing_ends_a_call_that_waits(made: Stored) -> None:
    made.store.handle._hold(True)
    errors: list[str] = []

    def run() -> None:
        try:
            forward(made, 0, [0])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while made.store.stats().misses < 1:
        pass
    made.store.close()
    thread.join()
    assert errors == ["this ExpertStore is closed: make a new one"]
    assert made.store.stats().misses == 1


@linux_only
def test_nothing_is_left_behind(make_weight: MakeWeight, pool: WorkerPool, tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    layers = [make_layer(make_weight, pool)]
    build(tmp_path / "first", layers, pool, slots=8).store.close()
    before = counts()
    for is_straight in (False, True):
        made = build(tmp_path / "experts", layers, pool, slots=8, is_straight=is_straight, io_threads=5)
        made.store.fill()
        forward(made, 0, [0, 1])
        assert counts() == (before[0] + 1, before[1] + 5)
        made.store.close()
        assert counts() == before
    made = build(tmp_path / "experts", layers, pool, slots=8)
    del made
    assert counts() == before


FORK = """
import os, sys, torch
from pathlib import Path
from ktransformers.kernels.cpu import WorkerPool
from tests.kernels.conftest import random_weight
from tests.support.checks.stored_experts import build, make_layer
pool = WorkerPool(2)
made = build(Path(sys.argv[1]), [make_layer(random_weight, pool)], pool, slots=8)
made.store.fill()
call = lambda: made.kernels[0].forward(torch.ones(1, 256), torch.tensor([[1, 2]]), torch.ones(1, 2))
call()
child = os.fork()
if child == 0:
    try:
        made.store.fill()
    except RuntimeError as error:
        made.store.close()
        os._exit(0 if "fork" in str(error) else 3)
    os._exit(4)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
call()
print("done")
"""


@pytest.mark.exhaustive
def test_fork_and_exit_in_a_fresh_process(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(tmp_path / "experts")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
