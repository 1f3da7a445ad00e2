"""Which CPU each thread of a worker pool should use: one core each, spread over the NUMA nodes of the machine.

Reads Linux's sysfs (Documentation/ABI/stable/sysfs-devices-node and sysfs-devices-system-cpu of the kernel); elsewhere, or
where that tells nothing, all threads are of one node and not pinned. Does not pin: the pool does.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ThreadPlace", "parse_cpu_list", "thread_places"]

SYSFS = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class ThreadPlace:
    """node: number of the NUMA node among those in use, from 0. cpu: the CPU to pin to, or -1."""

    node: int
    cpu: int


def parse_cpu_list(text: str) -> list[int]:
    """The numbers in a list like `0-3,8,10-11`, ascending."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cores(cpus: Collection[int], sysfs: Path) -> list[int]:
    """One CPU of every core, the first of those that share it."""
    cores, seen = [], set[int]()
    for cpu in sorted(cpus):
        if cpu in seen:
            continue
        cores.append(cpu)
        seen.update(parse_cpu_list(_read(sysfs / f"cpu/cpu{cpu}/topology/thread_siblings_list")))
    return cores


def _nodes(sysfs: Path, allowed: Collection[int]) -> list[list[int]]:
    """The cores of every node that has any that may be used."""
    nodes = []
    folders = sorted((sysfs / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    for folder in folders:
        cores = _cores(set(parse_cpu_list(_read(folder / "cpulist"))) & set(allowed), sysfs)
        if cores:
            nodes.append(cores)
    return nodes or [_cores(allowed, sysfs)]


def thread_places(
    num_threads: int, sysfs: Path = SYSFS, allowed: Collection[int] | None = None
) -> list[ThreadPlace]:
    """A place for each thread, in the order of the nodes; the first one is the caller's.

    Nodes get threads in proportion to their cores. With fewer threads than nodes one node is used. Threads are pinned
    to a core each; with more threads than cores none is pinned.
    allowed: CPUs that may be used, those of this process when None.
    """
    nodes = _nodes(sysfs, _allowed() if allowed is None else allowed)
    total = sum(len(cores) for cores in nodes)
    if num_threads < len(nodes):
        nodes, total = nodes[:1], len(nodes[0])
    is_pinned = num_threads <= total
    places, before = list[ThreadPlace](), 0
    for node, cores in enumerate(nodes):
        first, before = before, before + len(cores)
        count = num_threads * before // total - num_threads * first // total
        places += [ThreadPlace(node, cores[i] if is_pinned else -1) for i in range(count)]
    return places
