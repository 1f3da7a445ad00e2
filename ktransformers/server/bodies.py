"""Bodies of requests: read, measured and parsed before their fields are checked. Knows JSON, not what is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from ktransformers.errors import ConfigError
from ktransformers.server.json_limits import JsonLimits
from ktransformers.server.service import service_of

__all__ = ["BodyRoute", "body_size"]

_SHORT = 16 << 10
"""Bytes that are parsed in less time than a hand-over to another thread takes to pay."""


class BodyRoute(APIRoute):
    """A route whose body is measured before it is parsed, on a thread when it is long."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_measured(request: Request) -> Response:
            return await handle(_MeasuredRequest(request.scope, request.receive))

        return handle_measured


class _MeasuredRequest(Request):
    """FastAPI asks for `json` when the content type says so."""

    async def json(self) -> Any:
        if not hasattr(self, "_parsed"):
            data, service = await self.body(), service_of(self)
            try:
                if len(data) < _SHORT:
                    self._parsed = _parse(data, service.json_limits)
                else:
                    self._parsed = await service.workers.run(len(data), _parse, data, service.json_limits)
            except ConfigError as error:  # of what is raised here, FastAPI lets its own exceptions through
                raise HTTPException(400, str(error)) from error
        return self._parsed


def _parse(data: bytes, limits: JsonLimits) -> Any:
    limits.check(data)
    return json.loads(data)


async def body_size(request: Request) -> int:
    """Bytes of the body, which has been read."""
    return len(await request.body())
