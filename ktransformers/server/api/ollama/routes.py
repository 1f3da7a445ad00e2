"""What the routes of this dialect share: bodies of any content type, errors, the header of ignored names."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import Response
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.server.api.ollama.fields import IGNORED_HEADER, LoggedNames, shown_names
from ktransformers.server.bodies import BodyRoute
from ktransformers.server.service import Service

__all__ = ["ERRORS", "AnyTypeRoute", "check_strict", "say_ignored"]

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
    """Takes every body as JSON: the commands in Ollama's documentation are `curl -d`, which calls it a form."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_any(request: Request) -> Response:
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            request.scope["headers"] = [*others, (b"content-type", b"application/json")]
            return await handle(request)

        return handle_any


def check_strict(service: Service, ignored: list[str]) -> None:
    """Raises UnsupportedError for fields without effect where the operator wants none of them."""
    if ignored and service.config.is_strict_on_fields:
        raise UnsupportedError(
            f"{shown_names(ignored)[0]} has no effect here, and --strict_requests refuses such fields"
        )


def say_ignored(request: Request, response: Response, ignored: list[str]) -> Response:
    """The response, with a header that names the fields of the request that had no effect; the log says each once."""
    if ignored:
        response.headers[IGNORED_HEADER] = ", ".join(shown_names(ignored))
        _logged(request).say(ignored)
    return response


def _logged(request: Request) -> LoggedNames:
    """Of this app."""
    state = request.app.state
    if not hasattr(state, "ollama_names"):
        state.ollama_names = LoggedNames()
    names = state.ollama_names
    assert isinstance(names, LoggedNames)
    return names
