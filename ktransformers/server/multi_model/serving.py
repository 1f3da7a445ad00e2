"""Serves several models: loads those that are wanted at once, others on demand, and answers until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from ktransformers.server.backend.base import BackendInterfaceBase, ModelInfo
from ktransformers.server.backend.interfaces.on_demand import OnDemandInterface
from ktransformers.server.config import ServerConfig
from ktransformers.server.lifecycle import ServerLife, open_traces
from ktransformers.server.multi_model.gateway import Gateway, gateway_app
from ktransformers.server.multi_model.group import PoolGroup
from ktransformers.server.multi_model.model_manager import ModelManager
from ktransformers.server.multi_model.pool import Clock, ModelPool, PooledModel
from ktransformers.server.multi_model.served import ServedModel
from ktransformers.server.telemetry.activity import SUMMARY_SECONDS, LoadSummary
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


class Models(ServerLife):
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
        services = [model.service for model in self.served]
        super().__init__(gateway_app(self.gateway, config, traces), config, services, traces)
        self._first = [model.name for model in models if model.is_first]

    @override
    async def start(self) -> None:
        """Load the models that are wanted from the start. Raises LoadFailedError."""
        for name in self._first:
            await self.manager.load(name)
        self.gateway.is_started = True

    @override
    async def log_load(self) -> None:
        """Log what each model does, forever."""
        summaries = [(one.name, LoadSummary(one.backend, one.service.metrics.counts)) for one in self.served]
        while True:
            await asyncio.sleep(SUMMARY_SECONDS)
            for name, summary in summaries:
                line = summary.line()
                if line is not None:
                    logger.info("%s: %s", name, line)

    @override
    async def drain(self, seconds: float) -> None:
        """Let no request in any more, end those that are suspended or wait for a model, and wait for the others."""
        self.manager.drain()
        await super().drain(seconds)

    @override
    async def stop(self) -> None:
        """End all models and the threads."""
        await self.manager.close()
        self.gateway.close()


def serve_models(
    models: Sequence[ModelToServe], config: ServerConfig, memory: Mapping[str, int], idle_seconds: float
) -> None:
    """Serve several models until a signal comes. See Models.

    Raises KTransformersError when the port, the certificate, a flag or a model that is wanted at once cannot be used.
    """
    for model in models:
        if model.config.tool_format != AUTO:
            tool_format_named(model.config.tool_format)
    traces = open_traces(config.otlp_traces_endpoint)

    async def main() -> None:
        await Models(models, config, memory, idle_seconds, traces).serve()

    asyncio.run(main())
