"""Bodies of errors in Anthropic's shape, and the `request-id` that every answer of its routes carries."""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktransformers.errors import ContextLengthError

__all__ = ["ERROR_RESPONSES", "PATH", "THREAD_CODE", "RequestIds", "error_shape", "too_long"]

PATH = "/v1/messages"
"""Where this dialect's routes begin."""

THREAD_CODE = "thread_unsupported_request"
"""By which official clients know that they have to send whole conversations, and go on with that."""

_REQUEST_ID: ContextVar[str | None] = ContextVar("anthropic_request_id", default=None)

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_shape(status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    """Return the body of an error in Anthropic's shape; our code for it is in `details`. See responses.ERROR_SHAPES."""
    type = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": type, "message": message}
    if code is not None:
        error["details"] = {"error_code": code}
    if code == THREAD_CODE:
        error["details"]["unsupported"] = [param]
    return {"type": "error", "error": error, "request_id": _REQUEST_ID.get()}


def too_long(error: ContextLengthError) -> ContextLengthError:
    """Return the error in the words by which Claude Code knows that it has to shorten its conversation."""
    return ContextLengthError(
        f"prompt is too long: {error.prompt_len} tokens > {error.max_len} maximum ({error})",
        prompt_len=error.prompt_len,
        max_len=error.max_len,
    )


class RequestIds:
    """ASGI middleware: gives each request to this dialect's routes an id, which its response and its errors name."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = request_id
            await send(message)

        token = _REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            _REQUEST_ID.reset(token)


def _documented(description: str) -> dict[str, Any]:
    error = {
        "type": "object",
        "required": ["type", "message"],
        "properties": {
            "type": {"type": "string"},
            "message": {"type": "string"},
            "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
        },
    }
    schema = {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": error,
            "request_id": {"type": ["string", "null"]},
        },
    }
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: _documented("The request is wrong"),
    401: _documented("The API key is missing or wrong"),
    403: _documented("A web page of another site asks"),
    404: _documented("There is no such model"),
    408: _documented("Too slow"),
    413: _documented("The body is too large"),
    421: _documented("The request names a host that this server is not"),
    503: _documented("Not now: loading, draining, or too many requests wait"),
}
"""What the API's document says of errors on these routes."""
