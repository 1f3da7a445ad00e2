"""One line per request: who asked for what, the outcome, and of an answer its counts, times and rates. Never a text.

    127.0.0.1:50312 POST /v1/chat/completions 200 in 1.234 s, chatcmpl-...: 812 prompt tokens (700 cached),
        prefill 0.301 s (372.1 tokens/s), 96 tokens in 0.912 s (104.2 tokens/s), stop
    127.0.0.1:50314 POST /v1/chat/completions 400 in 0.002 s: temperature: Input should be a valid number

The reason of a refusal is its error message without what it quotes, which may be anything that a client sent.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktransformers.server.answers.generations import Tally
from ktransformers.server.api_paths import PROBE_PATHS, is_of_page

__all__ = ["RequestLog", "note_reason", "note_request", "without_quotes"]

logger = logging.getLogger("ktransformers.server")

_GENERATION_KEY = "ktransformers.generation"
_REASON_KEY = "ktransformers.reason"
_MAX_PATH, _MAX_REASON = 120, 240
_QUOTED = re.compile(r"""(?<!\w)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"].*)""", re.DOTALL)  # also one never closed


def note_request(request: Request, request_id: str, tally: Tally) -> None:
    """Say which generations this request is about, for its line in the log."""
    request.scope[_GENERATION_KEY] = (request_id, tally)


def note_reason(scope: MutableMapping[str, Any], reason: str) -> None:
    """Say why this request is refused, for its line in the log: nothing that the client wrote may be in it."""
    scope[_REASON_KEY] = reason


def without_quotes(message: str) -> str:
    """An error message as the log may show it: what it quotes is left out."""
    return _QUOTED.sub("'...'", message)


def _described(scope: Scope) -> str:
    if _GENERATION_KEY not in scope:
        return ""
    request_id, tally = scope[_GENERATION_KEY]
    total = tally.total
    reasons = ", ".join(dict.fromkeys(reason or "cut off" for reason in tally.finish_reasons))
    return (
        f", {request_id}: {total.prompt_len} prompt tokens ({total.cached_len} cached), "
        f"prefill {total.prefill_seconds:.3f} s ({total.prefill_rate:.1f} tokens/s), "
        f"{total.completion_len} tokens in {total.decode_seconds:.3f} s ({total.decode_rate:.1f} tokens/s), {reasons}"
    )


def _refused(scope: Scope) -> str:
    reason = " ".join(scope.get(_REASON_KEY, "").split())
    if not reason:
        return ""
    shown = reason if len(reason) <= _MAX_REASON else reason[: _MAX_REASON - 3] + "..."
    return f": {shown.encode('ascii', 'backslashreplace').decode()}"


def _asked_by(scope: Scope) -> str:
    host, port = scope.get("client") or ("unknown", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _asked_for(scope: Scope) -> str:
    """The path, escaped so that it stays one word, without the query."""
    path = quote(scope["path"], safe="/:@-._~,;=+!*()$&")
    return path if len(path) <= _MAX_PATH else path[: _MAX_PATH - 3] + "..."


class RequestLog:
    """ASGI middleware, the outermost. clock: seconds, for tests."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.perf_counter):
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = self._clock(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = status or 500  # the framework answers so, outside of us
            raise
        finally:
            is_quiet = scope["path"] in PROBE_PATHS or is_of_page(scope["path"])
            level = logging.DEBUG if is_quiet else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(
                    level,
                    "%s %s %s %s in %.3f s%s",
                    _asked_by(scope),
                    scope["method"],
                    _asked_for(scope),
                    status or "without an answer",
                    self._clock() - began,
                    _described(scope) + _refused(scope),
                )
