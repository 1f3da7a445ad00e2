"""Starts the scheduler, and loads engines in child processes; keeps a spare one that has its imports done.

Knows how a process becomes an engine, not when one is needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from ktransformers.core import Progress
from ktransformers.errors import KTransformersError
from ktransformers.server.balance.load_watch import LoadWatch, read_so_far
from ktransformers.server.balance.messages import (
    EngineFacts,
    EngineFailed,
    EngineLoading,
    EngineOptions,
    EngineReady,
    EngineStatus,
    SchedulerOptions,
    decode,
    encode,
)
from ktransformers.system.child import framed, reported_error, spawn_code
from ktransformers.system.process_group import ChildProcess, ProcessGroup, Program
from ktransformers.system.restart_policy import ending
from ktransformers.system.restarts import Clock, ProcessDiedError

__all__ = ["EngineHung", "Launcher", "LoadLimit", "RunningEngine"]

logger = logging.getLogger("ktransformers.server")

_ENGINE = "ktransformers.server.balance.engine_process"
_SCHEDULER = "ktransformers.server.balance.scheduler_process"


class EngineHung(ProcessDiedError):
    """Error that the engine process was killed because its loading did not go on."""


@dataclass(frozen=True, slots=True)
class LoadLimit:
    """Limit on the time without progress while an engine loads. seconds: in which an engine that loads has to read or
    report something; 0: no limit. on_hang: called with what is wrong with one that does not, before it is killed.
    """

    seconds: float
    clock: Clock
    on_hang: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A loaded engine with its process and facts."""

    epoch: int
    process: ChildProcess
    facts: EngineFacts


class Launcher:
    """Starts balance_serve's processes in a group, which ends them. status: where engines report how far they are."""

    def __init__(self, group: ProcessGroup, status: zmq.asyncio.Socket, limit: LoadLimit):
        self._group, self._status, self._limit = group, status, limit
        self._reported: tuple[int, str] = (0, "its imports")  # reports of the engine that loads, and where it is
        self._spare: tuple[str, ChildProcess] | None = None  # what it has imported

    def _spawn(self, name: str, module: str, argument: str = "") -> ChildProcess:
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}  # see engine/model/threads.py
        return self._group.start(Program(name, spawn_code(module, argument), environment=environment))

    async def start_scheduler(self, options: SchedulerOptions) -> ChildProcess:
        """Start the scheduler process, which works from now on, and return it."""
        child = self._spawn("the scheduler process", _SCHEDULER)
        await _send(child, options)
        return child

    async def warm_up(self, factory: str) -> None:
        """Start a spare process, if there is none, in which an engine of this factory loads faster."""
        if self._spare is None:
            module = factory.partition(":")[0]
            self._spare = (module, self._spawn("the spare engine process", _ENGINE, repr(module)))

    async def _engine_process(self, factory: str) -> ChildProcess:
        spare, self._spare = self._spare, None
        if spare is not None:
            module, process = spare
            if process.returncode is None and module == factory.partition(":")[0]:
                return process
            logger.warning("the spare engine process ended with %s: starting another", ending(process.returncode or 0))
            await self._group.stop_async(process)
        return self._spawn("the engine process", _ENGINE)

    async def load(self, options: EngineOptions, progress: Progress | None) -> RunningEngine:
        """Load an engine with these options, and return it. Raises what it says when it cannot start, ProcessDiedError
        when it says nothing.
        """
        self._reported = (0, "its imports")
        process = await self._engine_process(options.factory)
        await _send(process, options)
        dying = asyncio.create_task(process.ended())
        listening = asyncio.create_task(self._facts(options.epoch, progress))
        watching = asyncio.create_task(self._kill_if_stuck(process))
        try:
            await asyncio.wait((dying, listening), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():  # it may have said why, just before
                await asyncio.wait((listening,), timeout=1.0)
            if not listening.done():
                hung = watching.result() if watching.done() else None
                if hung is not None:
                    raise EngineHung(hung)
                code = dying.result()
                raise ProcessDiedError(f"the engine process ended while loading, with {ending(code)}", code)
            return RunningEngine(options.epoch, process, listening.result())
        except KTransformersError:
            await self._group.stop_async(process)
            raise
        finally:
            for task in (listening, dying, watching):
                task.cancel()

    async def _kill_if_stuck(self, process: ChildProcess) -> str | None:
        """Kill an engine whose loading does not go on, and say what was wrong with it."""
        limit = self._limit
        if not limit.seconds:
            return None
        watch = LoadWatch(limit.seconds)
        while not watch.is_stuck((self._reported, read_so_far(process.pid))):
            await limit.clock.sleep(watch.pause)
        what = (
            f"the engine hung while loading: for {limit.seconds:g} s it read nothing and reported nothing after "
            f"{self._reported[1]} (--engine_timeout)"
        )
        limit.on_hang(what)
        process.kill()
        return what

    async def _facts(self, epoch: int, progress: Progress | None) -> EngineFacts:
        while True:
            status: EngineStatus = decode(await self._status.recv(), EngineStatus)
            if status.epoch != epoch:
                continue
            match status:
                case EngineLoading(_, done, total, name):
                    self._reported = (self._reported[0] + 1, name)
                    if progress is not None:
                        progress(done, total, name)
                case EngineFailed(_, error, message):
                    raise reported_error(error, message)
                case EngineReady(_, facts):
                    return facts

    @property
    def spare_pid(self) -> int | None:
        return None if self._spare is None else self._spare[1].pid


async def _send(child: ChildProcess, options: msgspec.Struct) -> None:
    """On a thread: one that still imports does not read yet. The pipe stays open: its end shows that we are gone."""
    with suppress(BrokenPipeError):  # it has ended: whoever waits for that notices
        await asyncio.to_thread(child.send, framed(encode(options)))
