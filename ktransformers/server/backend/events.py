"""Carries the events of one answer from a worker thread to the event loop, in order and bounded.

    worker thread:  put, put, ..., end | fail(error)         event loop:  async for event in buffer

Whoever reads too slowly is cut off: at `bound` unread events the buffer fails with SlowReaderError, so that memory
stays bounded and the producer never waits for a reader.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator

from ktransformers.core import TokenEvent
from ktransformers.errors import SlowReaderError

__all__ = ["MAX_UNREAD_EVENTS", "EventBuffer"]

MAX_UNREAD_EVENTS = 4096
"""Events that may wait for one reader. A connection's own buffers come on top of it."""


class EventBuffer:
    """Buffer of one answer's events: one reader on `loop`, producers on any thread. After `end` or `fail` nothing more
    is taken in.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, bound: int = MAX_UNREAD_EVENTS):
        self._loop, self._bound = loop, bound
        self._lock = threading.Lock()
        self._events: deque[TokenEvent] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_waking = False
        self._wake = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the buffer takes in no more events: the producer should stop."""
        return self._is_closed

    def put(self, event: TokenEvent) -> None:
        """Add an event to the buffer. Does nothing once closed."""
        with self._lock:
            if self._is_closed:
                return
            if len(self._events) >= self._bound:
                self._error = SlowReaderError(
                    f"the stream was ended: {self._bound} of its events were not read in time"
                )
                self._is_closed = True
            else:
                self._events.append(event)
            self._notify()

    def end(self) -> None:
        """Close the buffer: no more events come."""
        self._close(None)

    def fail(self, error: BaseException) -> None:
        """Close the buffer: the reader gets the events that are there, then `error`."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed, self._error = True, error
                self._notify()

    def _notify(self) -> None:
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake.set)

    def _take(self) -> tuple[list[TokenEvent], bool]:
        """What is there, and whether that was the end."""
        with self._lock:
            self._wake.clear()
            self._is_waking = False
            events = list(self._events)
            self._events.clear()
            return events, self._is_closed

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while True:
            await self._wake.wait()
            events, is_end = self._take()
            for event in events:
                yield event
            if is_end:
                if self._error is not None:
                    raise self._error
                return
