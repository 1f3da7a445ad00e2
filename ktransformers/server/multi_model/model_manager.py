"""Does what the pool decides: loads and stops models, wakes requests that wait. Knows no HTTP.

All on one event loop. Whatever happens ends in `poke`, which asks the pool what is to be done now. It has no processes:
those of a model are its backend's, which replaces them; a model whose backend gives up is stopped, and loaded anew for
the next request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from ktransformers.errors import (
    CapacityError,
    EngineError,
    KTransformersError,
    LoadFailedError,
    NotReadyError,
    QueueFullError,
)
from ktransformers.server.multi_model.pool import ModelPool, ModelState, PoolActionKind

__all__ = ["Loadable", "ModelManager"]

logger = logging.getLogger("ktransformers.server")


class Loadable(Protocol):
    """A model that can be started and closed as often as one likes."""

    async def start(self) -> None:
        """Load the model. Raises KTransformersError."""
        ...

    async def lost(self) -> KTransformersError:
        """Wait until the model cannot go on though nobody closed it, and return the reason."""
        ...

    async def close(self) -> None:
        """Free the model."""
        ...


class ModelManager:
    """Loads and stops models as the pool decides, and wakes the requests that wait for them.

    models: by the pool's names. max_waiting: requests that may wait for one model.

    The pool's clock may be any; timers are set by the difference to its `wake_at`.
    """

    def __init__(self, pool: ModelPool, models: Mapping[str, Loadable], max_waiting: int):
        self.pool, self._models, self._max_waiting = pool, models, max_waiting
        self._waiters: dict[str, list[asyncio.Future[None]]] = {name: [] for name in models}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._is_closed = False

    @property
    def is_draining(self) -> bool:
        """Whether no request is let in any more."""
        return self._is_draining

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for any model."""
        return sum(map(len, self._waiters.values()))

    def try_enter(self, name: str) -> bool:
        """Become a user of the model, who must `leave` once, if it runs and takes requests; return whether it does."""
        if self._is_draining or self.pool.state(name) is not ModelState.RUNNING:
            return False
        if self.pool.ask(name):
            return True
        self.pool.withdraw(name)
        return False

    async def enter(self, name: str) -> None:
        """Wait until the model runs, and become a user of it, who must `leave` once.

        Raises NotReadyError while draining, QueueFullError, and LoadFailedError when it cannot be loaded, or could not
        be a moment ago.
        """
        self._check(name)
        if self.pool.ask(name):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[name].append(future)
        self.poke()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.leave(name)  # let in at the very moment in which it left
            elif future in self._waiters[name]:
                self._waiters[name].remove(future)
                self.pool.withdraw(name)
                self.poke()
            raise

    def _check(self, name: str) -> None:
        if self._is_draining:
            raise NotReadyError("the server is shutting down; send the request to another one, or again in a moment")
        refused = self.pool.refusal(name)
        if refused is not None:
            raise _load_failed(name, *refused)
        num_waiting = len(self._waiters[name])
        if num_waiting and num_waiting >= self._max_waiting:
            raise QueueFullError(
                f"{num_waiting} requests wait for the model {name} (--max_queue {self._max_waiting}); "
                "try again in a moment"
            )

    def use(self, name: str) -> None:
        """Count one more user of a model that has one."""
        self.pool.use(name)

    def leave(self, name: str) -> None:
        """Count out a user of the model."""
        self.pool.leave(name)
        self.poke()

    def keep_for(self, name: str, seconds: float) -> None:
        """Keep the model running for this long when idle, as ModelPool.keep_for does."""
        self.pool.keep_for(name, seconds)
        self.poke()

    async def load(self, name: str) -> None:
        """Load a model for which no request waits. Raises LoadFailedError."""
        self.pool.wish(name)
        await self.enter(name)
        self.leave(name)

    def poke(self) -> None:
        """Begin what is to be done now, and set the timer for what is to be done later."""
        if self._is_closed:
            return
        for action in self.pool.decide():
            match action.kind:
                case PoolActionKind.LOAD:
                    self._begin(self._load(action.name))
                case PoolActionKind.STOP:
                    self._begin(self._stop(action.name))
                case PoolActionKind.ADMIT:
                    self._wake(action.name)
        if self._timer is not None:
            self._timer.cancel()
        end = self.pool.wake_at()
        wait = None if end is None else max(end - self.pool.now(), 0.0)
        self._timer = None if wait is None else asyncio.get_running_loop().call_later(wait, self.poke)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop alone would not keep it
        task.add_done_callback(self._tasks.discard)
        return task

    def _wake(self, name: str, error: KTransformersError | None = None) -> None:
        waiters, self._waiters[name] = self._waiters[name], []
        for future in waiters:
            if future.done():  # its request has left, and has not got to say so
                if error is None:
                    self.pool.leave(name)
            elif error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    async def _load(self, name: str) -> None:
        try:
            await self._models[name].start()
        except KTransformersError as error:
            logger.error("the model %s could not be loaded: %s", name, error)
            self._fail(name, error)
        except Exception as error:  # what torch or the system raise: others are not to suffer
            logger.exception("the model %s could not be loaded", name)
            self._fail(name, EngineError(f"{type(error).__name__} while it was loaded"))
        else:
            self.pool.loaded(name)
            self._watches[name] = self._begin(self._watch(name))
            self._wake(name)
        self.poke()

    def _fail(self, name: str, error: KTransformersError) -> None:
        self.pool.failed(name, error)
        refused = self.pool.refusal(name)
        self._wake(name, _load_failed(name, error, 0.0 if refused is None else refused[1]))

    async def _stop(self, name: str) -> None:
        watch = self._watches.pop(name, None)
        if watch is not None:
            watch.cancel()
        began = time.monotonic()
        await self._close(name)
        logger.info("the model %s was stopped in %.1f s", name, time.monotonic() - began)
        self.pool.stopped(name)
        self.poke()

    async def _watch(self, name: str) -> None:
        """A model that ends by itself takes nobody with it but its own requests."""
        error = await self._models[name].lost()
        if self.pool.state(name) is not ModelState.RUNNING:
            return
        del self._watches[name]
        logger.error("the model %s has ended: %s", name, error)
        self.pool.lost(name, error)
        await self._close(name)
        self.pool.stopped(name)
        self.poke()

    async def _close(self, name: str) -> None:
        try:
            await self._models[name].close()
        except Exception:
            logger.exception("the model %s was not stopped as it should be", name)

    def drain(self) -> None:
        """Let no request in any more. Requests that wait receive an error."""
        self._is_draining = True
        for name, waiters in self._waiters.items():
            for _ in waiters:
                self.pool.withdraw(name)
            self._wake(name, NotReadyError("the server is shutting down; send the request again in a moment"))

    async def close(self) -> None:
        """End all models, whatever they do."""
        self._is_draining = self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._close(name) for name in self._models))


def _load_failed(name: str, error: KTransformersError, wait: float) -> LoadFailedError:
    """For clients: where files lie is not for them, what memory lacks may be."""
    reason = str(error) if isinstance(error, CapacityError) else "the server's log says why"
    again = f"; it is tried again after {math.ceil(wait)} s" if wait > 0 else ""
    return LoadFailedError(f"the model {name} could not be loaded: {reason}{again}", retry_after=wait)
