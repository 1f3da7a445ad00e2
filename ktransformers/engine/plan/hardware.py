"""The hardware that an engine is planned for and runs on: memory, devices, threads, how steps are captured there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ktransformers.config import EngineConfig, hot_slots
from ktransformers.engine.step.cuda_graphs import CudaGraphs, GraphBackend
from ktransformers.engine.step.expert_streaming import PrefillTools, cuda_tools
from ktransformers.engine.step.graph_sizes import DRAFT_ROWS, GRAPH_ROWS
from ktransformers.errors import ConfigError
from ktransformers.operators.device import Device, Devices
from ktransformers.optimize.machine import Machine, detect_machine
from ktransformers.system.cores import usable_cores

__all__ = ["Hardware"]

logger = logging.getLogger(__name__)

_MANY_CORES = 8
"""From so many on a service on the CPU alone has one for its other processes."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that an engine runs on. Tests make up GPUs. make_graphs: how decode steps are captured on GPUs.

    prefill_tools: for streaming experts to a device, None where that is not possible. graph_rows, draft_rows: of the
    steps that are captured beside decode steps, with prompts and with draft tokens. is_served: whether a scheduler, an
    HTTP server and clients share the processor.
    """

    machine: Machine
    devices: Devices = field(default_factory=Devices)
    make_graphs: Callable[[Sequence[torch.device]], GraphBackend] = CudaGraphs
    prefill_tools: Callable[[Device], PrefillTools | None] = cuda_tools
    graph_rows: Sequence[int] = GRAPH_ROWS
    draft_rows: Sequence[int] = DRAFT_ROWS
    is_served: bool = False

    @property
    def num_threads(self) -> int:
        """Number of worker threads when nobody says how many. The thread that talks to a GPU gets a core of its own,
        with a service's other processes: together they need less than one.

        Where they must share one with a worker, the scheduler's time slices of some milliseconds hold up whole layers.
        """
        cores = usable_cores()
        least = 3 if self.has_gpus else _MANY_CORES
        return cores - 1 if (self.has_gpus or self.is_served) and cores >= least else cores

    @property
    def has_gpus(self) -> bool:
        """Whether there is a device beside the CPU."""
        return len(self.machine.devices) > 1

    def without_gpus(self) -> Hardware:
        """Return this hardware with the CPU alone."""
        return replace(self, machine=replace(self.machine, devices={"cpu": self.machine.devices["cpu"]}))

    def of_one_gpu(self) -> Hardware:
        """Return this hardware with the CPU and the first GPU alone. Raises ConfigError when there is none."""
        names = list(self.machine.devices)[:2]
        if len(names) < 2:
            raise ConfigError("--tensor_parallel is for several GPUs, and there is none that can be used")
        devices = {name: self.machine.devices[name] for name in names}
        return replace(self, machine=replace(self.machine, devices=devices))

    def within(self, free: Mapping[str, int]) -> Hardware:
        """Return this hardware with the devices of `free` alone, with so many bytes of each, of which more may be
        free."""
        machine = replace(self.machine, available_bytes=free["cpu"], devices=dict(free))
        return replace(self, machine=machine)

    @classmethod
    def detect(cls, config: EngineConfig) -> Hardware:
        """Detect this machine; its GPUs unless the configuration wants none."""
        machine = detect_machine()
        gpus = [name for name in machine.devices if name != "cpu"]
        if not gpus or config.use_cuda is False:
            asked = {
                "--use_cuda": config.use_cuda,
                "--gpu_memory": config.gpu_memory,
                "--hot_experts": hot_slots(config.hot_experts) is not None,
                "--use_cuda_graph": config.use_cuda_graph,
                "--tower_device cuda": config.tower_device == "cuda",
            }
            reason = "no GPU can be used on this machine" if not gpus else "--no_use_cuda"
            for flag in (flag for flag, value in asked.items() if value):
                logger.warning("%s has no effect (%s): everything runs on the CPU", flag, reason)
        return cls(machine).without_gpus() if config.use_cuda is False else cls(machine)
