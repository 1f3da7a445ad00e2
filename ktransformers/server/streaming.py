"""Streams to clients that may leave or stall. Knows ASGI, not what is streamed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

__all__ = ["ABORT_KEY", "EventStream", "unless_disconnected"]

logger = logging.getLogger(__name__)

ABORT_KEY = "ktransformers.abort"
"""Where our protocol class puts a function that drops the connection at once."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; only logs see it."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response that `work` makes; when the client leaves first, `work` is cancelled within one of its
    awaits.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Response that sends what a generator of bytes yields, until it ends, the client leaves, or has not read for
    send_timeout.

    ping: sent between two chunks, or before the first, after `ping_seconds` of silence: proxies and clients give up on
    connections that say nothing, and a long prompt takes minutes. b"" or 0: never.

    In every case the generator is closed before the response ends, and on_end is called after that.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        send_timeout: float,
        on_end: Callable[[], None],
        ping: bytes = b"",
        ping_seconds: float = 0.0,
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._chunks, self._send_timeout, self._on_end = chunks, send_timeout, on_end
        self._ping, self._ping_seconds = ping, ping_seconds
        self._sending = asyncio.Lock()  # chunks and pings take turns
        self._sent_at = 0.0

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.create_task(work) for work in (self._send_all(scope, send), _disconnected(receive))]
        if self._ping and self._ping_seconds:
            tasks.append(asyncio.create_task(self._send_pings(scope, send)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._on_end()
        if isinstance(results[0], Exception):
            raise results[0]

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            async with self._sending:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._sent_at = asyncio.get_running_loop().time()
            async for chunk in chunks:
                async with self._sending:
                    if not await self._send_part(chunk, scope, send):
                        return
            async with self._sending:
                self._sent_at = math.inf  # no ping comes after the end
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, part: bytes, scope: Scope, send: Send) -> bool:
        """Whether the client took it in time."""
        try:
            async with asyncio.timeout(self._send_timeout):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:
            logger.warning("a client did not read its stream for %s s: the stream is ended", self._send_timeout)
            if ABORT_KEY in scope:  # closing politely would wait for the client to read what is buffered
                scope[ABORT_KEY]()
            return False
        self._sent_at = asyncio.get_running_loop().time()
        return True

    async def _send_pings(self, scope: Scope, send: Send) -> None:
        """Returns when the client does not read."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            await asyncio.sleep(self._sent_at + self._ping_seconds - loop.time())
            async with self._sending:
                if loop.time() - self._sent_at >= self._ping_seconds and not await self._send_part(
                    self._ping, scope, send
                ):
                    return
