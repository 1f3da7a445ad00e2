"""Limits how many connections are open, and chooses which one is closed when there are more. Knows neither HTTP nor
requests.

open        at most `limit`: file descriptors are kept back for the model's files, sockets and logs
idle        no request of theirs is being read or answered; the one that has been so for the longest goes first
"""

from __future__ import annotations

import logging
import os
import resource
from typing import Protocol

from ktransformers.errors import ConfigError

__all__ = ["ACCEPTED_AT_ONCE", "Connections", "connection_limit"]

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""Connections that the event loop takes from the listening socket before it looks at any of them."""

_RESERVED = 96 + 4 * ACCEPTED_AT_ONCE  # some are on their way through the event loop
_MIN_CONNECTIONS = 16
_MAX_CONNECTIONS = 4096


def connection_limit(wanted: int | None) -> int:
    """Return how many connections the limit on open files leaves room for, `wanted` at most. Raises ConfigError for too
    few.
    """
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return wanted or _MAX_CONNECTIONS
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else _MIN_CONNECTIONS
    room = num_files - num_open - _RESERVED
    if room < _MIN_CONNECTIONS:
        least = num_open + _RESERVED + _MIN_CONNECTIONS
        raise ConfigError(f"this process may open {num_files} files, and a server needs {least}: raise `ulimit -n`")
    return min(room, wanted or _MAX_CONNECTIONS)


class Connection(Protocol):
    """A connection that can be dropped."""

    def drop(self) -> None: ...


class Connections:
    """The open connections of one server, on its event loop."""

    def __init__(self, limit: int):
        self._limit = limit
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that has been idle for the longest first
        self._has_warned = False

    def add(self, connection: Connection) -> bool:
        """Add a new, idle connection. False when there is no room and none is idle: it must be closed at once."""
        if len(self._open) >= self._limit:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%d connections are open, which is the limit: the longest idle ones are closed for new ones, and "
                    "new ones refused when none is idle (said once; `ulimit -n` raises it)",
                    self._limit,
                )
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.remove(longest)
            longest.drop()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def set_idle(self, connection: Connection, is_idle: bool) -> None:
        """Set whether a connection is idle: no request of it is being read or answered."""
        if is_idle and connection in self._open:
            self._idle.setdefault(connection)
        else:
            self._idle.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is closed, or about to be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
