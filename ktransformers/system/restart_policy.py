"""Policy for processes that die: whether another one is started, after how long, and which request is to blame.

The one place that says how many deaths are too many, for engines of balance_serve, workers of a model that is cut,
models of a pool and replicas of a cluster. Pure: whoever decides passes times in.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Hashable, Iterable, Iterator

__all__ = [
    "FIRST_DELAY",
    "LONGEST_DELAY",
    "MAX_DEATHS",
    "MAX_STRIKES",
    "RESTART_SECONDS",
    "RestartPolicy",
    "Strikes",
    "delay_after",
    "delays",
    "ending",
    "was_killed",
]

RESTART_SECONDS = 600.0
"""The time in which deaths are counted."""

MAX_DEATHS = 5
"""Deaths within that time after which nothing is started any more."""

MAX_STRIKES = 3
"""Processes that die, one after the other, with a request's work in hand, until it is ended: it may be what kills."""

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds before another try after a start that failed; they double each time."""

_OWN_FAULTS = frozenset(
    {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)


class RestartPolicy:
    """Counts the deaths of the last RESTART_SECONDS that nothing explains. most: how many are not yet too many."""

    def __init__(self, most: int = MAX_DEATHS):
        self.most = most
        self._died_at: dict[Hashable, float] = {}

    def count(self, process: Hashable, now: float) -> None:
        """Count the death of a process, by any name that no other one had."""
        recent = {name: at for name, at in self._died_at.items() if now - at < RESTART_SECONDS}
        self._died_at = recent | {process: now}

    def excuse(self, processes: Iterable[Hashable]) -> None:
        """Stop counting the deaths of these, which do not speak against what they run."""
        for process in processes:
            self._died_at.pop(process, None)

    @property
    def num_deaths(self) -> int:
        """Number of deaths at the time of the last `count`."""
        return len(self._died_at)

    @property
    def is_exceeded(self) -> bool:
        """Whether too many have died for another one to be started."""
        return self.num_deaths > self.most


class Strikes:
    """Counts the processes that a request was given to and that were lost. most: losses after which it is ended, even
    where each process got on with it.

    num_losses: all of them. num_in_a_row: the last ones, of which none got on with the request.
    """

    def __init__(self, most: int):
        self.most = most
        self.num_losses = self.num_in_a_row = 0

    def count(self, *, has_moved: bool) -> None:
        """Count a process that was lost. has_moved: whether it got on with the request before."""
        self.num_losses += 1
        self.num_in_a_row = 1 if has_moved else self.num_in_a_row + 1

    @property
    def is_exceeded(self) -> bool:
        """Whether the request is ended: it may be what kills."""
        return self.num_in_a_row >= MAX_STRIKES or self.num_losses >= self.most


def delay_after(num_failures: int) -> float:
    """Return the seconds to wait before the next try, after so many (at least 1) in a row that did not start."""
    return min(FIRST_DELAY * 2.0 ** min(num_failures - 1, 16), LONGEST_DELAY)


def delays() -> Iterator[float]:
    """Yield the seconds to wait before each new try to start a process that reports that it cannot start."""
    return map(delay_after, itertools.count(1))


def was_killed(code: int) -> bool:
    """Whether a process with this return code was ended from outside: by the system for want of memory, by a person."""
    return code < 0 and -code not in _OWN_FAULTS


def ending(code: int) -> str:
    """Return in words how a process ended, by its return code."""
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGBUS:
        return f"signal {-code} (SIGBUS: a model file was cut short while it was mapped, or its disk failed)"
    return f"signal {-code}"
