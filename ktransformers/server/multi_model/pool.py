"""Decides which of several models run: pure decisions about memory and turns. Starts nothing, waits for nothing.

    stopped ── LOAD ──> loading ── loaded ──> running ── STOP ──> stopping ── stopped ──> stopped
                           └── failed ──> stopped       └── lost ──> stopping

A request whose model does not run stands in a line, once for each model, in the order in which models were first asked
for. Only the first of the line gets memory: what is idle is stopped for it, least recently used first; where that is
not enough, models that are in use are held: they take no more requests, which go to the end of the line, and are
stopped when they are idle. So whoever waits gets a turn, and nobody's answer is cut off. At every moment the bytes of
the models that load, run or stop are within the memory, on every device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ktransformers.core import format_bytes
from ktransformers.errors import CapacityError, KTransformersError
from ktransformers.system.restart_policy import delay_after

__all__ = ["ModelPool", "ModelState", "PoolAction", "PoolActionKind", "PooledModel"]

Clock = Callable[[], float]


class ModelState(StrEnum):
    """State of a model in the pool, see the module's docstring."""

    STOPPED = "stopped"
    LOADING = "loading"
    RUNNING = "running"
    STOPPING = "stopping"


class PoolActionKind(StrEnum):
    """Kind of an action that the pool decides. LOAD, STOP: say `loaded`, `failed` or `stopped` when it is done. ADMIT:
    those that waited for it are users.
    """

    LOAD = "load"
    STOP = "stop"
    ADMIT = "admit"


@dataclass(frozen=True, slots=True)
class PoolAction:
    """An action to be done with a model."""

    kind: PoolActionKind
    name: str


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model in the pool. nbytes: {device: bytes} that it takes while it runs, as planned. is_kept: once it runs it is
    never stopped.
    """

    name: str
    nbytes: Mapping[str, int]
    is_kept: bool = False


@dataclass(slots=True)
class _Entry:
    """A model at this moment. num_users: requests that it must not be stopped under. is_wished: without a request.

    used_at: a number that grows with every request of the pool. idle_since, retry_at: seconds. patience: that it may
    be idle; None: the pool's.
    """

    model: PooledModel
    state: ModelState = ModelState.STOPPED
    num_users: int = 0
    num_waiting: int = 0
    is_wished: bool = False
    used_at: int = 0
    idle_since: float = 0.0
    patience: float | None = None
    error: KTransformersError | None = None
    num_failures: int = 0
    retry_at: float = 0.0

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def has_memory(self) -> bool:
        return self.state is not ModelState.STOPPED


@dataclass(slots=True)
class Totals:
    """Counts of a model's loads, failures and stops since the start."""

    num_loads: int = 0
    num_failures: int = 0
    num_stops: int = 0


class ModelPool:
    """Decides which models run within the memory. memory: {device: bytes} for all models together. idle_seconds: after
    which one that nobody asks for is stopped; infinite: never. clock: seconds.

    Raises CapacityError for a model that cannot run alone, or beside those that are kept.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        memory: Mapping[str, int],
        idle_seconds: float,
        clock: Clock = time.monotonic,
    ):
        self.memory, self._idle_seconds, self._clock = memory, idle_seconds, clock
        self._entries = {model.name: _Entry(model) for model in models}
        self._line: list[_Entry] = []
        self._held: list[_Entry] = []
        self._num_asked = 0
        self.totals: dict[str, Totals] = {model.name: Totals() for model in models}
        self._check()

    def _check(self) -> None:
        kept = [entry for entry in self._entries.values() if entry.model.is_kept]
        for entry in self._entries.values():
            beside = [one for one in kept if one is not entry]
            for device, nbytes in entry.model.nbytes.items():
                most, taken = self.memory.get(device, 0), _sum(beside, device)
                if nbytes + taken > most:
                    others = f", and those that are kept {format_bytes(taken)}" if taken else ""
                    raise CapacityError(
                        f"the model {entry.name} takes {format_bytes(nbytes)} of {device}{others}, and there are "
                        f"{format_bytes(most)} for all models"
                    )

    # What happens.

    def ask(self, name: str) -> bool:
        """Ask for a model for a request that has come. True: it is a user now, and must `leave` once. False: it waits,
        until an ADMIT or what `loaded` and `failed` say; or it must `withdraw` once.
        """
        entry = self._entries[name]
        if entry.state is ModelState.RUNNING and entry not in self._held:
            self._use(entry, 1)
            return True
        entry.num_waiting += 1
        self._stand_in_line(entry)
        return False

    def wish(self, name: str) -> None:
        """Ask to load a model though no request asks for it."""
        entry = self._entries[name]
        if not entry.has_memory:
            entry.is_wished = True
            self._stand_in_line(entry)

    def withdraw(self, name: str) -> None:
        """Count out a request that waited for a model. A model that loads for it alone goes on loading: who left may
        come again.
        """
        entry = self._entries[name]
        entry.num_waiting -= 1
        if not entry.num_waiting and not entry.is_wished and entry in self._line:
            self._line.remove(entry)

    def use(self, name: str) -> None:
        """Count one more user of a model that has one."""
        self._use(self._entries[name], 1)

    def leave(self, name: str) -> None:
        """Count out a user of the model."""
        entry = self._entries[name]
        entry.num_users -= 1
        entry.idle_since = self._clock()

    def keep_for(self, name: str, seconds: float) -> None:
        """Let the model be idle for `seconds`, from now on until it is stopped."""
        self._entries[name].patience = seconds

    def loaded(self, name: str) -> None:
        """Note that a model runs. Requests that waited are its users."""
        entry = self._entries[name]
        entry.state, entry.error, entry.num_failures = ModelState.RUNNING, None, 0
        entry.idle_since = self._clock()
        self.totals[name].num_loads += 1
        self._admit(entry)

    def failed(self, name: str, error: KTransformersError) -> None:
        """Note that a model could not be loaded. Nobody waits for it any more."""
        entry = self._entries[name]
        entry.num_waiting = 0
        self._note_failure(entry, error)
        self._free(entry)

    def lost(self, name: str, error: KTransformersError) -> None:
        """Note that a model has ended by itself. It has its memory until `stopped`."""
        entry = self._entries[name]
        entry.state = ModelState.STOPPING
        self._note_failure(entry, error)

    def stopped(self, name: str) -> None:
        """Note that a model has stopped and its memory is free."""
        self._free(self._entries[name])
        self.totals[name].num_stops += 1

    def _free(self, entry: _Entry) -> None:
        entry.state, entry.patience = ModelState.STOPPED, None

    def _note_failure(self, entry: _Entry, error: KTransformersError) -> None:
        entry.num_failures += 1
        entry.error, entry.retry_at = error, self._clock() + delay_after(entry.num_failures)
        self.totals[entry.name].num_failures += 1

    def _use(self, entry: _Entry, num_users: int) -> None:
        self._num_asked += 1
        entry.used_at = self._num_asked
        entry.num_users += num_users

    def _admit(self, entry: _Entry) -> None:
        if entry.num_waiting or entry.is_wished:
            self._use(entry, entry.num_waiting)
        entry.num_waiting, entry.is_wished = 0, False

    def _stand_in_line(self, entry: _Entry) -> None:
        if entry.state is not ModelState.LOADING and entry not in self._line:
            self._line.append(entry)

    # What is to be done.

    def decide(self) -> list[PoolAction]:
        """Return the actions to be done now; they count as begun. To be asked after everything that happens, and at
        `wake_at`.
        """
        now = self._clock()
        actions = [self._stop(entry) for entry in self._entries.values() if self._is_over(entry, now)]
        while self._line and self._line[0].state is ModelState.RUNNING:  # held for others, who have left
            actions.append(self._let_in(self._line[0]))
        self._held = self._in_the_way()
        free = [one for one in self._line if one.state is ModelState.RUNNING and one not in self._held]
        actions += [self._let_in(entry) for entry in free]
        actions += [self._stop(entry) for entry in self._held if not entry.num_users]
        self._held = [entry for entry in self._held if entry.state is ModelState.RUNNING]
        if self._may_load() and self._fits(self._line[0], ()):
            entry = self._line.pop(0)
            entry.state = ModelState.LOADING
            actions.append(PoolAction(PoolActionKind.LOAD, entry.name))
        return actions

    def wake_at(self) -> float | None:
        """Return when `decide` has something to do though nothing happens, by the clock; None: never."""
        waits = [self._idle_end(entry) for entry in self._entries.values() if self._can_be_idle(entry)]
        end = min(waits, default=float("inf"))
        return None if end == float("inf") else end

    def _let_in(self, entry: _Entry) -> PoolAction:
        self._line.remove(entry)
        self._admit(entry)
        return PoolAction(PoolActionKind.ADMIT, entry.name)

    def _stop(self, entry: _Entry) -> PoolAction:
        entry.state = ModelState.STOPPING
        return PoolAction(PoolActionKind.STOP, entry.name)

    def _can_be_idle(self, entry: _Entry) -> bool:
        is_idle = entry.state is ModelState.RUNNING and not entry.num_users and not entry.num_waiting
        return is_idle and not entry.model.is_kept

    def _idle_end(self, entry: _Entry) -> float:
        return entry.idle_since + (self._idle_seconds if entry.patience is None else entry.patience)

    def _is_over(self, entry: _Entry, now: float) -> bool:
        return self._can_be_idle(entry) and now >= self._idle_end(entry)

    def _may_load(self) -> bool:
        """Loads are one at a time, and in order."""
        is_loading = any(entry.state is ModelState.LOADING for entry in self._entries.values())
        return bool(self._line) and self._line[0].state is ModelState.STOPPED and not is_loading

    def _in_the_way(self) -> list[_Entry]:
        """The running models that have to go for the first in line: as few, and as long unused, as may be."""
        if not self._line or self._line[0].has_memory:
            return []
        wanted = self._line[0]
        running = [entry for entry in self._entries.values() if entry.state is ModelState.RUNNING]
        candidates = sorted(
            (entry for entry in running if not entry.model.is_kept),
            key=lambda entry: (entry.num_users > 0, entry.used_at),
        )
        going = [entry for entry in self._entries.values() if entry.state is ModelState.STOPPING]
        chosen: list[_Entry] = []
        for entry in candidates:
            if self._fits(wanted, going + chosen):
                break
            chosen.append(entry)
        if not self._fits(wanted, going + chosen):
            return []  # it has to wait for what is being loaded
        for entry in reversed(chosen):  # what turned out not to be needed, the most recently used first
            rest = [one for one in chosen if one is not entry]
            if self._fits(wanted, going + rest):
                chosen = rest
        return chosen

    def _fits(self, wanted: _Entry, without: Collection[_Entry]) -> bool:
        """Whether there is room for it, when these are gone."""
        there = [entry for entry in self._entries.values() if entry.has_memory and entry not in without]
        nbytes = wanted.model.nbytes
        return all(size + _sum(there, device) <= self.memory.get(device, 0) for device, size in nbytes.items())

    # What is known.

    def now(self) -> float:
        """Return the seconds on the pool's clock."""
        return self._clock()

    def refusal(self, name: str) -> tuple[KTransformersError, float] | None:
        """Return why the model cannot be asked for now, and for how many seconds: it failed a moment ago."""
        entry = self._entries[name]
        wait = entry.retry_at - self._clock()
        if entry.has_memory or entry.error is None or wait <= 0:
            return None
        return entry.error, wait

    def state(self, name: str) -> ModelState:
        """Return the state of one model."""
        return self._entries[name].state

    def num_waiting(self, name: str) -> int:
        """Return the number of requests that wait for the model."""
        return self._entries[name].num_waiting

    def num_users(self, name: str) -> int:
        """Return the number of requests under which the model must not be stopped."""
        return self._entries[name].num_users

    def nbytes(self, name: str) -> Mapping[str, int]:
        """Return the bytes that the model takes while it runs, by device."""
        return self._entries[name].model.nbytes

    def idle_end(self, name: str) -> float | None:
        """Return when the model will be stopped if nobody asks for it from now on, by the clock; None: never."""
        entry = self._entries[name]
        if entry.model.is_kept:
            return None
        since = entry.idle_since if self._can_be_idle(entry) else self._clock()
        end = since + (self._idle_end(entry) - entry.idle_since)
        return None if end == float("inf") else end

    def used(self) -> dict[str, int]:
        """Return the bytes of all models that load, run or stop, by device."""
        there = [entry for entry in self._entries.values() if entry.has_memory]
        return {device: _sum(there, device) for device in self.memory}

    def check_integrity(self) -> None:
        """Assert what has to be true at every moment, for tests."""
        assert all(self.used()[device] <= self.memory[device] for device in self.memory)
        assert sum(entry.state is ModelState.LOADING for entry in self._entries.values()) <= 1
        assert all(entry.num_users >= 0 and entry.num_waiting >= 0 for entry in self._entries.values())
        assert len({entry.name for entry in self._line}) == len(self._line)
        for entry in (one for one in self._entries.values() if one.num_waiting):
            assert entry in self._line or entry.state is ModelState.LOADING


def _sum(entries: Collection[_Entry], device: str) -> int:
    return sum(entry.model.nbytes.get(device, 0) for entry in entries)
