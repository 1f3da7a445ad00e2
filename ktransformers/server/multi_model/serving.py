"""Starts the service of several models and ends it in order: bind, load what is wanted at once, serve, drain, close.

Signals mean what they mean to a server of one model (run.py).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ktransformers.server.backend.base import BackendInterfaceBase, ModelInfo
from ktransformers.server.backend.interfaces.on_demand import OnDemandInterface
from ktransformers.server.config import ServerConfig
from ktransformers.server.listening import Server, bind, ending_signals, uvicorn_config
from ktransformers.server.multi_model.gateway import Gateway, gateway_app
from ktransformers.server.multi_model.group import PoolGroup
from ktransformers.server.multi_model.model_manager import ModelManager
from ktransformers.server.multi_model.pool import Clock, ModelPool, PooledModel
from ktransformers.server.multi_model.served import ServedModel
from ktransformers.server.run import open_traces, why_stopped
from ktransformers.server.telemetry.activity import SUMMARY_SECONDS, LoadSummary, duration, farewell
from ktransformers.server.telemetry.metrics import Counts
from ktransformers.server.telemetry.traces import TraceSink
from ktransformers.tokenizer.tools import AUTO, tool_format_named

__all__ = ["ModelToServe", "Models", "serve_models"]

logger = logging.getLogger("ktransformers.server")


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """A model to be served. config: with the model's names and sampling. kind, make: of its backend, which is made
    within the event loop.

    outline: what is known before it is loaded. nbytes: {device: bytes}, as planned. is_kept: never stopped once it
    runs. is_first: loaded at the start.
    """

    config: ServerConfig
    kind: type[BackendInterfaceBase]
    make: Callable[[], BackendInterfaceBase]
    outline: ModelInfo
    nbytes: Mapping[str, int]
    is_kept: bool = False
    is_first: bool = False

    @property
    def name(self) -> str:
        """The first of the model's names."""
        return self.config.model_names[0]


class Models:
    """The models of a server with all that keeps and serves them. To be made within the event loop.

    memory: {device: bytes} for all of them. idle_seconds: infinite for never. Raises CapacityError as ModelPool does.
    """

    def __init__(
        self,
        models: Sequence[ModelToServe],
        config: ServerConfig,
        memory: Mapping[str, int],
        idle_seconds: float,
        traces: TraceSink | None = None,
        clock: Clock = time.monotonic,
    ):
        self.served = [
            ServedModel.of(OnDemandInterface.of(model.kind)(model.make, model.outline), model.config, traces)
            for model in models
        ]
        pooled = [PooledModel(model.name, model.nbytes, model.is_kept) for model in models]
        self.pool = ModelPool(pooled, memory, idle_seconds, clock)
        self.manager = ModelManager(self.pool, {model.name: model for model in self.served}, config.max_queue)
        self.gateway = Gateway(self.served, self.manager, config)
        self.group = PoolGroup(self.served, self.pool)
        self.app = gateway_app(self.gateway, config, traces)
        self._first = [model.name for model in models if model.is_first]

    async def start(self) -> None:
        """Load the models that are wanted from the start. Raises LoadFailedError."""
        for name in self._first:
            await self.manager.load(name)
        self.gateway.is_started = True

    @property
    def counts(self) -> Counts:
        """The counts of all models together."""
        each = [model.service.metrics.counts for model in self.served]
        return Counts(*(sum(getattr(one, name) for one in each) for name in Counts.__slots__))

    async def sum_up(self) -> None:
        """Log what each model does, forever."""
        summaries = [(one.name, LoadSummary(one.backend, one.service.metrics.counts)) for one in self.served]
        while True:
            await asyncio.sleep(SUMMARY_SECONDS)
            for name, summary in summaries:
                line = summary.line()
                if line is not None:
                    logger.info("%s: %s", name, line)

    async def drain(self, seconds: float) -> None:
        """Let no request in any more, end those that are suspended or wait for a model, and wait for the others."""
        self.manager.drain()
        services = [model.service for model in self.served]
        num_suspended = sum(service.ongoing.end_suspended() for service in services)
        if num_suspended:
            logger.info("stopping: %d suspended requests are ended", num_suspended)
        num_active = self.num_active
        if num_active:
            logger.info("stopping: %d requests may finish within %g s; a second signal ends them", num_active, seconds)
        await asyncio.gather(*(service.admission.drain(seconds) for service in services))

    @property
    def num_active(self) -> int:
        """Number of requests to all models that were admitted and have not left."""
        return sum(model.service.admission.num_active for model in self.served)

    async def close(self) -> None:
        """End all models and the threads."""
        await self.manager.close()
        self.gateway.close()


async def _serve(models: Models, config: ServerConfig) -> None:
    server = Server(uvicorn_config(models.app, config))
    listener = bind(config)
    config.warn_if_open()
    began = time.monotonic()
    async with ending_signals() as received:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(received.get())
        starting = asyncio.create_task(models.start())
        summing_up = asyncio.create_task(models.sum_up())
        try:
            await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # raises what went wrong
                _announce(models, config, listener, time.monotonic() - began)
                await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
                if stopping.done() and stopping.result() == signal.SIGQUIT:
                    received.put_nowait(signal.SIGQUIT)  # as if it had come twice
                await _drain(models, config, received)
        finally:
            server.should_exit = True
            why = why_stopped(stopping, sys.exception())
            tasks = (stopping, starting, summing_up)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await models.close()
            await asyncio.gather(serving, return_exceptions=True)
            listener.close()
            logger.info("%s", farewell(why, models.counts, time.monotonic() - began))


async def _drain(models: Models, config: ServerConfig, received: asyncio.Queue[int]) -> None:
    draining = asyncio.create_task(models.drain(config.drain_seconds))
    again = asyncio.create_task(received.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    if models.num_active:
        logger.warning("%d requests were cut off", models.num_active)


def _announce(models: Models, config: ServerConfig, listener: socket.socket, seconds: float) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(name for model in models.served for name in model.names)
    logger.info("ready after %s", duration(seconds))
    logger.info("serving %s on %s://%s:%d/v1", names, scheme, shown, port)
    if config.has_web:
        logger.info("chat in a browser on %s://%s:%d", scheme, shown, port)


def serve_models(
    models: Sequence[ModelToServe], config: ServerConfig, memory: Mapping[str, int], idle_seconds: float
) -> None:
    """Serve several models until a signal comes. See Models.

    Raises KTransformersError when the port, the certificate, a flag or a model that is wanted at once cannot be used.
    """
    for model in models:
        if model.config.tool_format != AUTO:
            tool_format_named(model.config.tool_format)
    traces = None if config.otlp_traces_endpoint is None else open_traces(config.otlp_traces_endpoint)

    async def main() -> None:
        try:
            await _serve(Models(models, config, memory, idle_seconds, traces), config)
        finally:
            if traces is not None:
                await asyncio.to_thread(traces.close)

    asyncio.run(main())
