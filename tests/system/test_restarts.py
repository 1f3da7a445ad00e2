"""Processes that are started again and again: after deaths, as often as they may die, and after growing delays."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import pytest
from typing_extensions import override

from ktransformers.errors import CapacityError, EngineError, KTransformersError
from ktransformers.system.process_group import ChildProcess, ProcessGroup, Program
from ktransformers.system.restart_policy import MAX_DEATHS, RESTART_SECONDS, RestartPolicy, ending
from ktransformers.system.restarts import Clock, ProcessDiedError, Restarts, SystemClock

DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
REFUSE = "import sys; sys.exit(3)"
READY = "import sys; print('ready', flush=True); sys.stdin.read()"


class FastClock(Clock):
    """Time passes when somebody waits for it."""

    def __init__(self) -> None:
        self.time, self.slept = 0.0, list[float]()

    @override
    def now(self) -> float:
        return self.time

    @override
    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class Engines:
    """Real processes, of which the n-th runs the n-th script, the last of them from then on."""

    def __init__(self, codes: Sequence[str], most: int = MAX_DEATHS):
        self.codes, self.clock, self.failures = codes, FastClock(), list[tuple[str, float]]()
        self.group = ProcessGroup()
        self.restarts = Restarts(RestartPolicy(most), self.clock, "the engine", "--max_engine_restarts")

    async def attempt(self, number: int) -> ChildProcess:
        code = self.codes[min(number, len(self.codes) - 1)]
        child = self.group.start(Program(f"engine {number}", [sys.executable, "-c", code], stdout=subprocess.PIPE))
        if await asyncio.to_thread(child.stdout.readline) == b"ready\n":
            return child
        how = await child.ended()
        if how == 3:
            raise CapacityError("it does not fit")
        raise ProcessDiedError(f"{child.name} ended with {ending(how)}", how)

    async def failed(self, error: KTransformersError, delay: float) -> None:
        self.failures.append((str(error), delay))

    def run(self) -> ChildProcess:
        async def work() -> ChildProcess:
            return await self.restarts.until_ready(self.attempt, self.failed)

        try:
            return asyncio.run(work())
        finally:
            self.group.close()


def test_one_that_dies_five_times_is_started_a_sixth_time() -> None:
    engines = Engines([DIE] * MAX_DEATHS + [READY])
    assert engines.run().name == f"engine {MAX_DEATHS}"
    assert engines.failures == [(f"engine {i} ended with signal 9", 0.0) for i in range(MAX_DEATHS)]
    assert engines.clock.slept == []
    assert (engines.restarts.num_started, engines.restarts.num_restarts) == (MAX_DEATHS + 1, MAX_DEATHS)


def test_one_death_more_is_the_end() -> None:
    engines = Engines([DIE])
    with pytest.raises(EngineError, match=r"^the engine died 6 times in 600 s; giving up \(--max_engine_restarts\)$"):
        engines.run()
    assert engines.restarts.num_started == MAX_DEATHS + 1
    never = Engines([DIE], most=0)
    with pytest.raises(EngineError, match="the engine died 1 times"):
        never.run()


def test_one_that_cannot_start_is_waited_for_ever_longer_and_its_ends_do_not_count() -> None:
    engines = Engines([REFUSE] * 8 + [READY], most=0)
    assert engines.run().name == "engine 8"
    assert engines.clock.slept == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert engines.failures == [("it does not fit", delay) for delay in engines.clock.slept]


def test_whoever_is_asked_may_end_it() -> None:
    engines = Engines([REFUSE])

    async def failed(error: KTransformersError, delay: float) -> None:
        raise error

    engines.failed = failed  # type: ignore[method-assign]
    with pytest.raises(CapacityError, match="it does not fit"):
        engines.run()
    assert engines.restarts.num_restarts == 0


def test_deaths_are_forgotten_in_time_and_can_be_excused() -> None:
    engines = Engines([], most=1)
    restarts, clock = engines.restarts, engines.clock
    restarts.count(0)
    clock.time = RESTART_SECONDS
    restarts.count(1)
    restarts.check()
    restarts.count(2)
    with pytest.raises(EngineError, match="the engine died 2 times in 600 s"):
        restarts.check()
    restarts.excuse([1])
    restarts.check()


def test_the_systems_clock_goes_on() -> None:
    clock = SystemClock()
    before = clock.now()
    asyncio.run(clock.sleep(0.0))
    assert clock.now() >= before
