"""Logs of the events of kept streams, from which clients that lost their connection get what they missed.

    log:  dropped ... | first ........ last | to come ...        events are numbered from 1
                        └── a reader begins anywhere here, several may read

A reader gets each event behind the one that it names once, in order. All logs together hold a number of bytes; beyond
it the API key that holds most loses its oldest events. Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator

from ktransformers.errors import ConfigError, ConflictError

__all__ = ["EventLog", "LogBudget"]

logger = logging.getLogger(__name__)

_OVERHEAD = 64  # bytes of an event beside its own, roughly
_PIECE = 1 << 16  # bytes of events that are sent together, or one event
_LIVE = 16  # events that wait and are sent one by one all the same: one step of an answer may make so many


class LogBudget:
    """The limit, in bytes, on what the logs of all keys hold together."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._logs: set[EventLog] = set()
        self.num_bytes = 0

    def add(self, log: EventLog) -> None:
        """Count this log from now on."""
        self._logs.add(log)

    def forget(self, log: EventLog) -> None:
        """Stop counting this log. Safe to call twice."""
        if log in self._logs:
            self._logs.remove(log)
            self.num_bytes -= log.num_bytes

    def note(self, num_bytes: int) -> None:
        """Count the bytes by which a log has grown; over the limit, drop half of the largest log of the key that holds
        most.
        """
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            of_key: Counter[str] = Counter()
            for log in self._logs:
                of_key[log.key] += log.num_bytes
            (most, _), *_ = of_key.most_common(1)
            largest = max((log for log in self._logs if log.key == most), key=lambda log: log.num_bytes)
            self.num_bytes -= largest.drop_half()  # not one by one: the next event would look at all logs again


class EventLog:
    """The kept events of one stream. key: whose it is. last: number of its newest event, 0 before there is one."""

    def __init__(self, key: str, budget: LogBudget):
        self.key, self.num_bytes, self.last, self.is_ended = key, 0, 0, False
        self._events: deque[bytes] = deque()
        self._budget = budget
        self._changed = asyncio.Event()
        budget.add(self)

    @property
    def first(self) -> int:
        """Number of the oldest event that is kept, or of the next one."""
        return self.last - len(self._events) + 1

    def append(self, event: bytes) -> None:
        """Append the stream's next event, in the form of server-sent events, without a number."""
        self._events.append(event)
        self.last += 1
        self.num_bytes += len(event) + _OVERHEAD
        self._budget.note(len(event) + _OVERHEAD)
        self._changed.set()

    def end(self) -> None:
        """End the log: no more events come."""
        self.is_ended = True
        self._changed.set()

    def drop_half(self) -> int:
        """Drop the older half of what is kept, one event at least; return how many bytes that was."""
        before = self.num_bytes
        for _ in range((len(self._events) + 1) // 2):
            self.num_bytes -= len(self._events.popleft()) + _OVERHEAD
        return before - self.num_bytes

    def check(self, last_seen: int, is_replayed: bool = False) -> None:
        """Raise ConfigError for an event that has not been sent, ConflictError when the events after it are gone.

        is_replayed: what comes has been sent before, perhaps.
        """
        if last_seen > self.last and (self.is_ended or not is_replayed):
            raise ConfigError(f"Last-Event-ID: event {last_seen} has not been sent; the newest one is {self.last}")
        if last_seen + 1 < self.first:
            raise ConflictError(
                f"events {last_seen + 1} to {self.first - 1} are not kept any more (--kept_streams): ask again"
            )

    async def after(self, last_seen: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after this one, numbered, as they come, to the end. See `check`. Where many wait they are
        joined.

        Others have the event loop between two pieces: a reader who has left is noticed there.
        """
        while True:
            while last_seen < self.last:
                if last_seen + 1 < self.first:
                    logger.warning("a reader of a kept stream is too slow: what it has not read is dropped")
                    return
                piece = self._piece(last_seen)
                last_seen += len(piece)
                yield b"".join(piece)
                if last_seen < self.last:
                    await asyncio.sleep(0)
            if self.is_ended:
                return
            self._changed.clear()
            await self._changed.wait()

    def _piece(self, last_seen: int) -> list[bytes]:
        """The next events behind this one, of those that wait: one, or as many as make a piece."""
        max_bytes = _PIECE if self.last - last_seen > _LIVE else 0
        piece: list[bytes] = []
        num_bytes = 0
        for number in range(last_seen + 1, self.last + 1):
            numbered = b"id: %d\n%b" % (number, self._events[number - self.first])
            num_bytes += len(numbered)
            if piece and num_bytes > max_bytes:
                break
            piece.append(numbered)
        return piece
