"""The process that leads others: it starts them, meets them, and tells them of each step."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from ktransformers.config import EngineConfig, parse_hosts
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.pipeline.memory_budgets import StageRoom
from ktransformers.engine.parallel.pipeline.network import meeting_store
from ktransformers.engine.parallel.ranks.agent import read_secret
from ktransformers.engine.parallel.ranks.messages import Begin, Captured, Loaded, Made, Regroup, Start, Step, encode
from ktransformers.engine.parallel.ranks.parallel_strategy import Division, division_of, num_processes
from ktransformers.engine.parallel.ranks.ranks import Ranks, Settled, Sizes, pairs_of
from ktransformers.engine.parallel.ranks.worker_group import Crew
from ktransformers.engine.parallel.ranks.worker_handles import Child, OnDeath, Peer, RemotePeer
from ktransformers.engine.plan.planning import Hardware
from ktransformers.engine.step.telling import StepTeller
from ktransformers.errors import CapacityError, ConfigError, EngineError
from ktransformers.operators.context import ForwardContext
from ktransformers.optimize.machine import Machine
from ktransformers.system.child import framed
from ktransformers.weights.synthetic import SyntheticSource

__all__ = ["DETECT", "Leader", "made_of"]

logger = logging.getLogger(__name__)

DETECT = "ktransformers.engine.plan.planning:Hardware.detect"
"""How a process beside the leader finds what it runs on; tests make GPUs up."""


def _die(message: str) -> None:
    """Without one of them, and with no other one in its place, the others wait for ever."""
    logger.critical("%s; this process ends, too", message)
    logging.shutdown()
    os._exit(1)


def made_of(opened: OpenedModel) -> Made | None:
    """How another process makes the same model; None for one that it opens by its files."""
    source = opened.source
    if not isinstance(source, SyntheticSource):
        return None
    return Made(opened.hf_config.to_json_string(use_diff=False), source.routing)


def _gpus(config: EngineConfig) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each process, "" for what the leader sees. Raises ConfigError when there are fewer."""
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


class Leader(Ranks):
    """The process that samples and is told what to compute. config: how the model is divided. made: of a model without
    files. on_death: called when a process ends in whose place there can be no other."""

    def __init__(
        self,
        config: EngineConfig,
        made: Made | None = None,
        hardware: str = DETECT,
        on_death: OnDeath = _die,
    ):
        self._division: Division = division_of(config, 0, bool(config.stage_hosts))
        self._made, self._hardware = made, hardware
        self._gpus = _gpus(config)
        self._rooms: list[dict[str, int]] = []  # of each process, where they share this machine
        self._hosts = parse_hosts(config.stage_hosts) if config.stage_hosts else []
        self._secret = b"" if config.stage_key_file is None else read_secret(config.stage_key_file)
        self._store: Any = None  # where processes of other machines meet, as long as it is kept
        self._settled: Settled | None = None
        self._device: torch.device | None = None
        self._crew = Crew(self._begun, self._check_loaded, on_death)
        self._undo = ExitStack()

    @override
    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        rooms = self._division.rooms(opened, hardware.machine)
        if rooms:
            self._take_rooms(rooms, hardware.machine)
            hardware = hardware.within(rooms[0].free)
        return self._division.part(opened, hardware)

    def _take_rooms(self, rooms: Sequence[StageRoom], machine: Machine) -> None:
        self._rooms = [room.free_by_own_names for room in rooms]
        if torch.cuda.is_available():
            names = _visible()
            self._gpus = [",".join(names[i] for i in room.gpus) for room in rooms]
        parts = ((name, free / 2**30, machine.devices[name] / 2**30) for name, free in rooms[0].free.items())
        mine = ", ".join(f"{part:.1f} of {whole:.1f} GiB on {name}" for name, part, whole in parts)
        logger.info("the stages divide what is free here: the last one has %s", mine)

    @override
    def begin(self, settled: Settled) -> None:
        self._settled = settled
        division = self._division
        logger.info("the model is divided over %d processes, one for each %s", division.size, division.noun)
        for rank in range(1, division.size):
            self._crew.start(rank)

    def _begun(self, rank: int, on_death: OnDeath) -> Peer:
        """A process that loads."""
        settled, name = self._settled, f"{self._division.noun} {rank}"
        assert settled is not None
        peer: Peer
        if self._hosts:
            peer = RemotePeer(name, *self._hosts[rank - 1], self._secret, on_death)
        else:
            peer = Child(name, rank, self._gpus[rank], on_death)
        start = Start(
            rank,
            peer.name,
            self._division.config_of_others(settled.config),
            settled.page_size,
            settled.max_batch_size,
            settled.num_states,
            self._hardware,
            "debug" if logging.getLogger("ktransformers").isEnabledFor(logging.DEBUG) else "error",
            self._made,
            bool(self._hosts),
            self._rooms[rank] if self._rooms else {},
        )
        try:
            peer.tell(framed(encode(start)))
        except EngineError:
            peer.close()
            raise
        return peer

    def _check_loaded(self, peer: Peer) -> None:
        """Wait until it has loaded. Raises what it failed with, CapacityError when it has other room."""
        assert self._settled is not None
        wanted, got = Loaded(self._settled.num_slots, self._settled.num_states), peer.hear()
        if got != wanted:
            raise CapacityError(f"{peer.name} holds a cache of {got}, and the first one of {wanted}")

    @override
    def meet(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        self._crew.wait()
        self._device = device
        is_uniform = self._division.is_uniform
        told = partial(Begin, sizes=pairs_of(sizes) if is_uniform else [], is_captured=is_captured and is_uniform)
        self._meet(device, self._crew.peers, lambda place: self._crew.tell(framed(encode(told(place)))))
        self._undo.callback(self._division.leave)
        return sizes, is_captured

    def _meet(self, device: torch.device, new: Sequence[Peer], tell: Callable[[str], None]) -> None:
        """new: peers that were not met before. tell: all of the place."""
        address = self._crew.address
        if address is None:
            folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="kt-ranks-")))
            place = str(folder / "meeting")
        else:
            self._store = meeting_store(address, self._division.size)
            place = f"tcp://{address}:{self._store.port}"
        for peer in new:
            peer.watch()
        tell(place)
        self._division.meet(place, device)

    @override
    def captured(self, sizes: Sizes) -> None:
        for peer in self._crew.peers:
            got = peer.hear()
            if self._division.is_uniform and got != Captured(pairs_of(sizes)):
                raise EngineError(f"{peer.name} has captured other steps ({got}) than the first one ({sizes})")
        self._crew.is_mendable = self._division.is_mendable

    @override
    @property
    def begins_ahead(self) -> bool:
        return not self._division.is_uniform

    @override
    def teller(self) -> StepTeller | None:
        return self._tell

    def _tell(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        keep: torch.Tensor,
        is_padded: bool,
    ) -> None:
        self._crew.tell(framed(encode(Step.of(token_ids, positions, context, keep, is_padded))))

    @override
    def mend(self) -> None:
        assert self._device is not None
        with self._crew.mended() as new:
            self._division.leave()

            def tell(place: str) -> None:
                for peer in self._crew.peers:
                    peer.tell(framed(encode(Begin(place, [], False) if peer in new else Regroup(place))))

            self._meet(self._device, new, tell)
            for peer in new:
                peer.hear()  # it has captured its graphs

    @override
    def close(self) -> None:
        self._crew.close()  # first: they may wait in a sum
        self._undo.close()
