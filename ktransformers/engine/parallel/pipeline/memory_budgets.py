"""Divides one machine over its stages: GPUs, and bytes to plan with.

All load at the same time, so that none sees how much the others are going to take.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktransformers.optimize.machine import Machine

__all__ = ["StageMemoryBudget", "stage_memory_budgets"]

_CONTEXT_BYTES = 640 * 2**20
"""Of a GPU, for each process more that uses it: the driver's context and the kernels of torch and Triton."""

_EVEN = 8
"""A part in so many of the memory is divided evenly: work space does not depend on how many layers there are."""


@dataclass(frozen=True, slots=True)
class StageMemoryBudget:
    """The GPUs and the memory that one pipeline stage may use.

    gpus: numbers of its GPUs on the machine; the stage itself calls them cuda:0, cuda:1 ... free: bytes it may take, by
    device as the machine calls it.
    """

    gpus: tuple[int, ...]
    free: Mapping[str, int]

    @property
    def free_by_own_names(self) -> dict[str, int]:
        """Return `free` by the device names that the stage's process uses, which sees no other GPUs."""
        names = ["cpu", *(f"cuda:{i}" for i in range(len(self.gpus)))]
        return dict(zip(names, self.free.values(), strict=True))


def stage_memory_budgets(machine: Machine, weights: Sequence[int]) -> list[StageMemoryBudget]:
    """Divide this machine's GPUs and memory into one budget per process. weights: parameters of each process's part.

    Where there are as many GPUs as stages each has its own, neighbours together; else some share one, each with the
    part of its memory that its weights are of theirs, as of the RAM.
    """
    names = [name for name in machine.devices if name != "cpu"]
    size = len(weights)
    if len(names) >= size:
        ends = [len(names) * rank // size for rank in range(size + 1)]
        used = [names[first:end] for first, end in itertools.pairwise(ends)]
    else:
        used = [names[rank * len(names) // size :][:1] for rank in range(size)]
    memory_budgets = []
    for rank, mine in enumerate(used):
        free = {"cpu": _part(machine.devices["cpu"], weights, range(size), rank)}
        for name in mine:
            beside = [other for other, theirs in enumerate(used) if name in theirs]
            nbytes = max(machine.devices[name] - _CONTEXT_BYTES * (len(beside) - 1), 0)
            free[name] = _part(nbytes, weights, beside, rank)
        memory_budgets.append(StageMemoryBudget(tuple(int(name.partition(":")[2]) for name in mine), free))
    return memory_budgets


def _part(nbytes: int, weights: Sequence[int], ranks: Sequence[int], rank: int) -> int:
    """What `rank` has of bytes that `ranks` divide."""
    even = nbytes // _EVEN // len(ranks)
    return even + (nbytes - even * len(ranks)) * weights[rank] // max(sum(weights[i] for i in ranks), 1)
