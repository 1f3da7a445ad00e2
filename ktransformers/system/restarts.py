"""Starts processes until one is ready: again after a death as far as a RestartPolicy allows, after a delay where one
reports that it cannot start. Knows no processes: whoever uses it says what an attempt is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Protocol, TypeVar

from typing_extensions import override

from ktransformers.errors import EngineError, KTransformersError
from ktransformers.system.restart_policy import RESTART_SECONDS, RestartPolicy, delays

__all__ = ["Clock", "ProcessDiedError", "Restarts", "SystemClock"]

Started = TypeVar("Started")


class Clock(Protocol):
    """A clock of seconds from any beginning. Tests have one that stands still."""

    def now(self) -> float:
        """Return the seconds on this clock."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` by this clock."""
        ...


class SystemClock(Clock):
    """The system's monotonic clock."""

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ProcessDiedError(EngineError):
    """Error that a process ended before it was ready, and did not say why. code: its return code, where it is known."""

    def __init__(self, message: str, code: int = 0):
        super().__init__(message)
        self.code = code


class Restarts:
    """Numbers the processes of one kind, and counts their deaths. name, flag: for the error that there were too many.

    num_started: processes so far, and so the number of the next one.
    """

    def __init__(self, policy: RestartPolicy, clock: Clock, name: str, flag: str):
        self._policy, self._clock, self._name, self._flag = policy, clock, name, flag
        self.num_started = 0

    @property
    def num_restarts(self) -> int:
        """Number of processes after the first one."""
        return max(self.num_started - 1, 0)

    def count(self, process: Hashable) -> None:
        """Count the death of a process, by its number, which `excuse` may take back."""
        self._policy.count(process, self._clock.now())

    def excuse(self, processes: Iterable[Hashable]) -> None:
        """Stop counting the deaths of these, which do not speak against what they run."""
        self._policy.excuse(processes)

    def check(self) -> None:
        """Refuse another process when too many have died. Raises EngineError."""
        if self._policy.is_exceeded:
            often = f"{self._policy.num_deaths} times in {RESTART_SECONDS:.0f} s"
            raise EngineError(f"{self._name} died {often}; giving up ({self._flag})")

    async def until_ready(
        self,
        attempt: Callable[[int], Awaitable[Started]],
        failed: Callable[[KTransformersError, float], Awaitable[None]],
    ) -> Started:
        """Call `attempt` with the numbers of processes until it returns, and return what it does.

        failed: called with the error of an attempt and the seconds until the next one: 0 after a ProcessDiedError,
        which is counted by then.
        Raises what it raises, where there is to be no other attempt, and EngineError when too many have died.
        """
        for delay in delays():
            number, self.num_started = self.num_started, self.num_started + 1
            try:
                return await attempt(number)
            except ProcessDiedError as error:
                self.count(number)
                await failed(error, 0.0)
                self.check()
            except KTransformersError as error:
                await failed(error, delay)
                await self._clock.sleep(delay)
        raise AssertionError("delays end")
