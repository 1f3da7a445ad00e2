"""Ways to divide a model over processes, as those who start and lead them see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from typing_extensions import override

from ktransformers.config import EngineConfig
from ktransformers.engine.opened import OpenedModel
from ktransformers.engine.pipeline.link import StageLink
from ktransformers.engine.pipeline.stages import cut_stage
from ktransformers.engine.planning import Hardware
from ktransformers.engine.tensor_parallel.cut import cut_model
from ktransformers.engine.tensor_parallel.group import TensorGroup

__all__ = ["Division", "PipelineDivision", "TensorDivision", "division_of", "num_processes"]


class Division(Protocol):
    """Of one process. size: processes. noun: what each is, for people. is_uniform: all replay the same steps."""

    size: int
    noun: str
    is_uniform: bool

    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        """What of the model this process has, and what it runs on. Raises KTransformersError."""
        ...

    def config_of_others(self, config: EngineConfig) -> EngineConfig:
        """What the leader's settled configuration is for a process beside it."""
        ...

    def meet(self, file: Path, device: torch.device) -> None:
        """Wait for the others. device: of this one's results."""
        ...

    def leave(self) -> None:
        """Be on its own again."""
        ...


class TensorDivision(Division):
    """Each has a part of every layer, and a GPU. The leader is rank 0."""

    noun, is_uniform = "GPU", True

    def __init__(self, rank: int, size: int):
        self.size, self._group = size, TensorGroup(rank, size)

    @override
    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        return cut_model(opened, self._group), hardware.of_one_gpu()

    @override
    def config_of_others(self, config: EngineConfig) -> EngineConfig:
        return replace(config, use_cuda=True, cpu_infer=1)  # a worker thread for what is not on the GPU

    @override
    def meet(self, file: Path, device: torch.device) -> None:
        self._group.meet(file, device)

    @override
    def leave(self) -> None:
        self._group.part()


class PipelineDivision(Division):
    """Each has some neighbouring layers. The leader is rank 0 and has the last ones, rank r the (r - 1)th part."""

    noun, is_uniform = "stage", False

    def __init__(self, rank: int, size: int):
        self.size, self._link = size, StageLink((rank - 1) % size, size)

    @override
    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        threads = opened.config.cpu_infer or max(hardware.num_threads // self.size, 1)
        part = cut_stage(opened, self._link)
        return replace(part, config=replace(part.config, cpu_infer=threads)), hardware

    @override
    def config_of_others(self, config: EngineConfig) -> EngineConfig:
        return config

    @override
    def meet(self, file: Path, device: torch.device) -> None:
        self._link.meet(file)

    @override
    def leave(self) -> None:
        self._link.part()


def num_processes(config: EngineConfig) -> int:
    """That a model is divided over."""
    return config.tensor_parallel * config.pipeline


def division_of(config: EngineConfig, rank: int) -> Division:
    """How the model is divided, as one of several processes sees it."""
    if config.pipeline > 1:
        return PipelineDivision(rank, config.pipeline)
    return TensorDivision(rank, config.tensor_parallel)
