"""A replica's side of an answer: asks its backend, and tells the events in batches. Knows no Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from ktransformers.cluster.records import Ask, Began, Event, Facts, Message, Order, ReplicaReport, RequestFailed, Told
from ktransformers.core import TokenEvent
from ktransformers.engine.model.card import ModelCard
from ktransformers.errors import KTransformersError
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface

__all__ = ["Replica"]


class _Unsaid:
    """Events that have come and are not told yet. Its size is bounded by the answer: a token is some tens of bytes."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.is_over = False
        self._wake = asyncio.Event()

    async def fill(self, answer: AsyncGenerator[TokenEvent, None], num_told: int) -> None:
        """Take all events of the answer but the first num_told, which were told before."""
        try:
            async with aclosing(answer) as events:
                async for event in events:
                    if num_told:
                        num_told -= 1
                        continue
                    self.events.append(event)
                    self._wake.set()
        finally:
            self.is_over = True
            self._wake.set()

    async def take(self) -> list[TokenEvent]:
        """Take the events that there are, once there are some; none at the end."""
        while not self.events and not self.is_over:
            self._wake.clear()
            await self._wake.wait()
        taken, self.events = self.events, []
        return taken


class Replica:
    """A replica's side of answers and orders. name: what others call it. backend: started by somebody else, who closes
    it. node: see ReplicaReport."""

    def __init__(self, name: str, backend: BalanceServeInterface, node: str = ""):
        self._name, self._backend, self._node = name, backend, node
        self.lost: KTransformersError | None = None  # why it cannot go on
        self._losing = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        self.lost = await self._backend.lost()

    async def answer(self, ask: Ask) -> AsyncGenerator[Message, None]:
        """Yield Began, then the events behind ask.past as they come; whoever stops reading ends the answer."""
        request = GenerationRequest(
            request_id=ask.request_id,
            prompt_ids=ask.prompt_ids,
            params=ask.params,
            priority=ask.priority,
            timeout=ask.timeout,
            cache_salt=ask.cache_salt,
            past=ask.past,
            is_suspended=lambda: ask.is_suspended,
            prediction_ids=ask.prediction_ids,
        )
        unsaid = _Unsaid()
        filling = asyncio.create_task(unsaid.fill(self._backend.inference(request), len(ask.past)))
        try:
            await asyncio.sleep(0)  # from here on the backend knows the request, so that orders find it
            yield Began(self._name)
            while events := await unsaid.take():
                yield Told([Event.of(event) for event in events], events[-1].stats)
            await filling
        except KTransformersError as error:
            yield RequestFailed(type(error).__name__, str(error), is_lost=not self._backend.is_ready)
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    def obey(self, order: Order) -> None:
        """Carry out an order, if its request is here."""
        {"suspend": self._backend.suspend, "resume": self._backend.resume, "end": self._backend.end}[order.what](
            order.request_id
        )

    def facts(self) -> Facts:
        """Return the facts of the loaded model."""
        model = self._backend.model
        return Facts(
            max_len=model.max_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            default_params=model.default_params,
            architecture=model.architecture,
            description=model.description,
            is_models_limit=model.is_models_limit,
            embeddings=model.embeddings,
            card=_card(model.card),
            digest=model.digest,
            max_drafts=model.max_drafts,
            drafter=model.drafter,
            max_running=self._backend.max_running,
        )

    def report(self) -> ReplicaReport:
        """Return the replica's figures of this moment."""
        return ReplicaReport(self._name, self._backend.stats(), self._node, os.getpid(), self._backend.pause)

    async def close(self) -> None:
        """End what this object began; the backend is not its own."""
        self._losing.cancel()
        await asyncio.gather(self._losing, return_exceptions=True)


def _card(card: ModelCard) -> dict[str, Any]:
    """What of it is plain; how the pooling is called has been understood before."""
    return asdict(replace(card, pooling_type=None))
