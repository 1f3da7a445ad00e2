"""Places the threads of a worker pool: spread over the NUMA nodes of the machine, each bound to its node.

Within a node threads are free to move: bound to a core each, a layer of experts took 1.5 to 3 times as long on 16
cores beside one to four busy neighbours, against 1.1 to 1.6 times when the system may move them; alone there is no
difference. Reads Linux's sysfs (Documentation/ABI/stable/sysfs-devices-node and sysfs-devices-system-cpu of the
kernel); elsewhere, or where that tells nothing, all threads are of one node. Does not bind threads: the pool does.
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
    """The CPUs to which one thread of a pool is bound. node: number of the NUMA node among those in use, from 0. cpus:
    those to be bound to; none: any.
    """

    node: int
    cpus: tuple[int, ...] = ()


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers in a list like `0-3,8,10-11`, ascending."""
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


def _num_cores(cpus: Collection[int], sysfs: Path) -> int:
    """Cores that the CPUs belong to: hyper-threads count once."""
    siblings = {_read(sysfs / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return len(siblings)


def _nodes(sysfs: Path, allowed: Collection[int]) -> list[list[int]]:
    """The CPUs of every node that has any that may be used."""
    folders = sorted((sysfs / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    listed = (sorted(set(parse_cpu_list(_read(folder / "cpulist"))) & set(allowed)) for folder in folders)
    return [cpus for cpus in listed if cpus] or [sorted(allowed)]


def thread_places(num_threads: int, sysfs: Path = SYSFS, allowed: Collection[int] | None = None) -> list[ThreadPlace]:
    """Return a place for each thread, in the order of the nodes; the first one is the caller's.

    Nodes get threads in proportion to their cores. With fewer threads than nodes one node is used. On a machine of one
    node threads are not bound.
    allowed: CPUs that may be used, those of this process when None.
    """
    nodes = _nodes(sysfs, _allowed() if allowed is None else allowed)
    if len(nodes) == 1:
        return [ThreadPlace(0)] * num_threads
    if num_threads < len(nodes):
        return [ThreadPlace(0, tuple(nodes[0]))] * num_threads
    cores = [_num_cores(cpus, sysfs) for cpus in nodes]
    places = list[ThreadPlace]()
    for node, cpus in enumerate(nodes):
        end = num_threads * sum(cores[: node + 1]) // sum(cores)
        end = max(len(places) + 1, min(end, num_threads - (len(nodes) - node - 1)))  # every node has a thread
        places += [ThreadPlace(node, tuple(cpus))] * (end - len(places))
    return places
