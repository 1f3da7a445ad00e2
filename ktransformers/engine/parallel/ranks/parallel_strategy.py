"""Ways to divide a model over processes, as those who start and lead them see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from typing_extensions import override

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.pipeline.link import StageLink
from ktransformers.engine.parallel.pipeline.memory_budgets import StageMemoryBudget, stage_memory_budgets
from ktransformers.engine.parallel.pipeline.stages import cut_stage, stage_weights
from ktransformers.engine.parallel.tensor_parallel.cut import cut_model
from ktransformers.engine.parallel.tensor_parallel.group import TensorGroup
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.optimize.machine import Machine

__all__ = ["ParallelStrategy", "PipelineStrategy", "TensorParallelStrategy", "num_processes", "parallel_strategy"]


_MOST_THREADS = 4
"""Of a process beside the driver, which looks tokens up: more would hold up experts on the driver's."""


class ParallelStrategy(Protocol):
    """A way to divide a model over processes, seen from one of them.

    size: number of processes. noun: what log lines call each. is_uniform: whether all replay the same steps.
    """

    size: int
    noun: str
    is_uniform: bool

    @property
    def is_recoverable(self) -> bool:
        """Whether the processes can hold another rendezvous after one has ended."""
        ...

    def shard(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        """Return this process's shard of the model and the hardware it runs on. Raises KTransformersError."""
        ...

    def memory_budgets(self, opened: OpenedModel, machine: Machine) -> list[StageMemoryBudget]:
        """Divide the machine that the processes share; [] where they share none, or each has a GPU of its own.

        opened: the whole model. Raises KTransformersError.
        """
        ...

    def config_of_others(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration that a worker gets, made of the driver's resolved one."""
        ...

    def rendezvous(self, place: str, device: torch.device) -> None:
        """Wait for the other processes. place: a file, or tcp://HOST:PORT. device: where this one's results are."""
        ...

    def will_replay(self, most_rows: int) -> None:
        """Prepare for the capture of steps of up to `most_rows` rows from now on."""
        ...

    def send_output(self) -> Callable[[int], None] | None:
        """Return what sends a step's results on, called with its number of rows; None if this process sends nothing."""
        ...

    def leave(self) -> None:
        """Leave the group of processes."""
        ...


class TensorParallelStrategy(ParallelStrategy):
    """The strategy in which each process has a part of every layer, and a GPU. The driver is rank 0."""

    noun, is_uniform = "GPU", True

    def __init__(self, rank: int, size: int, divided: frozenset[str] = frozenset()):
        """divided: see `cut_model`."""
        self.size, self._group, self._divided = size, TensorGroup(rank, size), divided

    @override
    @property
    def is_recoverable(self) -> bool:
        return False  # the others wait in sums, in kernels that nothing can interrupt

    @override
    def shard(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        return cut_model(opened, self._group, self._divided), hardware.of_one_gpu()

    @override
    def memory_budgets(self, opened: OpenedModel, machine: Machine) -> list[StageMemoryBudget]:
        return []

    @override
    def config_of_others(self, config: EngineConfig) -> EngineConfig:
        # For what is not on the GPU: all look tokens up at the same time, and wait for the last one.
        threads = max(1, min(config.cpu_infer // self.size, _MOST_THREADS))
        return replace(config, use_cuda=True, cpu_infer=threads)

    @override
    def rendezvous(self, place: str, device: torch.device) -> None:
        self._group.rendezvous(Path(place), device)

    @override
    def will_replay(self, most_rows: int) -> None:
        pass

    @override
    def send_output(self) -> Callable[[int], None] | None:
        return None

    @override
    def leave(self) -> None:
        self._group.leave()


class PipelineStrategy(ParallelStrategy):
    """The strategy in which each process has some neighbouring layers. The driver is rank 0 and has the last ones, rank
    r the (r - 1)th part."""

    noun, is_uniform = "stage", False

    def __init__(self, rank: int, size: int, is_apart: bool = False):
        self.size, self._link, self._is_apart = size, StageLink((rank - 1) % size, size), is_apart
        self._asked_threads = 0

    @override
    @property
    def is_recoverable(self) -> bool:
        return not self._link.has_gpu_groups

    @override
    def shard(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        self._asked_threads = opened.config.cpu_infer
        beside = 1 if self._is_apart else self.size  # processes on this machine
        threads = opened.config.cpu_infer or max(hardware.num_threads // beside, 1)
        part = cut_stage(opened, self._link)
        return replace(part, config=replace(part.config, cpu_infer=threads)), hardware

    @override
    def memory_budgets(self, opened: OpenedModel, machine: Machine) -> list[StageMemoryBudget]:
        if self._is_apart:
            return []
        *others, last = stage_weights(opened, self.size)
        return stage_memory_budgets(machine, [last, *others])

    @override
    def config_of_others(self, config: EngineConfig) -> EngineConfig:
        threads = self._asked_threads if self._is_apart else config.cpu_infer  # other machines have other cores
        return replace(config, cpu_infer=threads, stage_hosts="", stage_key_file=None)

    @override
    def rendezvous(self, place: str, device: torch.device) -> None:
        self._link.rendezvous(place, device)

    @override
    def will_replay(self, most_rows: int) -> None:
        self._link.replayed_rows = most_rows

    @override
    def send_output(self) -> Callable[[int], None] | None:
        return None if self._link.is_last else self._link.send

    @override
    def leave(self) -> None:
        self._link.leave()


def num_processes(config: EngineConfig) -> int:
    """Number of processes that a model is divided over."""
    return config.tensor_parallel * config.pipeline


def parallel_strategy(
    config: EngineConfig, rank: int, is_apart: bool = False, divided: frozenset[str] = frozenset()
) -> ParallelStrategy:
    """Return how the model is divided, as one of several processes sees it. is_apart: whether they are on machines of
    their own. divided: for a worker, the routed experts of which each process has a part."""
    if config.pipeline > 1:
        return PipelineStrategy(rank, config.pipeline, is_apart)
    return TensorParallelStrategy(rank, config.tensor_parallel, divided)
