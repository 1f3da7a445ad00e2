"""The processes of a model that is cut, as the builder sees them: one alone, one that follows, or driver.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.ranks.messages import Begin, Captured, Loaded, Start
from ktransformers.engine.parallel.ranks.parallel_strategy import ParallelStrategy, parallel_strategy
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.step.broadcast import StepBlocks, StepBroadcast
from ktransformers.engine.step.decode import MAX_GRAPH_ROWS
from ktransformers.engine.step.decode_inputs import StepSize
from ktransformers.errors import CapacityError
from ktransformers.system.shared_blocks import SharedBlocks

__all__ = ["Alone", "Ranks", "ResolvedPlan", "Sizes", "Worker", "numbers_of"]

Sizes = Sequence[StepSize]


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """The results of planning that every process must use alike. divided: keys of routed experts of which each process
    has a part."""

    config: EngineConfig
    page_size: int
    max_batch_size: int
    num_slots: int
    num_states: int
    divided: tuple[str, ...] = ()


class Ranks:
    """Hooks the builder calls, in order, at each synchronization point of a multi-process load. Where nothing is said,
    there are no other processes to wait for, or to send anything.
    """

    def shard(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        """Return this process's shard of the model and the hardware it runs on."""
        return opened, hardware

    def begin(self, resolved: ResolvedPlan) -> None:
        """Take the plan, once it is made; nothing is loaded yet."""

    def rendezvous(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        """Synchronize once the model is loaded; return the sizes of padded steps and whether they are captured, as the
        driver has them.

        From then on results are added up. Raises KTransformersError when one of the others has failed.
        """
        return sizes, is_captured

    def captured(self, sizes: Sizes) -> None:
        """Synchronize once graphs of these sizes are captured. Raises EngineError when others have other ones."""

    @property
    def begins_ahead(self) -> bool:
        """Whether other processes may begin steps while this one runs others."""
        return False

    def step_broadcast(self) -> StepBroadcast | None:
        """Return what sends each step to the other processes before it runs, if any of them needs it."""
        return None

    @property
    def step_blocks(self) -> StepBlocks | None:
        """The memory in which steps come to the other processes, or from the driver; None where all come as messages.
        It is there once all have met."""
        return None

    def recover(self) -> None:
        """Replace a process that has ended, and synchronize all of them again. Raises EngineError."""
        raise AssertionError("the driver of several processes does that")

    def close(self) -> None:
        """End the processes that were started."""


class Alone(Ranks):
    """The Ranks of a model that one process has whole."""


def numbers_of(sizes: Sizes) -> list[tuple[int, int, int]]:
    """Return the rows, sequences and kept logits of each size, as messages have them."""
    return [(size.rows, size.seqs, size.kept) for size in sizes]


class Worker(Ranks):
    """The Ranks of a process beside the driver. start: what it is to be. receive: gives the driver's next message;
    send: sends it one. Raises EngineError where the memory of steps cannot be opened."""

    def __init__(
        self,
        start: Start,
        receive: Callable[[], Begin],
        send: Callable[[Loaded | Captured], None],
    ):
        self._name, self._divided = start.name, frozenset(start.divided)
        self._strategy: ParallelStrategy = parallel_strategy(start.config, start.rank, start.is_apart, self._divided)
        self._receive, self._send = receive, send
        self._shared = SharedBlocks.open(start.blocks, start.rank - 1) if start.blocks else None
        self._blocks: StepBlocks | None = None
        self._resolved: ResolvedPlan | None = None
        self._device: torch.device | None = None

    @override
    def shard(self, opened: OpenedModel, hardware: Hardware) -> tuple[OpenedModel, Hardware]:
        return self._strategy.shard(opened, hardware)

    @override
    def begin(self, resolved: ResolvedPlan) -> None:
        whole = len(self._divided.difference(resolved.divided))
        if whole:
            raise CapacityError(
                f"{self._name} has no room for its part of the routed experts of {whole} layers, which the first one "
                "divides: their results would be added up twice"
            )
        self._resolved = resolved

    @override
    def rendezvous(self, sizes: Sizes, is_captured: bool, device: torch.device) -> tuple[Sizes, bool]:
        assert self._resolved is not None
        self._send(Loaded(self._resolved.num_slots, self._resolved.num_states))
        begin = self._receive()
        self._device = device
        self._blocks = None if self._shared is None else StepBlocks(self._shared, device)
        self._strategy.rendezvous(begin.place, device)
        if self._strategy.is_uniform:
            return [StepSize(*numbers) for numbers in begin.sizes], begin.is_captured
        if is_captured:
            self._strategy.will_replay(max([MAX_GRAPH_ROWS, *(size.rows for size in sizes)]))
        return sizes, is_captured

    def send_output(self) -> Callable[[int], None] | None:
        """Return what sends a step's results on, see ParallelStrategy.send_output."""
        return self._strategy.send_output()

    @override
    def captured(self, sizes: Sizes) -> None:
        self._send(Captured(numbers_of(sizes)))

    @override
    @property
    def step_blocks(self) -> StepBlocks | None:
        return self._blocks

    def rendezvous_again(self, place: str) -> None:
        """Meet the other processes anew, after the driver has replaced one that ended."""
        assert self._device is not None
        self._strategy.leave()
        self._strategy.rendezvous(place, self._device)

    @override
    def close(self) -> None:
        self._strategy.leave()
