"""A model among several: its app, its backend, and how it is started. Does not decide when."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from fastapi import FastAPI

from ktransformers.errors import KTransformersError
from ktransformers.server.app import model_app
from ktransformers.server.backend.interfaces.on_demand import OnDemandInterface
from ktransformers.server.config import ServerConfig
from ktransformers.server.service import Service
from ktransformers.server.telemetry.activity import LoadingLog, duration
from ktransformers.server.telemetry.traces import TraceSink

__all__ = ["ServedModel"]

logger = logging.getLogger("ktransformers.server")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model. app: the routes over the backend, without what stands in front of them. It outlives every
    load.
    """

    app: FastAPI
    backend: OnDemandInterface

    @classmethod
    def of(cls, backend: OnDemandInterface, config: ServerConfig, traces: TraceSink | None = None) -> ServedModel:
        """Make the served model of a backend. config: with the model's own names."""
        return cls(model_app(backend, config, traces), backend)

    @property
    def service(self) -> Service:
        """The service that the model's routes share."""
        service = self.app.state.service
        assert isinstance(service, Service)
        return service

    @property
    def name(self) -> str:
        """The first of the model's names."""
        return self.service.config.model_names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use for the model."""
        return self.service.config.model_names

    async def start(self) -> None:
        """Load the model. Raises KTransformersError."""
        began = time.monotonic()
        await self.backend.start(LoadingLog(self.name))
        self.backend.model.tokenizer.use_tool_format(self.service.config.tool_format)
        await asyncio.to_thread(lambda: self.service.json_limits)  # looks at the whole vocabulary
        model = self.backend.model
        logger.info("%s: %s, %d tokens of context", self.name, model.description, model.max_len)
        logger.info("%s is ready after %s", self.name, duration(time.monotonic() - began))

    async def lost(self) -> KTransformersError:
        """Wait until the model cannot go on though nobody closed it, and return the reason."""
        return await self.backend.lost()

    async def close(self) -> None:
        """Free the model."""
        await self.backend.close()
