"""Who may come in: counts the requests that are being answered, refuses beyond the queue's limit and while draining."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ktransformers.errors import NotReadyError, QueueFullError

__all__ = ["Admission"]


class Admission:
    """All calls on one event loop. max_queue: requests that may wait beyond those that are computed."""

    def __init__(self, max_queue: int):
        self._max_queue = max_queue
        self._num_active = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        return self._num_active

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def enter(self, max_running: int) -> None:
        """Count a request in, or raise NotReadyError or QueueFullError. Each one entered must `leave` once."""
        if self._is_draining:
            raise NotReadyError("the server is shutting down; send the request to another one, or again in a moment")
        if self._num_active >= max_running + self._max_queue:
            raise QueueFullError(
                f"{self._num_active} requests are running or waiting, and no more are taken in (--max_queue "
                f"{self._max_queue}); try again in a moment"
            )
        self._num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        self._num_active -= 1
        if not self._num_active:
            self._idle.set()

    @contextmanager
    def admitted(self, max_running: int) -> Iterator[None]:
        """`enter` and `leave` around a block."""
        self.enter(max_running)
        try:
            yield
        finally:
            self.leave()

    async def drain(self, seconds: float) -> bool:
        """Let nobody in any more and wait for the others. Whether they all left in time."""
        self._is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
