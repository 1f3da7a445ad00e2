"""The driver of a divided model: starts the other processes, synchronizes with them, and sends them each step."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from ktransformers.config import EngineConfig, parse_hosts
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.pipeline.memory_budgets import StageMemoryBudget
from ktransformers.engine.parallel.pipeline.network import rendezvous_store
from ktransformers.engine.parallel.ranks.agent import read_secret
from ktransformers.engine.parallel.ranks.messages import Begin, Captured, Loaded, Made, Regroup, Start, Step, encode
from ktransformers.engine.parallel.ranks.parallel_strategy import ParallelStrategy, num_processes, parallel_strategy
from ktransformers.engine.parallel.ranks.ranks import Ranks, ResolvedPlan, Sizes, numbers_of
from ktransformers.engine.parallel.ranks.worker_group import WorkerGroup
from ktransformers.engine.parallel.ranks.worker_handles import LocalWorker, OnDeath, RemoteWorker, WorkerHandle
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.step.broadcast import StepBlocks, StepBroadcast
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.errors import CapacityError, ConfigError, EngineError
from ktransformers.optimize.machine import Machine
from ktransformers.system.child import framed
from ktransformers.system.process_group import ProcessGroup
from ktransformers.system.shared_blocks import SharedBlocks
from ktransformers.weights.synthetic import SyntheticSource

__all__ = ["DETECT", "Driver", "made_of"]

logger = logging.getLogger(__name__)

DETECT = "ktransformers.engine.plan.hardware:Hardware.detect"
"""How a process beside the driver finds what it runs on; tests make GPUs up."""


def _die(message: str) -> None:
    """Without one of them, and with no other one in its place, the others wait for ever."""
    logger.critical("%s; this process ends, too", message)
    logging.shutdown()
    os._exit(1)


def made_of(opened: OpenedModel) -> Made | None:
    """Return how another process makes the same model; None for a model that it opens by its files."""
    source = opened.source
    if not isinstance(source, SyntheticSource):
        return None
    return Made(opened.hf_config.to_json_string(use_diff=False), source.routing)


def _gpus(config: EngineConfig) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each process, "" for what the driver sees. Raises ConfigError when there are fewer."""
    size = config.tensor_parallel
    if not torch.cuda.is_available() or size == 1:
        return [""] * num_processes(config)
    names = _visible()
    if len(names) < size:
        raise ConfigError(f"--tensor_parallel {size}: there are {len(names)} GPUs")
    return names[:size]


def _visible() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process sees, in the order of their numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")


class Driver(Ranks):
    """The Ranks of the process that samples and gets the scheduler's steps. config: how the model is divided. made: of
    a model without files. on_death: called when a process ends in whose place there can be no other."""

    def __init__(
        self,
        config: EngineConfig,
        made: Made | None = None,
        hardware: str = DETECT,
        on_death: OnDeath = _die,
    ):
        self._strategy: ParallelStrategy = parallel_strategy(config, 0, bool(config.stage_hosts))
        self._made, self._hardware = made, hardware
        self._gpus = _gpus(config)
        self._memory_budgets: list[dict[str, int]] = []  # of each process, where they share this machine
        self._hosts = parse_hosts(config.stage_hosts) if config.stage_hosts else []
        self._secret = b"" if config.stage_key_file is None else read_secret(config.stage_key_file)
        self._store: Any = None  # where processes of other machines meet, as long as it is kept
        self._resolved: ResolvedPlan | None = None
        self._device: torch.device | None = None
        self._shared: SharedBlocks | None = None  # where steps come to the others, if not as messages
        self._blocks: StepBlocks | None = None
        self._processes = ProcessGroup()
        self._workers = WorkerGroup(self._begun, self._check_loaded, on_death)
        self._undo = ExitStack()

    @override
    def shard(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        memory_budgets = self._strategy.memory_budgets(opened, hardware.machine)
        if memory_budgets:
            self._take_memory_budgets(memory_budgets, hardware.machine)
            hardware = hardware.within(memory_budgets[0].free)
        return self._strategy.shard(opened, hardware)

    def _take_memory_budgets(self, memory_budgets: Sequence[StageMemoryBudget], machine: Machine) -> None:
        self._memory_budgets = [budget.free_by_own_names for budget in memory_budgets]
        if torch.cuda.is_available():
            names = _visible()
            self._gpus = [",".join(names[i] for i in budget.gpus) for budget in memory_budgets]
        parts = ((name, free / 2**30, machine.devices[name] / 2**30) for name, free in memory_budgets[0].free.items())
        mine = ", ".join(f"{part:.1f} of {whole:.1f} GiB on {name}" for name, part, whole in parts)
        logger.info("the stages divide what is free here: the last one has %s", mine)

    @override
    def begin(self, resolved: ResolvedPlan) -> None:
        self._resolved = resolved
        strategy = self._strategy
        logger.info("the model is divided over %d processes, one for each %s", strategy.size, strategy.noun)
        if resolved.divided:
            logger.info("the routed experts of %d layers are divided, too", len(resolved.divided))
        if strategy.is_uniform and strategy.size > 1:
            try:
                self._shared = SharedBlocks.create(strategy.size - 1)
                self._undo.callback(self._shared.close)
            except EngineError as error:
                logger.warning("steps are sent as messages: %s", error)
        for rank in range(1, strategy.size):
            self._workers.start(rank)

    def _begun(self, rank: int, on_death: OnDeath) -> WorkerHandle:
        """A process that loads."""
        resolved, name = self._resolved, f"{self._strategy.noun} {rank}"
        assert resolved is not None
        worker: WorkerHandle
        if self._hosts:
            worker = RemoteWorker(name, *self._hosts[rank - 1], self._secret, on_death)
        else:
            worker = LocalWorker(self._processes, name, self._gpus[rank], on_death)
        start = Start(
            rank,
            worker.name,
            replace(self._strategy.config_of_others(resolved.config), tower_device="none", mmproj=None),  # it is here
            resolved.page_size,
            resolved.max_batch_size,
            resolved.num_states,
            self._hardware,
            "debug" if logging.getLogger("ktransformers").isEnabledFor(logging.DEBUG) else "error",
            self._made,
            bool(self._hosts),
            self._memory_budgets[rank] if self._memory_budgets else {},
            resolved.divided,
            "" if self._shared is None else self._shared.path,
        )
        try:
            worker.send(framed(encode(start)))
        except EngineError:
            worker.close()
            raise
        return worker

    def _check_loaded(self, worker: WorkerHandle) -> None:
        """Wait until it has loaded. Raises what it failed with, CapacityError when it has other budget."""
        assert self._resolved is not None
        wanted, got = Loaded(self._resolved.num_slots, self._resolved.num_states), worker.receive()
        if got != wanted:
            raise CapacityError(f"{worker.name} holds a cache of {got}, and the first one of {wanted}")

    @override
    def rendezvous(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        self._workers.wait()
        self._device = device
        is_uniform = self._strategy.is_uniform
        if self._shared is not None:
            self._blocks = StepBlocks(self._shared, device, self._workers.check)
            self._undo.callback(self._blocks.unpin)
        told = partial(Begin, sizes=numbers_of(sizes) if is_uniform else [], is_captured=is_captured and is_uniform)
        self._rendezvous(device, self._workers.workers, lambda place: self._workers.send(framed(encode(told(place)))))
        self._undo.callback(self._strategy.leave)
        return sizes, is_captured

    def _rendezvous(self, device: torch.device, new: Sequence[WorkerHandle], send: Callable[[str], None]) -> None:
        """new: workers that were not met before. send: the place to all."""
        address = self._workers.address
        if address is None:
            folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="kt-ranks-")))
            place = str(folder / "meeting")
        else:
            self._store = rendezvous_store(address, self._strategy.size)
            place = f"tcp://{address}:{self._store.port}"
        for worker in new:
            worker.watch()
        send(place)
        self._strategy.rendezvous(place, device)

    @override
    def captured(self, sizes: Sizes) -> None:
        for worker in self._workers.workers:
            got = worker.receive()
            if self._strategy.is_uniform and got != Captured(numbers_of(sizes)):
                raise EngineError(f"{worker.name} has captured other steps ({got}) than the first one ({sizes})")
        self._workers.is_recoverable = self._strategy.is_recoverable

    @override
    @property
    def begins_ahead(self) -> bool:
        return not self._strategy.is_uniform

    @override
    def step_broadcast(self) -> StepBroadcast | None:
        return self._broadcast

    def _broadcast(self, batch: ForwardBatch, is_padded: bool) -> None:
        self._workers.send(framed(encode(Step.of(batch, is_padded))))
        if self._blocks is not None:
            self._blocks.publish_message()

    @override
    @property
    def step_blocks(self) -> StepBlocks | None:
        return self._blocks

    @override
    def recover(self) -> None:
        assert self._device is not None
        with self._workers.recovered() as new:
            self._strategy.leave()

            def send(place: str) -> None:
                for worker in self._workers.workers:
                    worker.send(framed(encode(Begin(place, [], False) if worker in new else Regroup(place))))

            self._rendezvous(self._device, new, send)
            for worker in new:
                worker.receive()  # it has captured its graphs

    @override
    def close(self) -> None:
        self._workers.close()  # first: they may wait in a sum
        self._processes.close()
        self._undo.close()
