"""Places the threads of a worker pool: spread over the NUMA nodes of the machine, each bound to its node; or over the
kinds of cores of a hybrid processor, each bound to its kind.

Within these threads are free to move: bound to a core each, a layer of experts took 1.5 to 3 times as long on 16
cores beside one to four busy neighbours, against 1.1 to 1.6 times when the system may move them; alone there is no
difference. So it is the system that chooses among hyper-threads, and it takes idle cores first. Reads Linux's sysfs
(Documentation/ABI/stable/sysfs-devices-node and sysfs-devices-system-cpu of the kernel); elsewhere, or where that tells
nothing, all threads are of one node. Does not bind threads: the pool does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktransformers.system.cores import ROOT, allowed_cpus, count_cores, listed_cpus, slow_cpus

__all__ = ["ThreadPlace", "thread_places"]


@dataclass(frozen=True, slots=True)
class ThreadPlace:
    """The CPUs to which one thread of a pool is bound. node: number of the NUMA node among those in use, from 0. cpus:
    those to be bound to; none: any. is_slow: whether these are efficiency cores.
    """

    node: int
    cpus: tuple[int, ...] = ()
    is_slow: bool = False


def _nodes(root: Path, allowed: Collection[int]) -> list[list[int]]:
    """The CPUs of every node that has any that may be used."""
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    listed = (sorted(set(listed_cpus(folder / "cpulist")) & set(allowed)) for folder in folders)
    return [cpus for cpus in listed if cpus] or [sorted(allowed)]


def _by_kind(num_threads: int, cpus: Sequence[int], slow: Collection[int], root: Path) -> list[ThreadPlace]:
    """Performance cores first. Threads beyond one for each core are theirs, too: it is they that have hyper-threads."""
    fast = tuple(cpu for cpu in cpus if cpu not in slow)
    num_fast = min(num_threads, max(count_cores(fast, root), num_threads - count_cores(slow, root)))
    slow_place = ThreadPlace(0, tuple(sorted(slow)), is_slow=True)
    return [ThreadPlace(0, fast)] * num_fast + [slow_place] * (num_threads - num_fast)


def thread_places(num_threads: int, root: Path = ROOT, allowed: Collection[int] | None = None) -> list[ThreadPlace]:
    """Return a place for each thread, in the order of the nodes; the first one is the caller's.

    Nodes get threads in proportion to their cores. With fewer threads than nodes one node is used. On a machine of one
    node and one kind of core threads are not bound; of a hybrid processor the performance cores come first.
    root: where /sys is. allowed: CPUs that may be used, those of this process when None.
    """
    allowed = allowed_cpus() if allowed is None else allowed
    nodes = _nodes(root, allowed)
    if len(nodes) == 1:
        slow = slow_cpus(allowed, root)
        return _by_kind(num_threads, nodes[0], slow, root) if slow else [ThreadPlace(0)] * num_threads
    if num_threads < len(nodes):
        return [ThreadPlace(0, tuple(nodes[0]))] * num_threads
    cores = [count_cores(cpus, root) for cpus in nodes]
    places = list[ThreadPlace]()
    for node, cpus in enumerate(nodes):
        end = num_threads * sum(cores[: node + 1]) // sum(cores)
        end = max(len(places) + 1, min(end, num_threads - (len(nodes) - node - 1)))  # every node has a thread
        places += [ThreadPlace(node, tuple(cpus))] * (end - len(places))
    return places
