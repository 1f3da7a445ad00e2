"""Starts the service and ends it in order: bind, answer probes, load, serve, drain, close.

SIGTERM, SIGINT or SIGHUP: no new requests (503), running answers may finish for drain_seconds, then all is closed.
A second signal ends the waiting, and SIGQUIT does not begin it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.core import Progress
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.server.answers.replay import resume_requests
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.config import ServerConfig
from ktransformers.server.journal.journal import Journal
from ktransformers.server.listening import Server, bind, ending_signals, uvicorn_config
from ktransformers.server.service import Service
from ktransformers.server.telemetry.activity import LoadSummary, duration, farewell, watch_loading
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import AUTO, tool_format_named

if TYPE_CHECKING:
    from ktransformers.server.telemetry.otlp import OtlpTraces

__all__ = ["open_traces", "serve", "why_stopped"]

logger = logging.getLogger("ktransformers.server")

LoadingBar = Callable[[], AbstractContextManager[Progress | None]]


def open_traces(endpoint: str) -> OtlpTraces:
    """Return the sink that sends spans to this endpoint. Raises ConfigError where OpenTelemetry is not installed, or
    cannot send to that endpoint.
    """
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


def _journal(folder: Path | None, backend: BackendInterfaceBase) -> Journal | None:
    """Raises ConfigError before the model loads when another server has the folder, say."""
    if folder is not None and not backend.can_go_on:
        raise UnsupportedError(
            f"--state_dir needs --backend_type balance_serve or ktransformers: the {backend.name} backend cannot go on "
            "with an answer that another process has begun"
        )
    return None if folder is None else Journal(folder)


async def _serve(
    backend: BackendInterfaceBase, config: ServerConfig, loading_bar: LoadingBar, traces: OtlpTraces | None = None
) -> None:
    app = create_app(backend, config, traces)
    service: Service = app.state.service
    server = Server(uvicorn_config(app, config))
    journal = _journal(config.state_dir, backend)
    listener = bind(config)
    config.warn_if_open()
    service.ongoing.journal, service.ongoing.is_restoring = journal, journal is not None
    began = time.monotonic()
    async with ending_signals() as received:
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
                    await resume_requests(app, service, journal)
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
            why = why_stopped(stopping, sys.exception())
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


def why_stopped(stopping: asyncio.Task[int], error: BaseException | None) -> int | str:
    """Return why the service stopped: the signal, or what went wrong in words. The error itself is shown by whoever
    catches it.
    """
    if stopping.done() and not stopping.cancelled():
        return stopping.result()
    return "by itself" if error is None else f"by an error: {type(error).__name__}"


async def _load(backend: BackendInterfaceBase, loading_bar: LoadingBar, config: ServerConfig) -> None:
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
        return "none, because there is no chat template" if asked == AUTO else "none (--tool_format)"
    if asked != AUTO:
        return f"{tokenizer.tool_format} (--tool_format)"
    if tokenizer.has_chat_template and not tokenizer.turns.shows_tools:
        return f"{tokenizer.tool_format}; the chat template writes no tools, so they are described in a system turn"
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


def serve(backend: Callable[[], BackendInterfaceBase], config: ServerConfig, loading_bar: LoadingBar) -> Any:
    """Serve until a signal comes. backend: makes the backend, within the event loop that it will live in.

    Raises KTransformersError when the port, the certificate, a flag or the model cannot be used.
    """
    if config.tool_format != AUTO:
        tool_format_named(config.tool_format)

    traces = None if config.otlp_traces_endpoint is None else open_traces(config.otlp_traces_endpoint)

    async def main() -> None:
        await _serve(backend(), config, loading_bar, traces)

    asyncio.run(main())
