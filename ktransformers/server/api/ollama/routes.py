"""The parts that the routes of this dialect share: bodies of any content type, and errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import Response
from typing_extensions import override

from ktransformers.server.bodies import BodyRoute, body_route
from ktransformers.server.http.fields import FieldTable

__all__ = ["ERRORS", "AnyTypeRoute", "any_type_route"]

_ERROR = {
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
        }
    }
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: _ERROR | {"description": description}
    for status, description in (
        (400, "The request is wrong"),
        (401, "The API key is missing or wrong"),
        (403, "A web page of another site asks"),
        (404, "There is no such model"),
        (408, "Too slow"),
        (413, "The body is too large"),
        (421, "The request names a host that this server is not"),
        (503, "Not now: loading, draining, or too many requests wait"),
    )
}
"""Responses that a router documents."""


class AnyTypeRoute(BodyRoute):
    """A route that takes every body as JSON: the commands in Ollama's documentation are `curl -d`, which calls it a
    form.
    """

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_any(request: Request) -> Response:
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            request.scope["headers"] = [*others, (b"content-type", b"application/json")]
            return await handle(request)

        return handle_any


def any_type_route(table: FieldTable) -> type[BodyRoute]:
    """Return the class of routes whose bodies are sorted by this table, and are JSON whatever their content type."""
    return body_route(table, AnyTypeRoute)
