"""One line per request: what was asked for, counts, times, rates. Never a text, never a key.

INFO ktransformers.server: POST /v1/chat/completions 200 in 1.234 s, chatcmpl-...: 812 prompt tokens (700 cached),
     prefill 0.301 s (372.1 tokens/s), 96 tokens in 0.912 s (104.2 tokens/s), stop
"""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktransformers.server.api_paths import OPEN_PATHS
from ktransformers.server.generations import Tally

__all__ = ["RequestLog", "note_request"]

logger = logging.getLogger("ktransformers.server")

_KEY = "ktransformers.generation"


def note_request(request: Request, request_id: str, tally: Tally) -> None:
    """Say which generations this request is about, for its line in the log."""
    request.scope[_KEY] = (request_id, tally)


def _described(scope: Scope) -> str:
    if _KEY not in scope:
        return ""
    request_id, tally = scope[_KEY]
    total = tally.total
    reasons = ", ".join(dict.fromkeys(reason or "cut off" for reason in tally.finish_reasons))
    return (
        f", {request_id}: {total.prompt_len} prompt tokens ({total.cached_len} cached), "
        f"prefill {total.prefill_seconds:.3f} s ({total.prefill_rate:.1f} tokens/s), "
        f"{total.completion_len} tokens in {total.decode_seconds:.3f} s ({total.decode_rate:.1f} tokens/s), {reasons}"
    )


class RequestLog:
    """ASGI middleware. Probes are logged at the debug level only. Paths that no route knows may hold anything."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
            if logger.isEnabledFor(level):
                seconds = time.perf_counter() - began
                described = _described(scope)
                logger.log(level, "%s %s %d in %.3f s%s", scope["method"], _route(scope), status, seconds, described)


def _route(scope: dict[str, Any] | Any) -> str:
    """The path of the route that answered, as it was declared."""
    route = scope.get("route")
    return getattr(route, "path", "(no route)")
