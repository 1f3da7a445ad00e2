"""A stream of server-sent events that begins while its model loads, so that nobody on the way takes it for dead.

(200, comment, comment, ...)  then what the route sends without its head, or its error as an event
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Send

from ktransformers.errors import KTransformersError
from ktransformers.server.api.anthropic.errors import PATH as ANTHROPIC_PATH
from ktransformers.server.responses import error_body, json_bytes

__all__ = ["EarlyStream"]

_PING = b": the model is being loaded\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EarlyStream:
    """Passes messages between a route and its client, and can begin the response before the route does. path: of the
    route, which decides the shape of errors.

    Before the first `ping` it lets everything through.
    """

    def __init__(self, send: Send, path: str):
        self._send, self._path = send, path
        self._has_begun = False
        self._status = 200
        self._refusal = b""

    @property
    def has_begun(self) -> bool:
        """Whether the client has received the response's head, so that an error can only be an event."""
        return self._has_begun

    async def ping(self) -> None:
        """Send a ping, which says that the model is on its way, and the response's head before the first one."""
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await self._send({"type": "http.response.body", "body": _PING, "more_body": True})

    async def fail(self, error: KTransformersError) -> None:
        """End the stream with an error event."""
        await self._end_with(error_body(error, self._path))

    async def send(self, message: Message) -> None:
        """Send the route's message to the client."""
        if not self._has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            await self._send(message)
        else:
            self._refusal += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end_with(_object(self._refusal))

    async def _end_with(self, body: dict[str, Any]) -> None:
        await self._send({"type": "http.response.body", "body": self._event(body), "more_body": False})

    def _event(self, body: dict[str, Any]) -> bytes:
        """An error's body as its dialect has it in a stream."""
        if self._path.startswith(ANTHROPIC_PATH):
            body.pop("request_id", None)
            return b"event: error\ndata: " + json_bytes(body) + b"\n\n"
        if self._path == "/v1/responses":
            said = body.get("error") or {}
            event = {"type": "error", **{name: said.get(name) for name in ("code", "message", "param")}}
            return b"event: error\ndata: " + json_bytes(event | {"sequence_number": 0}) + b"\n\n"
        return b"data: " + json_bytes(body) + b"\n\ndata: [DONE]\n\n"


def _object(data: bytes) -> dict[str, Any]:
    """A response's body. A client that has left gets none that is JSON."""
    try:
        body = json.loads(data)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
