"""The port and its connections: bound before anything is loaded, with limits on slow clients, ended by signals.

Knows uvicorn, and no model.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import signal
import socket
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ktransformers.errors import ConfigError, ListenError, reason_of
from ktransformers.server.config import ServerConfig
from ktransformers.server.connections import ACCEPTED_AT_ONCE, Connections, connection_limit
from ktransformers.server.sockets.peers import has_reset, probe_often, reads_still
from ktransformers.server.streaming import ABORT_KEY
from ktransformers.server.telemetry.metrics import Refusals

logger = logging.getLogger("ktransformers.server")

__all__ = ["HEADER_TIMEOUT", "Server", "bind", "ending_signals", "uvicorn_config"]

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

HEADER_TIMEOUT = 30.0
"""Seconds that a request's head may take, and the rest of a body whose request has been answered already."""


KEEP_ALIVE = 75
"""Seconds that a connection stays open without a request. More than the 60 of common proxies: where the server closes
while the proxy sends, a request is lost."""

_HALF_CLOSE_SECONDS = 0.1
"""A client on another machine that sends no more so soon after its request has said all it had to say, and reads on."""

_LOOK_SECONDS = 1.0
"""Between two looks at whether a client that sends no more has left."""

_BACKLOG = 1024

_uvicorn_log = logging.getLogger("ktransformers.server.http")
_uvicorn_log.addFilter(lambda record: record.levelno >= logging.ERROR)  # its warnings name no client: see below


class _Protocol(H11Protocol):
    """uvicorn's, with limits on what comes too slowly for any timeout of its own and on how many come at once.

    A client that sends no more (shutdown(SHUT_WR)) gets the answers to what it has sent.
    """

    _impatience: asyncio.TimerHandle | None = None
    _looking: asyncio.TimerHandle | None = None
    _is_half_closed = False
    _received_at = 0.0

    def __init__(self, *args: Any, room: Connections, refusals: Refusals, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.logger = _uvicorn_log
        self._room, self._refusals = room, refusals
        self._accepted: asyncio.Transport | None = None

    def accept(self, transport: asyncio.Transport) -> bool:
        """Count a connection, which may have its handshake before it. False when there is no room."""
        self._accepted = transport
        return self._room.add(self)

    def leave(self) -> None:
        """Stop counting the connection."""
        self._room.remove(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._accepted is not None or self.accept(transport):
            self._watch()
        else:
            self._refusals.count(503)
            transport.write(_NO_ROOM)
            transport.close()

    def drop(self) -> None:
        assert self._accepted is not None, "nobody else is in the room"
        self._accepted.abort()

    def handle_events(self) -> None:
        self._received_at = self.loop.time()
        super().handle_events()
        if self.cycle is not None:
            cast(dict[str, Any], self.cycle.scope)[ABORT_KEY] = self.transport.abort
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Close a connection whose data is no HTTP with a 400, or whose head is too large with a 431, where no answer
        has begun. Called where the exception that says so is handled.
        """
        if self.transport.is_closing():
            return
        is_large = getattr(sys.exception(), "error_status_hint", 0) == 431
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # the route that waits for the body ends, and its answer goes nowhere
                self.cycle.message_event.set()
            else:  # a request that has begun is counted and logged elsewhere
                self._refusals.count(431 if is_large else 400)
                host, port = self.client or ("unknown", 0)
                why = "431: the request's head is too large" if is_large else "400: what came is no HTTP request"
                logger.info("%s:%d %s", host, port, why)
            # Not through h11, which knows no answer to half a request, or to HEAD.
            self.transport.write(_LARGE_HEAD if is_large else _NO_HTTP)
            self.transport.close()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # an answer is on its way, the last one
            self.transport.pause_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: the client sends no more, and what it sent is still being answered."""
        cycle, connection = self.cycle, self.transport.get_extra_info("socket")
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False
        is_there = reads_still(connection)
        if is_there is None:
            is_there = self._is_half_closed or self.loop.time() - self._received_at < _HALF_CLOSE_SECONDS
        if is_there and not self._is_half_closed:
            self._is_half_closed = True
            probe_often(connection)
            self._looking = self.loop.call_later(_LOOK_SECONDS, self._look)
        return is_there

    def _look(self) -> None:
        """Nothing is read any more that could say that the client has left."""
        connection = self.transport.get_extra_info("socket")
        if has_reset(connection) or reads_still(connection) is False:
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(_LOOK_SECONDS, self._look)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self._is_half_closed and self.cycle.response_complete:  # and there was no other request behind it
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._be_patient()
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock when something is due that no route waits for; stop it when it has come.

        Between requests uvicorn's keep-alive timer runs, but the first byte of whatever comes next stops it.
        """
        self._room.set_idle(self, self.cycle is None or self.cycle.response_complete)
        if self.conn.their_state is h11.IDLE:
            is_due = self.cycle is None or bool(self.conn.trailing_data[0])  # a head that has begun
        else:
            is_due = self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        if not is_due:
            self._be_patient()
        elif self._impatience is None:
            self._impatience = self.loop.call_later(HEADER_TIMEOUT, self.transport.abort)

    def _be_patient(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None


class _Tls(SSLProtocol):
    """TLS around a connection that counts from when it is accepted: asyncio's own is silent until hands are shaken."""

    def __init__(self, inner: _Protocol, context: ssl.SSLContext):
        self._inner = inner
        loop, nobody, patience = asyncio.get_running_loop(), cast(Any, None), cast(int, HEADER_TIMEOUT)
        super().__init__(loop, inner, context, nobody, server_side=True, ssl_handshake_timeout=patience)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._inner.accept(transport):
            super().connection_made(transport)
        else:
            transport.abort()  # an answer would have to wait for the handshake

    def connection_lost(self, exc: BaseException | None) -> None:
        self._inner.leave()
        super().connection_lost(exc)


def _plain(status: str, text: str, more: str = "") -> bytes:
    """A whole response, for connections that get no other."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text)}\r\n{more}"
    return f"{head}Connection: close\r\n\r\n{text}".encode()


_MAX_HEAD = 64 << 10
_NO_ROOM = _plain("503 Service Unavailable", "too many connections are open.\n", "Retry-After: 1\r\n")
_NO_HTTP = _plain("400 Bad Request", "Invalid HTTP request received.")
_LARGE_HEAD = _plain(
    "431 Request Header Fields Too Large",
    f"the request's line and headers are longer than the {_MAX_HEAD >> 10} KiB that this server takes\n",
)


class Server(uvicorn.Server):
    """uvicorn's server, without its handling of signals."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn's server, with a longer queue of connections that wait to be accepted."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # the kernel's queue may be longer than what is accepted in one go

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all signals to `ending_signals`."""
        yield


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket bound to --host and --port, before the model loads: a busy port must not show up minutes later.

    Raises ListenError for a port that another program has, ConfigError for an address or a port that cannot be had.
    """
    host, port = config.host, config.port
    where = f"cannot listen on {f'[{host}]' if ':' in host else host}:{port}"
    refused: OSError | None = None
    for family, address in _addresses(host, port, where):
        # asyncio sends at once (TCP_NODELAY) on sockets that say they are TCP. On others what follows the head of a
        # response, and every token, waits 40 ms for the client's delayed acknowledgement.
        try:
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except OSError as error:  # no IPv6 here
            refused = refused or error
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            listener.close()
            refused = refused or error
            continue
        return listener
    assert refused is not None, "a name has an address"
    reason = f"{where}: {reason_of(refused)}"
    if refused.errno == errno.EADDRINUSE:
        raise ListenError(f"{reason}; choose another --port, or end the program that has it") from refused
    if refused.errno in (errno.EACCES, errno.EPERM):
        raise ConfigError(f"{reason}; ports below 1024 need privileges: choose another --port") from refused
    raise ConfigError(f"{reason}; --host must be an address of this machine: {_HOSTS}") from refused


_HOSTS = "127.0.0.1 (this machine alone), 0.0.0.0 (every network that it is in), or one of its own"

_Address = tuple[Any, ...]  # as socket.bind takes it, for each family


def _addresses(host: str, port: int, where: str) -> list[tuple[int, _Address]]:
    """What a host stands for, IPv4 first. Raises ConfigError when it stands for nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        hint = f"--host must be an address or a name of this machine: {_HOSTS}"
        if "://" in host or "/" in host:
            hint = f"--host is an address alone, without http:// and path: {_HOSTS}"
        elif re.fullmatch(r"(\[.*\]|[^:]*):\d+", host):
            hint = f"--host is an address alone; the port is --port {host.rpartition(':')[2]}"
        raise ConfigError(f"{where}: {reason_of(error)}; {hint}") from error
    kinds = (socket.AF_INET, socket.AF_INET6)
    known = sorted((one for one in found if one[0] in kinds), key=lambda one: kinds.index(one[0]))
    return list(dict.fromkeys((one[0], one[4]) for one in known))


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's configuration for this service. Raises ConfigError for a certificate that cannot be used."""
    room = Connections(connection_limit(config.max_connections))
    made = uvicorn.Config(
        app,
        http=cast(Any, partial(_Protocol, room=room, refusals=app.state.refusals)),
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=_MAX_HEAD,
        ssl_keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
        ssl_certfile=None if config.ssl_certfile is None else str(config.ssl_certfile),
    )
    try:
        made.load()
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--ssl_certfile and --ssl_keyfile cannot be used: {reason_of(error)}") from error
    context, plain = made.ssl, cast(Any, made.http_protocol_class)
    if context is not None:
        made.ssl, made.http_protocol_class = None, cast(Any, lambda **kwargs: _Tls(plain(**kwargs), context))
    return made


@asynccontextmanager
async def ending_signals() -> AsyncIterator[asyncio.Queue[int]]:
    """Give a queue of the signals received that end the service, for the time of an `async with`. One that is ignored
    stays so: nohup ignores SIGHUP.
    """
    loop, received = asyncio.get_running_loop(), asyncio.Queue[int]()
    numbers = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
