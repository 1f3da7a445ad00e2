"""Keeps a scheduler and an engine running, replaces engines that die or hang, and leaves nothing behind.

    start ── engine of epoch 0 loads ── scheduler starts ── serving ── stop
                                           ^                   │
                                           └── engine of epoch n + 1 <── engine of epoch n died

One task owns the engine: it announces one, waits for its end, and finds the next. Knows processes and sockets, not
requests. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ktransformers.config import EngineConfig
from ktransformers.core import Progress
from ktransformers.errors import ConfigError, EngineError, KTransformersError, WeightError
from ktransformers.scheduler.commands import News
from ktransformers.scheduler.config import MAX_GAP_MS, MAX_ITL_RATIO, check_itl_ratio, check_max_gap
from ktransformers.server.balance.launcher import EngineHung, Launcher, LoadLimit, RunningEngine
from ktransformers.server.balance.messages import (
    Command,
    EngineDown,
    EngineFacts,
    EngineOptions,
    EngineUp,
    SchedulerOptions,
    encode,
)
from ktransformers.server.balance.model_files import ModelFiles
from ktransformers.server.balance.restarts import pinned, shortfall
from ktransformers.system.process_group import ChildProcess, ProcessGroup
from ktransformers.system.restart_policy import RestartPolicy, ending, was_killed
from ktransformers.system.restarts import Clock, ProcessDiedError, Restarts, SystemClock

__all__ = ["BalanceConfig", "Supervisor"]

logger = logging.getLogger("ktransformers.server")

FILE_CHECK_SECONDS = 5.0
"""Between two looks at the files of weights."""

SPARE_BYTES = 300 << 20
"""Of host memory, what a process with an engine's imports holds for itself, beside code that it shares with others."""


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """Options with which balance_serve is started. engine.cache_lens counts the tokens of all requests together.

    max_itl_ratio, max_gap_ms: see SchedulerConfig.
    max_engine_restarts: engines that may die within RESTART_SECONDS; one more ends the service.
    engine_timeout: seconds after which a step of few tokens means that the engine hangs, see StepWatch, and of loading
    in which nothing is read or reported; 0: never.
    has_spare_engine: whether a process waits with its imports done, which a restart takes.
    has_traces: whether the times of GenerationRequest.timeline are sent.
    Raises ConfigError on creation for limits that cannot work.
    """

    engine: EngineConfig
    page_size: int = 64
    max_batch_size: int = 16
    max_itl_ratio: float = MAX_ITL_RATIO
    max_gap_ms: float = MAX_GAP_MS
    log_level: str = "info"
    max_engine_restarts: int = 5
    engine_timeout: float = 300.0
    has_spare_engine: bool = True
    factory: str = "ktransformers.server.balance.model_engine:load_engine"
    checks_integrity: bool = False
    has_traces: bool = False

    def __post_init__(self) -> None:
        for flag in ("page_size", "max_batch_size"):
            if not 1 <= getattr(self, flag) <= 1 << 16:
                raise ConfigError(f"--{flag} must be between 1 and {1 << 16}, got {getattr(self, flag)}")
        check_itl_ratio(self.max_itl_ratio)
        check_max_gap(self.max_gap_ms)
        if not 0 <= self.max_engine_restarts < 1 << 31:
            raise ConfigError(
                f"--max_engine_restarts must be at least 0 (and below 2^31), got {self.max_engine_restarts}"
            )
        if not 0 <= self.engine_timeout < float("inf"):
            raise ConfigError(f"--engine_timeout must be a number of seconds, or 0, got {self.engine_timeout}")


class Supervisor:
    """Keeps a scheduler and an engine running. on_news is called with what the scheduler sends, on the event loop.
    files: of weights, as they were opened.

    pause: why nothing is computed at the moment, None while an engine serves.
    """

    def __init__(
        self,
        config: BalanceConfig,
        on_news: Callable[[News], None],
        files: Sequence[Path] = (),
        clock: Clock | None = None,
    ):
        self._config, self._on_news, self._clock = config, on_news, clock or SystemClock()
        self._files = ModelFiles(files)
        self._processes = ProcessGroup()
        self._folder = self._processes.folder
        self._context = zmq.asyncio.Context()
        self._commands = self._bound(zmq.PUSH, "commands")
        self._news = self._bound(zmq.PULL, "news")
        limit = LoadLimit(config.engine_timeout, self._clock, self._say_hung)
        self._launcher = Launcher(self._processes, self._bound(zmq.PULL, "status"), limit)
        self._tasks: set[asyncio.Task[None]] = set()
        policy = RestartPolicy(config.max_engine_restarts)
        self._restarts = Restarts(policy, self._clock, "the engine", "--max_engine_restarts")
        self._engine: RunningEngine | None = None
        self._acknowledged: dict[
            int, asyncio.Future[None]
        ] = {}  # by epoch: the scheduler knows that this engine is gone
        self._is_closing = False
        self.scheduler_pid: int | None = None
        self.pause: str | None = "the model is not loaded yet"
        self.failed: asyncio.Future[KTransformersError] = asyncio.get_running_loop().create_future()

    @property
    def num_restarts(self) -> int:
        """Number of engine processes that were started in the place of another one."""
        return self._restarts.num_restarts

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine that serves, or served last."""
        return None if self._engine is None else self._engine.process.pid

    @property
    def spare_pid(self) -> int | None:
        """Process id of the spare engine, which will be the next one."""
        return self._launcher.spare_pid

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder.path / name}"

    def _bound(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)  # commands are few and small; none may be dropped, and none may block
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self._endpoint(name))
        return socket

    # Starting.

    async def start(self, progress: Progress | None) -> EngineFacts:
        """Load the engine, then start the scheduler. Raises what the engine says when it cannot start."""
        self._spawn(self._watch_files())
        engine = await self._first(progress)
        await self._start_scheduler(engine.facts)
        self._spawn(self._receive_news())
        await self._announce(engine)
        self._spawn(self._keep_engine(engine))
        self._spawn(self._read_files())
        return engine.facts

    async def _first(self, progress: Progress | None) -> RunningEngine:
        """One that hangs while it loads, or is killed, may be luck; one that dies by itself will die again.

        Raises EngineError when it happens too often.
        """

        async def failed(error: KTransformersError, delay: float) -> None:
            is_luck = isinstance(error, EngineHung) or (isinstance(error, ProcessDiedError) and was_killed(error.code))
            if not is_luck:
                raise error
            self._restarts.check()
            logger.warning("%s: trying again", error)

        return await self._restarts.until_ready(lambda epoch: self._load(epoch, self._config.engine, progress), failed)

    def _say_hung(self, what: str) -> None:
        self.pause = f"{what}; another one is started"
        logger.error("%s; it is killed", what)

    async def _load(self, epoch: int, config: EngineConfig, progress: Progress | None) -> RunningEngine:
        ours = self._config
        options = EngineOptions(
            epoch=epoch,
            parent_pid=os.getpid(),
            steps=self._endpoint(f"steps-{epoch}"),
            results=self._endpoint(f"results-{epoch}"),
            status=self._endpoint("status"),
            log_level=ours.log_level,
            config=config,
            page_size=ours.page_size,
            max_batch_size=ours.max_batch_size,
            factory=ours.factory,
            spare_bytes=SPARE_BYTES if ours.has_spare_engine else 0,
        )
        return await self._launcher.load(options, progress)

    async def _start_scheduler(self, facts: EngineFacts) -> None:
        config = self._config
        options = SchedulerOptions(
            config=replace(facts.scheduler, max_itl_ratio=config.max_itl_ratio, max_gap_ms=config.max_gap_ms),
            parent_pid=os.getpid(),
            commands=self._endpoint("commands"),
            news=self._endpoint("news"),
            log_level=config.log_level,
            step_seconds=config.engine_timeout,
            checks_integrity=config.checks_integrity,
            has_traces=config.has_traces,
        )
        scheduler = await self._launcher.start_scheduler(options)
        self.scheduler_pid = scheduler.pid
        self._spawn(self._watch_scheduler(scheduler))

    async def _announce(self, engine: RunningEngine) -> None:
        """From here on the engine gets steps. One that has died since it loaded is no exception: its end comes next."""
        self._engine, epoch = engine, engine.epoch
        await self.send(EngineUp(epoch, self._endpoint(f"steps-{epoch}"), self._endpoint(f"results-{epoch}")))
        self.pause = None
        if self._config.has_spare_engine:
            self._spawn(self._launcher.warm_up(self._config.factory))

    # Serving.

    async def send(self, command: Command) -> None:
        """Send a command to the scheduler."""
        await self._commands.send(encode(command))

    def send_soon(self, command: Command) -> None:
        """Send a command to the scheduler, from a place that cannot wait."""
        self._spawn(self.send(command))

    async def _receive_news(self) -> None:
        decoder = msgspec.msgpack.Decoder(News)
        while True:
            news = decoder.decode(await self._news.recv())
            for loss in news.losses:
                self._restarts.excuse(loss.explained)
                if loss.epoch in self._acknowledged:
                    self._acknowledged[loss.epoch].set_result(None)
            if news.hanging is not None:
                self._kill_hanging(news.hanging)
            self._on_news(news)

    def _kill_hanging(self, epoch: int) -> None:
        engine = self._engine
        if engine is not None and engine.epoch == epoch and engine.process.returncode is None:
            self.pause = "the engine hangs; another one is started"
            logger.error("the engine has not finished a step in time (--engine_timeout): it hangs, and is killed")
            engine.process.kill()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A background task that fails ends the service: nobody else would notice."""
        try:
            await work
        except KTransformersError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the supervisor failed")
            self._fail(EngineError(f"the supervisor failed: {error!r}"))

    def _fail(self, error: KTransformersError) -> None:
        if not self._is_closing and not self.failed.done():
            self.failed.set_result(error)

    # Watching.

    async def _watch_scheduler(self, scheduler: ChildProcess) -> None:
        code = await scheduler.ended()
        self._fail(EngineError(f"the scheduler process ended with {ending(code)}; nothing can be answered any more"))

    async def _watch_files(self) -> None:
        """Raises WeightError when a file that engines have mapped is written to."""
        while True:
            await self._clock.sleep(FILE_CHECK_SECONDS)
            what = await asyncio.to_thread(self._files.written_to)
            if what is not None:
                raise WeightError(what)

    async def _read_files(self) -> None:
        await asyncio.to_thread(self._files.read)

    async def _check_files(self) -> None:
        """Raises WeightError when another engine would not be the same."""
        what = await asyncio.to_thread(self._files.changed)
        if what is not None:
            raise WeightError(what)

    async def _keep_engine(self, engine: RunningEngine) -> None:
        """Raises KTransformersError when there can be no other engine."""
        while True:
            code = await engine.process.ended()
            self.pause = self.pause or "the engine died; another one is started"
            began = self._clock.now()
            logger.warning("the engine ended with %s: starting another one, running requests will go on", ending(code))
            await self._check_files()
            await self._lose(engine.epoch)
            engine = await self._replaced(engine)
            await self._announce(engine)
            logger.info("engine %d is ready after %.1f s", engine.epoch, self._clock.now() - began)

    async def _lose(self, epoch: int) -> None:
        """Count the death of an engine that served, unless the scheduler can explain it. Raises EngineError."""
        acknowledged = self._acknowledged[epoch] = asyncio.get_running_loop().create_future()
        self._restarts.count(epoch)
        await self.send(EngineDown(epoch))
        await acknowledged
        del self._acknowledged[epoch]
        self._restarts.check()

    async def _replaced(self, last: RunningEngine) -> RunningEngine:
        """Another engine that can do what `last` could. Waits for memory to come free, however long that takes.

        Raises EngineError when engines die too often while they load, WeightError when the files have changed.
        """
        config = pinned(self._config.engine, last.facts)

        async def failed(error: KTransformersError, delay: float) -> None:
            if isinstance(error, ProcessDiedError):
                logger.warning("%s: trying again", error)
                await self._check_files()
                return
            await self._check_files()
            self.pause = f"no engine can start at the moment: {error}"
            logger.error("no engine can start: %s; running requests wait, trying again in %.0f s", error, delay)

        return await self._restarts.until_ready(lambda epoch: self._load_equal(epoch, config, last.facts), failed)

    async def _load_equal(self, epoch: int, config: EngineConfig, first: EngineFacts) -> RunningEngine:
        """Raises EngineError for an engine with less than `first`: its steps would write beyond its cache."""
        engine = await self._load(epoch, config, None)
        missing = shortfall(first, engine.facts)
        if missing is not None:
            await self._processes.stop_async(engine.process)
            raise EngineError(f"the new engine does not match the one that died: {missing}")
        return engine

    # Stopping.

    async def close(self) -> None:
        """Stop all children and remove the private folder. Safe to call twice."""
        if self._is_closing:
            return
        self._is_closing = True
        self._files.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        await self._processes.close_async()  # none of them holds anything that has to be written down
