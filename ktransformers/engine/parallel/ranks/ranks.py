"""The processes of a model that is cut, as the builder sees them: one alone, one that follows, or driver.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.ranks.messages import Begin, Captured, Loaded, Start
from ktransformers.engine.parallel.ranks.parallel_strategy import Division, division_of
from ktransformers.engine.plan.planning import Hardware
from ktransformers.engine.step.decode import MAX_GRAPH_ROWS
from ktransformers.engine.step.decode_inputs import StepSize
from ktransformers.engine.step.telling import StepTeller

__all__ = ["Alone", "Follower", "Ranks", "Settled", "Sizes", "pairs_of"]

Sizes = Sequence[StepSize]


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

    def mend(self) -> None:
        """Another process takes the place of one that has ended, and all meet again. Raises EngineError."""
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
    def mend(self) -> None:
        raise AssertionError("nobody was lost")

    @override
    def close(self) -> None:
        pass


def pairs_of(sizes: Sizes) -> list[tuple[int, int]]:
    """Rows and sequences, as messages have them."""
    return [(size.rows, size.seqs) for size in sizes]


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
        self._device: torch.device | None = None

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
        self._device = device
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
        self._say(Captured(pairs_of(sizes)))

    @override
    @property
    def begins_ahead(self) -> bool:
        return False

    @override
    def teller(self) -> StepTeller | None:
        return None

    def meet_again(self, place: str) -> None:
        """The leader has a new process in the place of one that ended."""
        assert self._device is not None
        self._division.leave()
        self._division.meet(place, self._device)

    @override
    def mend(self) -> None:
        raise AssertionError("the leader does that")

    @override
    def close(self) -> None:
        self._division.leave()
