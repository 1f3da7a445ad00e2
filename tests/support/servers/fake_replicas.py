"""Replicas without Ray: real balance_serve backends in this process, which a test loses when it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from typing_extensions import override

from ktransformers.cluster.backend import ReplicaLostError, Replicas
from ktransformers.cluster.records import Ask, Facts, Message, Order, ReplicaReport, Told, decode, encode
from ktransformers.cluster.replica import Replica
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface


class FakeReplicas(Replicas):
    """Asks the replicas in turn. dies: whether the one that was asked is lost, asked after each message.

    Messages, asks and orders go through their bytes, as they do between processes.
    """

    def __init__(
        self, *backends: BalanceServeInterface, dies: Callable[[Ask, int], bool] = lambda ask, num_told: False
    ):
        self._replicas = [Replica(f"replica{number}", backend) for number, backend in enumerate(backends)]
        self.dies = dies
        self.asked: list[Ask] = []
        self.told: list[Told] = []
        self.orders: list[Order] = []
        self.are_there = asyncio.Event()
        self.are_there.set()
        self._killed = asyncio.Event()

    def kill(self) -> None:
        """All that are asked at the moment are lost, whether they have something to say or not."""
        self._killed.set()
        self._killed = asyncio.Event()

    @override
    async def ask(self, ask: Ask) -> AsyncGenerator[Message, None]:
        await self.are_there.wait()
        replica = self._replicas[len(self.asked) % len(self._replicas)]
        self.asked.append(ask)
        num_told = 0
        async with aclosing(replica.answer(decode(encode(ask), Ask))) as messages:
            async for message in _until(messages, self._killed):
                for one in _single(message):
                    if self.dies(ask, num_told):
                        raise ReplicaLostError("it died")
                    came = decode(encode(one), Message)
                    if isinstance(came, Told):
                        num_told += 1
                        self.told.append(came)
                    yield came

    @override
    async def facts(self) -> Facts:
        return decode(encode(self._replicas[0].facts()), Facts)

    @override
    async def reports(self) -> list[ReplicaReport]:
        return [decode(encode(replica.report()), ReplicaReport) for replica in self._replicas]

    @override
    async def send(self, order: Order) -> None:
        self.orders.append(order)
        for replica in self._replicas:
            replica.obey(decode(encode(order), Order))

    async def close(self) -> None:
        for replica in self._replicas:
            await replica.close()


def _single(message: Message) -> list[Message]:
    """One event each: a reader that comes late gets many at once, and a test counts them."""
    if not isinstance(message, Told):
        return [message]
    return [msgspec.structs.replace(message, events=[event]) for event in message.events]


async def _until(messages: AsyncGenerator[Message, None], killed: asyncio.Event) -> AsyncGenerator[Message, None]:
    end = asyncio.ensure_future(killed.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(messages, None))
            try:
                await asyncio.wait({coming, end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
            if end.done():
                raise ReplicaLostError("it was killed")
            message = coming.result()
            if message is None:
                return
            yield message
    finally:
        end.cancel()
