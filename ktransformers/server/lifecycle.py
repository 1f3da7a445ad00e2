"""The life of a server, of one model or of several: bind, answer probes, start, serve, drain, close.

SIGTERM, SIGINT or SIGHUP: no new requests (503), running answers may finish for drain_seconds, then all is closed.
A second signal ends the waiting, and SIGQUIT does not begin it. A signal before the start is complete ends that at
once: models that are loading are given up, and requests of a journal that are not resumed yet stay in it for the next
server.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.server.config import ServerConfig
from ktransformers.server.journal.journal import Journal
from ktransformers.server.listening import Server, bind, ending_signals, uvicorn_config
from ktransformers.server.service import Service
from ktransformers.server.telemetry.activity import duration, farewell
from ktransformers.server.telemetry.metrics import Counts
from ktransformers.server.telemetry.traces import TraceSink

if TYPE_CHECKING:
    from ktransformers.server.telemetry.otlp import OtlpTraces

__all__ = ["ServerLife", "drain", "open_traces"]

logger = logging.getLogger("ktransformers.server")


def open_traces(endpoint: str | None) -> OtlpTraces | None:
    """Return the sink that sends spans to this endpoint; None without an endpoint. Raises ConfigError where
    OpenTelemetry is not installed, or cannot send to that endpoint.
    """
    if endpoint is None:
        return None
    try:
        from ktransformers.server.telemetry.otlp import OtlpTraces  # an extra: most installations lack it
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(
            "--otlp_traces_endpoint needs OpenTelemetry: pip install 'ktransformers-engine[otel]', or "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    return OtlpTraces.to(endpoint)


async def drain(services: Sequence[Service], seconds: float) -> None:
    """End suspended requests, let no others in, and wait up to `seconds` for those that run."""
    num_suspended = sum(service.ongoing.end_suspended() for service in services)
    if num_suspended:
        logger.info("stopping: %d suspended requests are ended", num_suspended)
    num_active = sum(service.admission.num_active for service in services)
    if num_active:
        logger.info("stopping: %d requests may finish within %g s; a second signal ends them", num_active, seconds)
    await asyncio.gather(*(service.admission.drain(seconds) for service in services))


class ServerLife(ABC):
    """Leads what is served from its start to its end. A subclass says how models are started and closed.

    app: what answers requests. services: one for each model. journal: what the next server resumes. It is closed at the
    end, as traces are, where spans go.
    """

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        services: Sequence[Service],
        traces: TraceSink | None = None,
        journal: Journal | None = None,
    ):
        self.app, self.config, self.services = app, config, tuple(services)
        self._traces, self._journal = traces, journal
        self._why: int | str | None = None  # it stopped: a signal, or words; None: it was never there

    @abstractmethod
    async def start(self) -> None:
        """Load what is served from the beginning. Cancelled when a signal comes first. Raises KTransformersError."""

    @abstractmethod
    async def log_load(self) -> None:
        """Log how busy the server is, forever."""

    @abstractmethod
    async def stop(self) -> None:
        """End the models and the threads that answer requests."""

    async def lost(self) -> KTransformersError:
        """Wait until the server cannot go on though nobody stopped it, and return the reason."""
        never: asyncio.Future[KTransformersError] = asyncio.get_running_loop().create_future()
        return await never

    @property
    def num_active(self) -> int:
        """Number of requests to all models that were admitted and have not left."""
        return sum(service.admission.num_active for service in self.services)

    @property
    def counts(self) -> Counts:
        """The counts of all models together."""
        each = [service.metrics.counts for service in self.services]
        return Counts(*(sum(getattr(one, name) for one in each) for name in Counts.__slots__))

    async def drain(self, seconds: float) -> None:
        """Do what `drain` does for all models."""
        await drain(self.services, seconds)

    async def serve(self) -> None:
        """Serve until a signal comes. Raises KTransformersError when the port, the certificate or a model cannot be
        used, or when the server is lost."""
        began = time.monotonic()
        try:
            server, listener = Server(uvicorn_config(self.app, self.config)), bind(self.config)
            self.config.warn_if_open()
            async with ending_signals() as received:
                await self._serve(server, listener, received)
        finally:
            if self._journal is not None:
                self._journal.close()
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            if self._why is not None:
                logger.info("%s", farewell(self._why, self.counts, time.monotonic() - began))

    async def _serve(self, server: Server, listener: socket.socket, received: asyncio.Queue[int]) -> None:
        began = time.monotonic()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(received.get())
        starting, logging_load = asyncio.create_task(self.start()), asyncio.create_task(self.log_load())
        tasks: list[asyncio.Task[Any]] = [stopping, starting, logging_load]
        try:
            await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # raises what went wrong
                self._announce(listener, time.monotonic() - began)
                losing = asyncio.create_task(self.lost())
                tasks.append(losing)
                await asyncio.wait((stopping, serving, losing), return_when=asyncio.FIRST_COMPLETED)
                if losing.done():
                    raise losing.result()
                if stopping.done() and stopping.result() == signal.SIGQUIT:
                    received.put_nowait(signal.SIGQUIT)  # as if it had come twice
                await self._drain(received)
        finally:
            server.should_exit = True
            self._why = _why_stopped(stopping, starting, sys.exception())
            if self._journal is not None:
                self._journal.stop()  # what is cut off now, the next server goes on with
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.stop()
            await asyncio.gather(serving, return_exceptions=True)
            listener.close()

    async def _drain(self, received: asyncio.Queue[int]) -> None:
        draining = asyncio.create_task(self.drain(self.config.drain_seconds))
        again = asyncio.create_task(received.get())
        await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, again):
            task.cancel()
        if self.num_active:
            logger.warning("%d requests were cut off", self.num_active)

    def _announce(self, listener: socket.socket, seconds: float) -> None:
        host, port = listener.getsockname()[:2]
        scheme = "http" if self.config.ssl_certfile is None else "https"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        names = ", ".join(name for service in self.services for name in service.config.model_names)
        logger.info("ready after %s", duration(seconds))
        logger.info("serving %s on %s/v1", names, address)
        if self.config.has_web:
            logger.info("chat in a browser on %s", address)


def _why_stopped(
    stopping: asyncio.Task[int], starting: asyncio.Task[None], error: BaseException | None
) -> int | str | None:
    """The signal that stopped the server, or the reason in words; None for one that could not start. The error itself
    is shown by whoever catches it."""
    if stopping.done() and not stopping.cancelled():
        return stopping.result()
    if not starting.done() or starting.cancelled() or starting.exception() is not None:
        return None
    return "by itself" if error is None else f"by an error: {type(error).__name__}"
