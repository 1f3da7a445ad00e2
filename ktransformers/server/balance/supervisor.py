"""Starts the scheduler and the engine, watches both, replaces engines that die, and leaves nothing behind.

    start ── engine of epoch 0 loads ── scheduler starts ── serving ── stop
                                           ^                   │
                                           └── engine of epoch n + 1 <── engine of epoch n died

Knows processes and sockets, not requests. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from ktransformers import errors
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError, EngineError, KTransformersError
from ktransformers.server.backend.base import Progress
from ktransformers.server.balance.child import framed
from ktransformers.server.balance.messages import (
    Command,
    EngineDown,
    EngineFacts,
    EngineFailed,
    EngineLoading,
    EngineOptions,
    EngineReady,
    EngineStatus,
    EngineUp,
    News,
    SchedulerOptions,
    decode,
    encode,
)

__all__ = ["BalanceConfig", "Supervisor"]

logger = logging.getLogger("ktransformers.server")

MAX_RESTARTS = 5
RESTART_SECONDS = 600.0
"""An engine that dies more than MAX_RESTARTS times within RESTART_SECONDS is given up."""

_MAX_IPC_PATH = 90  # of some 107 that a socket's address can hold, file names included


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """What balance_serve is started with. engine.cache_lens counts the tokens of all requests together.

    Raises ConfigError on creation for limits that cannot work.
    """

    engine: EngineConfig
    page_size: int = 64
    max_batch_size: int = 16
    has_prefix_cache: bool = True
    log_level: str = "info"
    factory: str = "ktransformers.server.balance.engine_process:load_engine"
    checks_integrity: bool = False

    def __post_init__(self) -> None:
        for flag in ("page_size", "max_batch_size"):
            if not 1 <= getattr(self, flag) <= 1 << 16:
                raise ConfigError(f"--{flag} must be between 1 and {1 << 16}, got {getattr(self, flag)}")


def _private_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for socket addresses."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(base) > _MAX_IPC_PATH - 30 or not os.access(base, os.W_OK):
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="ktransformers-", dir=base))


class Supervisor:
    """on_news is called with what the scheduler tells, on the event loop."""

    def __init__(self, config: BalanceConfig, on_news: Callable[[News], None]):
        self._config, self._on_news = config, on_news
        self._folder = _private_folder()
        self._context = zmq.asyncio.Context()
        self._commands = self._bound(zmq.PUSH, "commands")
        self._news = self._bound(zmq.PULL, "news")
        self._status = self._bound(zmq.PULL, "status")
        self._children: set[asyncio.subprocess.Process] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._lost_at: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
        self._is_closing = False
        self.num_restarts = 0
        self.engine_pid: int | None = None
        self.scheduler_pid: int | None = None
        self.failed: asyncio.Future[KTransformersError] = asyncio.get_running_loop().create_future()

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

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
        facts = await self._start_engine(progress)
        await self._start_scheduler(facts)
        self._spawn(self._receive_news())
        await self._announce_engine()
        return facts

    async def _start_child(self, module: str, options: EngineOptions | SchedulerOptions) -> asyncio.subprocess.Process:
        # Not -m, which would import the module twice, under two names. The child finds packages where we do.
        code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; sys.exit(main())"
        command = [sys.executable, "-P", "-c", code, *sys.path]
        env = {"OMP_WAIT_POLICY": "passive", **os.environ}  # see engine/threads.py
        child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, env=env)
        assert child.stdin is not None
        child.stdin.write(framed(encode(options)))  # and never closed: its end tells the child that we are gone
        self._children.add(child)
        return child

    async def _start_engine(self, progress: Progress | None) -> EngineFacts:
        """The facts of a loaded engine of the present epoch. Raises KTransformersError."""
        config = self._config
        options = EngineOptions(
            epoch=self._epoch,
            parent_pid=os.getpid(),
            steps=self._endpoint(f"steps-{self._epoch}"),
            results=self._endpoint(f"results-{self._epoch}"),
            status=self._endpoint("status"),
            log_level=config.log_level,
            config=config.engine,
            page_size=config.page_size,
            max_batch_size=config.max_batch_size,
            factory=config.factory,
        )
        engine = await self._start_child("ktransformers.server.balance.engine_process", options)
        self.engine_pid = engine.pid
        dying = asyncio.create_task(engine.wait())
        listening = asyncio.create_task(self._engine_facts(progress))
        try:
            await asyncio.wait((dying, listening), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():  # it may have said why, just before
                await asyncio.wait((listening,), timeout=1.0)
            if not listening.done():
                raise EngineError(f"the engine process ended while loading, with {_ending(dying.result())}")
            facts = listening.result()
        finally:
            listening.cancel()
            if not dying.done():
                dying.cancel()
        self._spawn(self._watch_engine(engine, self._epoch))
        return facts

    async def _engine_facts(self, progress: Progress | None) -> EngineFacts:
        while True:
            status: EngineStatus = decode(await self._status.recv(), EngineStatus)
            if status.epoch != self._epoch:
                continue
            match status:
                case EngineLoading(_, done, total, name):
                    if progress is not None:
                        progress(done, total, name)
                case EngineFailed(_, error, message):
                    raise _known_error(error, message)
                case EngineReady(_, facts):
                    return facts

    async def _start_scheduler(self, facts: EngineFacts) -> None:
        config = self._config
        options = SchedulerOptions(
            num_pages=facts.num_pages,
            page_size=facts.page_size,
            chunk_size=facts.chunk_size,
            max_batch_size=config.max_batch_size,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            max_model_len=facts.max_model_len,
            has_prefix_cache=config.has_prefix_cache,
            parent_pid=os.getpid(),
            commands=self._endpoint("commands"),
            news=self._endpoint("news"),
            log_level=config.log_level,
            checks_integrity=config.checks_integrity,
        )
        scheduler = await self._start_child("ktransformers.server.balance.scheduler_process", options)
        self.scheduler_pid = scheduler.pid
        self._spawn(self._watch_scheduler(scheduler))

    async def _announce_engine(self) -> None:
        epoch = self._epoch
        up = EngineUp(epoch, self._endpoint(f"steps-{epoch}"), self._endpoint(f"results-{epoch}"))
        await self.send(up)

    # Serving.

    async def send(self, command: Command) -> None:
        """Tell the scheduler."""
        await self._commands.send(encode(command))

    def send_soon(self, command: Command) -> None:
        """Tell the scheduler, from a place that cannot wait."""
        self._spawn(self.send(command))

    async def _receive_news(self) -> None:
        decoder = msgspec.msgpack.Decoder(News)
        while True:
            self._on_news(decoder.decode(await self._news.recv()))

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: object) -> None:
        """A background task that fails ends the service: nobody else would notice."""
        try:
            await work  # type: ignore[misc]
        except KTransformersError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the supervisor failed")
            self._fail(EngineError(f"the supervisor failed: {error!r}"))

    def _fail(self, error: KTransformersError) -> None:
        if not self._is_closing and not self.failed.done():
            self.failed.set_result(error)

    # Watching.

    async def _watch_scheduler(self, scheduler: asyncio.subprocess.Process) -> None:
        code = await scheduler.wait()
        self._children.discard(scheduler)
        self._fail(EngineError(f"the scheduler process ended with {_ending(code)}; nothing can be answered any more"))

    async def _watch_engine(self, engine: asyncio.subprocess.Process, epoch: int) -> None:
        code = await engine.wait()
        self._children.discard(engine)
        if self._is_closing:
            return
        logger.warning("the engine ended with %s: starting another one, running requests will go on", _ending(code))
        await self.send(EngineDown(epoch))
        began, is_loaded = time.monotonic(), False
        while not is_loaded:
            self._count_loss()
            self._epoch += 1
            self.num_restarts += 1
            try:
                await self._start_engine(None)
                is_loaded = True
            except EngineError as error:  # killed while it was loading; what it says itself ends the service
                logger.warning("%s: trying again", error)
        await self._announce_engine()
        logger.info("engine %d is ready after %.1f s", self._epoch, time.monotonic() - began)

    def _count_loss(self) -> None:
        """Raises EngineError when engines die too often."""
        self._lost_at.append(time.monotonic())
        if len(self._lost_at) > MAX_RESTARTS and self._lost_at[-1] - self._lost_at[0] < RESTART_SECONDS:
            raise EngineError(f"the engine died {len(self._lost_at)} times in {RESTART_SECONDS:.0f} s; giving up")

    # Stopping.

    async def close(self) -> None:
        """Stop all children and remove every trace. Safe to call twice."""
        if self._is_closing:
            return
        self._is_closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        children = list(self._children)
        for child in children:
            if child.returncode is None:
                child.kill()  # they hold nothing that has to be written down
        for child in children:
            await child.wait()
            assert child.stdin is not None
            child.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _known_error(name: str, message: str) -> KTransformersError:
    """The error that a child reported, of its class here."""
    kind = getattr(errors, name, EngineError) if name in errors.__all__ else EngineError
    try:
        error = kind(message)
    except TypeError:  # a class that wants more than a message
        error = EngineError(message)
    assert isinstance(error, KTransformersError)
    return error
