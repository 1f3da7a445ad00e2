"""The processes of a model that is cut, as the builder sees them: one alone, the leader, or one that follows it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed
from typing_extensions import override

from ktransformers.child import framed
from ktransformers.config import EngineConfig, parse_hosts
from ktransformers.engine.decode import MAX_GRAPH_ROWS
from ktransformers.engine.decode_inputs import StepSize
from ktransformers.engine.opened import OpenedModel
from ktransformers.engine.planning import Hardware
from ktransformers.engine.ranks.agent import read_secret
from ktransformers.engine.ranks.division import Division, division_of, num_processes
from ktransformers.engine.ranks.messages import (
    Begin,
    Captured,
    Loaded,
    Made,
    Start,
    Step,
    encode,
)
from ktransformers.engine.ranks.peers import Child, Peer, RemotePeer
from ktransformers.errors import CapacityError, ConfigError, EngineError
from ktransformers.operators.context import ForwardContext
from ktransformers.weights.synthetic import SyntheticSource

__all__ = ["DETECT", "Alone", "Follower", "Leader", "Ranks", "Settled", "StepTeller", "made_of"]

logger = logging.getLogger(__name__)

DETECT = "ktransformers.engine.planning:Hardware.detect"
"""How a process beside the leader finds what it runs on; tests make GPUs up."""

Sizes = Sequence[StepSize]
StepTeller = Callable[[torch.Tensor, torch.Tensor, ForwardContext, torch.Tensor, bool], None]
"""Called with token_ids, positions, context and keep as ModelRunner.reduced_step has them, and whether it is padded."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What a plan came to, and every process has to have alike."""

    config: EngineConfig
    page_size: int
    max_batch_size: int
    num_slots: int
    num_states: int


class Ranks(Protocol):
    """What loading does at the moments at which processes meet. The builder calls these in their order."""

    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        """What of the model this process has, and what it runs on."""
        ...

    def begin(self, settled: Settled) -> None:
        """The plan is made; nothing is loaded yet."""
        ...

    def meet(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        """The model is loaded: the sizes of padded steps and whether they are captured, as the leader has them.

        From then on results are added up. Raises KTransformersError when one of the others has failed.
        """
        ...

    def captured(self, sizes: Sizes) -> None:
        """Graphs of these sizes are there. Raises EngineError when others have other ones."""
        ...

    @property
    def begins_ahead(self) -> bool:
        """Whether the others may be told of steps while others run here."""
        ...

    def teller(self) -> StepTeller | None:
        """What each step is told to before it runs, if anybody is to hear of it."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class Alone(Ranks):
    """One process for all."""

    @override
    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        return opened, hardware

    @override
    def begin(self, settled: Settled) -> None:
        pass

    @override
    def meet(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        return sizes, is_captured

    @override
    def captured(self, sizes: Sizes) -> None:
        pass

    @override
    @property
    def begins_ahead(self) -> bool:
        return False

    @override
    def teller(self) -> StepTeller | None:
        return None

    @override
    def close(self) -> None:
        pass


def _pairs(sizes: Sizes) -> list[tuple[int, int]]:
    return [(size.rows, size.seqs) for size in sizes]


def _die(message: str) -> None:
    """Without one of them the others wait for ever, in kernels that nothing can interrupt."""
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    if len(names) < size:
        raise ConfigError(f"--tensor_parallel {size}: there are {len(names)} GPUs")
    return names[:size]


class Leader(Ranks):
    """The process that samples and is told what to compute. config: how the model is divided. made: of a model without
    files."""

    def __init__(
        self,
        config: EngineConfig,
        made: Made | None = None,
        hardware: str = DETECT,
        on_death: Callable[[str], None] = _die,
    ):
        self._division: Division = division_of(config, 0, bool(config.stage_hosts))
        self._made, self._hardware, self._on_death = made, hardware, on_death
        self._gpus = _gpus(config)
        self._hosts = parse_hosts(config.stage_hosts) if config.stage_hosts else []
        self._secret = b"" if config.stage_key_file is None else read_secret(config.stage_key_file)
        self._store: Any = None  # where processes of other machines meet, as long as it is kept
        self._settled: Settled | None = None
        self._children: list[Peer] = []
        self._undo = ExitStack()

    @override
    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        return self._division.part(opened, hardware)

    @override
    def begin(self, settled: Settled) -> None:
        self._settled = settled
        division = self._division
        logger.info("the model is divided over %d processes, one for each %s", division.size, division.noun)
        config = division.config_of_others(settled.config)
        for rank in range(1, division.size):
            child = self._begun(rank)
            self._undo.callback(child.close)
            self._children.append(child)
            start = Start(
                rank,
                child.name,
                config,
                settled.page_size,
                settled.max_batch_size,
                settled.num_states,
                self._hardware,
                "debug" if logging.getLogger("ktransformers").isEnabledFor(logging.DEBUG) else "error",
                self._made,
                bool(self._hosts),
            )
            child.tell(framed(encode(start)))

    def _begun(self, rank: int) -> Peer:
        name = f"{self._division.noun} {rank}"
        if not self._hosts:
            return Child(name, rank, self._gpus[rank], self._on_death)
        return RemotePeer(name, *self._hosts[rank - 1], self._secret, self._on_death)

    @override
    def meet(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        assert self._settled is not None
        wanted = Loaded(self._settled.num_slots, self._settled.num_states)
        for child in self._children:
            got = child.hear()
            if got != wanted:
                raise CapacityError(f"{child.name} holds a cache of {got}, and the first one of {wanted}")
        where = self._meeting_place()
        is_uniform = self._division.is_uniform
        told = Begin(where, _pairs(sizes) if is_uniform else [], is_captured and is_uniform)
        begin = framed(encode(told))
        for child in self._children:
            child.watch()
            child.tell(begin)
        self._division.meet(where, device)
        self._undo.callback(self._division.leave)
        return sizes, is_captured

    def _meeting_place(self) -> str:
        """A file that nobody else has, or for other machines tcp://HOST:PORT."""
        address = next((child.address for child in self._children if child.address is not None), None)
        if address is None:
            folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="kt-ranks-")))
            return str(folder / "meeting")
        made: Any = distributed
        self._store = made.TCPStore(address, 0, self._division.size, True, wait_for_workers=False)
        return f"tcp://{address}:{self._store.port}"

    @override
    def captured(self, sizes: Sizes) -> None:
        for child in self._children:
            got = child.hear()
            if self._division.is_uniform and got != Captured(_pairs(sizes)):
                raise EngineError(f"{child.name} has captured other steps ({got}) than the first one ({sizes})")

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
        data = framed(encode(Step.of(token_ids, positions, context, keep, is_padded)))
        for child in self._children:
            child.tell(data)

    @override
    def close(self) -> None:
        for child in self._children:  # first: they may wait in a sum
            child.close()
        self._undo.close()


class Follower(Ranks):
    """A process beside the leader. start: what it is to be. hear: its next message; say: to it."""

    def __init__(
        self,
        start: Start,
        hear: Callable[[], Begin],
        say: Callable[[Loaded | Captured], None],
    ):
        self._division: Division = division_of(start.config, start.rank, start.is_apart)
        self._hear, self._say = hear, say
        self._settled: Settled | None = None

    @override
    def part(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        return self._division.part(opened, hardware)

    @override
    def begin(self, settled: Settled) -> None:
        self._settled = settled

    @override
    def meet(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        assert self._settled is not None
        self._say(Loaded(self._settled.num_slots, self._settled.num_states))
        begin = self._hear()
        self._division.meet(begin.place, device)
        if self._division.is_uniform:
            return [StepSize(rows, seqs) for rows, seqs in begin.sizes], begin.is_captured
        if is_captured:
            self._division.will_replay(max([MAX_GRAPH_ROWS, *(size.rows for size in sizes)]))
        return sizes, is_captured

    def hand_over(self) -> Callable[[int], None] | None:
        """See Division."""
        return self._division.hand_over()

    @override
    def captured(self, sizes: Sizes) -> None:
        self._say(Captured(_pairs(sizes)))

    @override
    @property
    def begins_ahead(self) -> bool:
        return False

    @override
    def teller(self) -> StepTeller | None:
        return None

    @override
    def close(self) -> None:
        self._division.leave()
