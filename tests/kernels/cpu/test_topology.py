"""Places of threads on faked machines; pools that are spread over faked nodes give equal bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.cpu.topology import ThreadPlace, thread_places
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType, RawTensor
from ktransformers.operators.linear.packed import pack_experts
from ktransformers.weights.quantize.write import quantize


def machine(root: Path, nodes: list[list[list[int]]]) -> Path:
    """A tree with /sys: nodes of cores of CPUs."""
    sysfs = root / "sys/devices/system"
    for node, cores in enumerate(nodes):
        (sysfs / f"node/node{node}").mkdir(parents=True)
        (sysfs / f"node/node{node}/cpulist").write_text(",".join(str(cpu) for core in cores for cpu in core) + "\n")
        for core in cores:
            for number in core:
                (sysfs / f"cpu/cpu{number}/topology").mkdir(parents=True)
                (sysfs / f"cpu/cpu{number}/topology/thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
    return root


def test_two_sockets_with_hyper_threads(tmp_path: Path) -> None:
    root = machine(tmp_path, [[[0, 4], [1, 5]], [[2, 6], [3, 7]]])
    first, second = ThreadPlace(0, (0, 1, 4, 5)), ThreadPlace(1, (2, 3, 6, 7))
    assert thread_places(4, root, range(8)) == [first, first, second, second]
    assert thread_places(8, root, range(8)) == [first] * 4 + [second] * 4
    # Fewer than nodes: one node.
    assert thread_places(1, root, range(8)) == [first]
    # A container that may use one CPU of the first socket and one core of the second.
    assert thread_places(2, root, [5, 3, 7]) == [ThreadPlace(0, (5,)), ThreadPlace(1, (3, 7))]


def test_nodes_of_unequal_size_share_in_proportion(tmp_path: Path) -> None:
    root = machine(tmp_path, [[[0], [1], [2]], [[3]], []])
    assert [place.node for place in thread_places(4, root, range(4))] == [0, 0, 0, 1]
    assert [place.node for place in thread_places(2, root, range(4))] == [0, 1]


def test_machines_of_one_node_do_not_bind(tmp_path: Path) -> None:
    assert thread_places(2, tmp_path, [0, 1, 2]) == [ThreadPlace(0), ThreadPlace(0)]
    assert thread_places(2, machine(tmp_path, [[[0], [1]]]), [0, 1]) == [ThreadPlace(0), ThreadPlace(0)]


@pytest.mark.parametrize("text", ["", "x", "0-", "0-1,y", "\u00b2"])
def test_what_a_system_says_of_its_nodes_in_no_list_tells_nothing(text: str, tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(text)
    assert thread_places(2, tmp_path, {0, 1}) == [ThreadPlace(0)] * 2


def test_hybrid_processors_have_threads_of_each_kind(tmp_path: Path) -> None:
    """Two performance cores with hyper-threads, and four efficiency cores: the former come first."""
    root = machine(tmp_path, [[[0, 1], [2, 3], [4], [5], [6], [7]]])
    (root / "sys/devices/cpu_atom").mkdir()
    (root / "sys/devices/cpu_atom/cpus").write_text("4-7\n")
    fast, slow = ThreadPlace(0, (0, 1, 2, 3)), ThreadPlace(0, (4, 5, 6, 7), is_slow=True)
    assert thread_places(6, root, range(8)) == [fast] * 2 + [slow] * 4
    assert thread_places(5, root, range(8)) == [fast] * 2 + [slow] * 3
    assert thread_places(1, root, range(8)) == [fast]
    # One for each hyper-thread, which efficiency cores do not have.
    assert thread_places(8, root, range(8)) == [fast] * 4 + [slow] * 4
    # A container with a performance core and two others; one with efficiency cores alone, which are of one kind.
    assert thread_places(3, root, [2, 4, 5]) == [ThreadPlace(0, (2,))] + [ThreadPlace(0, (4, 5), is_slow=True)] * 2
    assert thread_places(2, root, [4, 5]) == [ThreadPlace(0)] * 2


def test_every_task_is_shared_out_once() -> None:
    places = [(node, list[int](), False) for node in (0, 0, 1, 2, 2, 2)]
    assert extension.share_tasks([5, 9, 10], places) == [(0, 2), (2, 5), (5, 9), (9, 9), (9, 9), (9, 10)]
    assert extension.share_tasks([10], places) == [(0, 1), (1, 3), (3, 5), (5, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 2], [0, 0, 1, 1, 1]])
def test_equal_bits_on_any_number_of_nodes(nodes: list[int]) -> None:
    places = [ThreadPlace(node) for node in nodes]
    spread, single = WorkerPool(len(places), places=places), WorkerPool(1)
    assert spread.num_nodes == nodes[-1] + 1
    experts, hidden, width, top_k = 5, 256, 512, 2
    generator = torch.Generator().manual_seed(0)
    kinds = ((QuantType.Q4_K, width, hidden), (QuantType.Q4_K, width, hidden), (QuantType.Q6_K, hidden, width))
    raw = []
    for kind, rows, cols in kinds:
        values = [torch.randn(rows, cols, generator=generator).numpy() for _ in range(experts)]
        raw.append([RawTensor(torch.from_numpy(quantize(v, kind)).reshape(-1), kind, (rows, cols)) for v in values])
    layers = [
        MoeKernel(pack_experts(ExpertWeights(raw[0], raw[1], raw[2]), pool), ActivationSpec(), pool)
        for pool in (spread, single)
    ]
    for tokens in (1, 3, 50):
        x = torch.randn(tokens, hidden, generator=generator)
        ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k].contiguous()
        weights = torch.rand(tokens, top_k, generator=generator)
        assert torch.equal(layers[0].forward(x, ids, weights), layers[1].forward(x, ids, weights))
    for pool in (spread, single):
        pool.close()


def test_workers_are_bound_and_the_caller_is_not() -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0))[:1])
    pool = WorkerPool(2, places=[ThreadPlace(0, cpus), ThreadPlace(0, cpus)])
    before = os.sched_getaffinity(0)
    cpu.linear(torch.randn(64, 64), RawTensor.from_tensor(torch.randn(64, 64)), pool)
    assert os.sched_getaffinity(0) == before
    pool.close()
    assert pool.handle.num_bound == 1


def test_places_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="one per thread"):
        WorkerPool(2, places=[ThreadPlace(0, -1)])
    fast, slow = ThreadPlace(0), ThreadPlace(0, is_slow=True)
    for places in ([slow, fast], [fast, slow, fast], [slow], [fast, ThreadPlace(1, is_slow=True)]):
        with pytest.raises(ValueError, match="slow threads come behind all others"):
            WorkerPool(len(places), places=places)
    for nodes in ([1, 1], [0, 2], [0, 1, 0]):
        with pytest.raises(ValueError, match="numbered from 0"):
            WorkerPool(len(nodes), places=[ThreadPlace(node) for node in nodes])
