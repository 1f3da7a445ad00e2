"""Streams that have nothing to say for a while, and tokens that have no text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from ktransformers.core import TokenEvent
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.config import ServerConfig
from ktransformers.server.streaming import EventStream
from tests.support.servers.fake_backend import FakeBackend

PING = b": keep-alive\n\n"


class Reader:
    """An ASGI client. sent: the bodies that it got."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.changed = asyncio.Event()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
            self.changed.set()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def until(self, num_parts: int) -> None:
        """Return when so many parts came."""
        while len(self.sent) < num_parts:
            self.changed.clear()
            await self.changed.wait()


async def stream_to(reader: Reader, chunks: AsyncGenerator[bytes, None], ping_seconds: float) -> None:
    response = EventStream(chunks, "text/event-stream", 60.0, lambda: None, PING, ping_seconds)
    await response({"type": "http"}, reader.receive, reader.send)


def test_a_silent_stream_says_that_it_lives() -> None:
    async def main() -> list[bytes]:
        reader, gate = Reader(), asyncio.Event()

        async def chunks() -> AsyncGenerator[bytes, None]:
            await gate.wait()
            yield b"one"
            yield b"two"

        streaming = asyncio.create_task(stream_to(reader, chunks(), 0.01))
        await reader.until(2)
        assert set(reader.sent) == {PING}
        gate.set()
        await streaming
        return reader.sent

    sent = asyncio.run(main())
    assert [part for part in sent if part != PING] == [b"one", b"two", b""]
    assert sent[-1] == b""  # nothing comes after the end


@pytest.mark.parametrize("ping_seconds", [0.0, 3600.0])
def test_a_stream_that_speaks_has_no_pings(ping_seconds: float) -> None:
    async def main() -> list[bytes]:
        reader = Reader()

        async def chunks() -> AsyncGenerator[bytes, None]:
            for _ in range(3):
                yield b"more"

        await stream_to(reader, chunks(), ping_seconds)
        return reader.sent

    assert asyncio.run(main()) == [b"more"] * 3 + [b""]


class SlowBackend(FakeBackend):
    """Its prompts take until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        await self.gate.wait()
        async for event in super().inference(request):
            yield event


def lines_of(body: dict[str, Any], ping_seconds: float = 0.0) -> list[str]:
    """What /v1/completions streams to this request."""

    async def main() -> list[str]:
        backend = SlowBackend()
        app = create_app(backend, ServerConfig(model_names=("demo",), ping_seconds=ping_seconds))
        transport = httpx.ASGITransport(app)
        if ping_seconds:
            asyncio.get_running_loop().call_later(5 * ping_seconds, backend.gate.set)
        else:
            backend.gate.set()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/v1/completions", json={"prompt": [1], "stream": True, "max_tokens": 3} | body)
        return [line for line in answer.text.split("\n") if line]

    return asyncio.run(main())


def test_the_stream_of_a_long_prompt_begins_with_pings() -> None:
    lines = lines_of({}, ping_seconds=0.02)
    assert lines[0] == ": keep-alive"
    assert lines[-1] == "data: [DONE]"


def test_tokens_without_text_are_counted_where_ends_are_ignored() -> None:
    def chunks(body: dict[str, Any]) -> list[Any]:
        return [json.loads(line[6:])["choices"][0] for line in lines_of(body) if line.startswith("data: {")]

    assert [chunk["finish_reason"] for chunk in chunks({})] == ["length"]  # the fake's tokens have no text
    shown = chunks({"ignore_eos": True})
    assert [(chunk["text"], chunk["finish_reason"]) for chunk in shown] == [("", None), ("", None), ("", "length")]
