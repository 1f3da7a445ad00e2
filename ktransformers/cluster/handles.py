"""Replicas through a deployment handle of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from typing_extensions import override

from ktransformers.cluster.affinity import block_keys
from ktransformers.cluster.backend import ReplicaLostError, Replicas
from ktransformers.cluster.records import Ask, Facts, Message, Order, ReplicaReport, decode, encode
from ktransformers.errors import EngineError, reason_of

__all__ = ["ServeReplicas"]

logger = logging.getLogger("ktransformers.server")

_REPLY_SECONDS = 5.0
"""How long replicas may take to obey, or to report; that is longer than their event loops ever wait."""


class ServeReplicas(Replicas):
    """The replicas behind a deployment handle of Ray Serve. handle: of a deployment of EngineReplica. block_size:
    tokens that prompts are compared by, a page."""

    def __init__(self, handle: Any, block_size: int):
        self._handle, self._block_size = handle, block_size

    @override
    async def ask(self, ask: Ask) -> AsyncGenerator[Message, None]:
        keys = b"".join(block_keys(ask.prompt_ids, ask.cache_salt, self._block_size))
        response = self._handle.options(stream=True).answer.remote(encode(ask), keys)
        try:
            async for data in response:
                yield decode(data, Message)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):
                raise ReplicaLostError(_reason(error)) from error
            raise EngineError(f"a replica failed: {_reason(error)}") from error
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(_reason(error)) from error
        finally:
            response.cancel()

    @override
    async def facts(self) -> Facts:
        while True:
            try:
                return decode(await self._handle.facts.remote(), Facts)  # type: ignore[no-any-return]
            except (RayError, RayServeException) as error:  # it died while it was asked: another one comes
                logger.warning("a replica was asked what it has loaded, and does not say: %s", _reason(error))
                await asyncio.sleep(1.0)

    async def _all(self, method: str, *args: bytes) -> list[Any]:
        """What all say that answer."""
        try:
            results = await self._handle.broadcast(method, *args).results_async(
                timeout_s=_REPLY_SECONDS, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError) as error:
            logger.debug("%s: %s", method, _reason(error))
            return []
        return [result for result in results if not isinstance(result, BaseException)]

    @override
    async def reports(self) -> list[ReplicaReport]:
        return [decode(data, ReplicaReport) for data in await self._all("report")]

    @override
    async def send(self, order: Order) -> None:
        await self._all("obey", encode(order))


def _reason(error: BaseException) -> str:
    """In one line: Ray's messages are pages."""
    return f"{type(error).__name__}: {reason_of(error)}"
