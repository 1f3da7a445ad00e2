"""Policy for processes that die: whether another one is started, after how long, and which request is to blame.

The one place that says how many deaths are too many, for engines of balance_serve, workers of a model that is cut, and
replicas of a cluster. Pure: whoever decides passes times in.
"""

from __future__ import annotations

import signal
from collections.abc import Hashable, Iterable, Iterator

__all__ = ["MAX_DEATHS", "MAX_STRIKES", "RESTART_SECONDS", "RestartPolicy", "delays", "ending", "was_killed"]

RESTART_SECONDS = 600.0
"""The time in which deaths are counted."""

MAX_DEATHS = 5
"""Deaths within that time after which nothing is started any more."""

MAX_STRIKES = 3
"""Processes that die, one after the other, with a request's work in hand, until it is ended: it may be what kills."""

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0

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


def delays() -> Iterator[float]:
    """Yield the seconds to wait before each new try to start a process that reports that it cannot start."""
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _LONGEST_DELAY)


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
