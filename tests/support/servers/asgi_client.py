"""A client of an ASGI app in this process that reads a response part by part, and leaves when it likes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class Connection:
    """One request. status and headers are there after `begun`."""

    def __init__(self, app: ASGIApp, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None):
        sent = {"host": "localhost", "content-type": "application/json"} | (headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 4711),
            "server": ("localhost", 80),
        }
        self._body: bytes | None = b"" if body is None else json.dumps(body).encode()
        self._left, self._begun = asyncio.Event(), asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.status, self.headers = 0, dict[str, str]()
        self._events = b""  # what has come of the next one
        self._task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self._begun.set()
        else:
            if message["body"]:
                self._parts.put_nowait(message["body"])
            if not message.get("more_body", False):
                self._parts.put_nowait(None)

    async def begun(self) -> Connection:
        await self._begun.wait()
        return self

    async def part(self) -> bytes | None:
        """The next part of the body; None at its end."""
        return await self._parts.get()

    async def event(self) -> bytes | None:
        """The next server-sent event, whatever parts it comes in; None at the end. Not to be mixed with the others."""
        while (end := self._events.find(b"\n\n") + 2) < 2:
            part = await self.part()
            if part is None:
                assert not self._events, "the stream ends within an event"
                return None
            self._events += part
        event, self._events = self._events[:end], self._events[end:]
        return event

    async def events(self) -> list[bytes]:
        """All events that are to come."""
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        await self._task
        return found

    async def rest(self) -> list[bytes]:
        """All parts that are to come. The app is through with the request then."""
        parts = []
        while (part := await self.part()) is not None:
            parts.append(part)
        await self._task
        return parts

    async def json(self) -> Any:
        return json.loads(b"".join(await self.rest()))

    async def leave(self) -> None:
        """Close the connection, and wait until the app has noticed."""
        self._left.set()
        await self._task
