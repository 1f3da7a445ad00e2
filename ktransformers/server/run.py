"""Starts the service and ends it in order: bind, answer probes, load, serve, drain, close.

SIGTERM, SIGINT or SIGHUP: no new requests (503), running answers may finish for drain_seconds, then all is closed.
A second signal ends the waiting, and SIGQUIT does not begin it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import sys
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ktransformers.core import Progress
from ktransformers.errors import ConfigError, UnsupportedError, reason_of
from ktransformers.server.activity import LoadSummary, duration, farewell, watch_loading
from ktransformers.server.answers.again import take_up
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import Backend
from ktransformers.server.config import ServerConfig
from ktransformers.server.connections import ACCEPTED_AT_ONCE, Connections, connection_limit
from ktransformers.server.journal.journal import Journal
from ktransformers.server.service import Service
from ktransformers.server.streaming import ABORT_KEY
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import AUTO, tool_format_named

if TYPE_CHECKING:
    from ktransformers.server.otlp import OtlpTraces

__all__ = ["serve"]

logger = logging.getLogger("ktransformers.server")

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

HEADER_TIMEOUT = 30.0
"""Seconds that a request's head may take, and the rest of a body whose request has been answered already."""


_BACKLOG = 1024


class _Protocol(H11Protocol):
    """uvicorn's, with limits on what comes too slowly for any timeout of its own and on how many come at once."""

    _impatience: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, room: Connections, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._room = room
        self._accepted: asyncio.Transport | None = None

    def accept(self, transport: asyncio.Transport) -> bool:
        """Count a connection, which may have its handshake before it. False when there is no room."""
        self._accepted = transport
        return self._room.add(self)

    def leave(self) -> None:
        """Count it no more."""
        self._room.remove(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._accepted is not None or self.accept(transport):
            self._watch()
        else:
            transport.write(_NO_ROOM)
            transport.close()

    def drop(self) -> None:
        assert self._accepted is not None, "nobody else is in the room"
        self._accepted.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            cast(dict[str, Any], self.cycle.scope)[ABORT_KEY] = self.transport.abort
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._be_patient()
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


_NO_ROOM = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 31\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\ntoo many connections are open.\n"
)


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to us."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # the kernel's queue may be longer than what is accepted in one go

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(config: ServerConfig) -> socket.socket:
    """Taken before the model loads: a busy port must not show up minutes later."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) on sockets that say they are TCP. On others what follows the head of a
    # response, and every token, waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason_of(error)}; choose another --port"
        ) from error
    return listener


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    made = uvicorn.Config(
        app,
        http=cast(Any, partial(_Protocol, room=Connections(connection_limit(config.max_connections)))),
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=64 << 10,
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
async def _signals() -> AsyncIterator[asyncio.Queue[int]]:
    """Signals that end the service as items of a queue. One that is ignored stays so: nohup ignores SIGHUP."""
    loop, received = asyncio.get_running_loop(), asyncio.Queue[int]()
    numbers = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


LoadingBar = Callable[[], AbstractContextManager[Progress | None]]


def _open_traces(endpoint: str) -> OtlpTraces:
    """Raises ConfigError where OpenTelemetry is not installed, or cannot send as it is told."""
    try:
        from ktransformers.server.otlp import OtlpTraces  # an extra: most installations lack it
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(
            "--otlp_traces_endpoint needs OpenTelemetry: pip install 'ktransformers-engine[otel]', or "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    return OtlpTraces.to(endpoint)


def _journal(folder: Path | None, backend: Backend) -> Journal | None:
    """Raises ConfigError before the model loads when another server has the folder, say."""
    if folder is not None and not backend.can_go_on:
        raise UnsupportedError(
            f"--state_dir needs --backend_type balance_serve or ktransformers: the {backend.name} backend cannot go on "
            "with an answer that another process has begun"
        )
    return None if folder is None else Journal(folder)


async def _serve(
    backend: Backend, config: ServerConfig, loading_bar: LoadingBar, traces: OtlpTraces | None = None
) -> None:
    config.warn_if_open()
    app = create_app(backend, config, traces)
    service: Service = app.state.service
    server = _Server(_uvicorn_config(app, config))
    journal = _journal(config.state_dir, backend)
    listener = _bind(config)
    service.ongoing.journal, service.ongoing.is_restoring = journal, journal is not None
    began = time.monotonic()
    async with _signals() as received:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(received.get())
        loading = asyncio.create_task(_load(backend, loading_bar, config))
        summing_up = asyncio.create_task(LoadSummary(backend, service.metrics.counts).run())
        try:
            await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()  # raises what went wrong
                await asyncio.to_thread(lambda: service.json_limits)  # looks at the whole vocabulary
                if journal is not None:
                    await take_up(app, service, journal)
                _announce(service, listener, time.monotonic() - began)
                losing = asyncio.create_task(backend.lost())
                await asyncio.wait((stopping, serving, losing), return_when=asyncio.FIRST_COMPLETED)
                if losing.done():
                    raise losing.result()
                losing.cancel()
                if stopping.done() and stopping.result() == signal.SIGQUIT:
                    received.put_nowait(signal.SIGQUIT)  # as if it had come twice
                await _drain(service, received)
        finally:
            server.should_exit = True
            why = _why_stopped(stopping, sys.exception())
            for task in (stopping, loading, summing_up):
                task.cancel()
            await asyncio.gather(stopping, loading, summing_up, return_exceptions=True)
            if journal is not None:
                journal.stop()  # what is cut off now, the next server goes on with
            await backend.close()
            app.state.service.workers.close()
            await asyncio.gather(serving, return_exceptions=True)
            if journal is not None:
                journal.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)
            listener.close()
            if isinstance(why, int) or (loading.done() and not loading.cancelled() and loading.exception() is None):
                logger.info("%s", farewell(why, service.metrics.counts, time.monotonic() - began))


def _why_stopped(stopping: asyncio.Task[int], error: BaseException | None) -> int | str:
    """The signal, or what went wrong. The error itself is shown by whoever catches it."""
    if stopping.done() and not stopping.cancelled():
        return stopping.result()
    return "by itself" if error is None else f"by an error: {type(error).__name__}"


async def _load(backend: Backend, loading_bar: LoadingBar, config: ServerConfig) -> None:
    with loading_bar() as progress:
        await backend.start(watch_loading(config.model_names[0], progress))
    backend.model.tokenizer.use_tool_format(config.tool_format)


def _announce(service: Service, listener: socket.socket, seconds: float) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if service.config.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    model = service.model
    logger.info("%s, %d tokens of context, backend %s", model.description, model.max_len, service.backend.name)
    if not model.tokenizer.has_vocabulary:
        logger.warning("the model's files hold no vocabulary: only requests with token ids can be answered")
    logger.info("tool calls: %s", _tool_format(model.tokenizer, service.config.tool_format))
    logger.info("ready after %s", duration(seconds))
    logger.info("serving %s on %s://%s:%d/v1", ", ".join(service.model_names), scheme, shown, port)
    if service.config.has_web:
        logger.info("chat in a browser on %s://%s:%d", scheme, shown, port)


def _tool_format(tokenizer: Tokenizer, asked: str) -> str:
    """How tool calls are read, and who says so."""
    if tokenizer.tool_format is None:
        return "none, because the chat template writes them in no form that is known here (--tool_format NAME sets one)"
    if asked != AUTO:
        return f"{tokenizer.tool_format} (--tool_format)"
    return f"{tokenizer.tool_format}, as the model's files tell (--tool_format NAME overrides)"


async def _drain(service: Service, received: asyncio.Queue[int]) -> None:
    num_suspended = service.ongoing.end_suspended()
    if num_suspended:
        logger.info("stopping: %d suspended requests are ended", num_suspended)
    num_active, seconds = service.admission.num_active, service.config.drain_seconds
    if num_active:
        logger.info("stopping: %d requests may finish within %g s; a second signal ends them", num_active, seconds)
    draining = asyncio.create_task(service.admission.drain(seconds))
    again = asyncio.create_task(received.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    if service.admission.num_active:
        logger.warning("%d requests were cut off", service.admission.num_active)


def serve(backend: Callable[[], Backend], config: ServerConfig, loading_bar: LoadingBar) -> Any:
    """Serve until a signal comes. backend: makes the backend, within the event loop that it will live in.

    Raises KTransformersError when the port, the certificate, a flag or the model cannot be used.
    """
    if config.tool_format != AUTO:
        tool_format_named(config.tool_format)

    traces = None if config.otlp_traces_endpoint is None else _open_traces(config.otlp_traces_endpoint)

    async def main() -> None:
        await _serve(backend(), config, loading_bar, traces)

    asyncio.run(main())
