"""Logs one line per request: who asked for what, the outcome, and of an answer its counts, times and rates. Never a
text.

    127.0.0.1:50312 POST /v1/chat/completions 200 in 1.234 s, chatcmpl-...: 812 prompt tokens (700 cached),
        prefill 0.301 s (372.1 tokens/s), 96 tokens in 0.912 s (104.2 tokens/s), 40 of 52 draft tokens accepted,
        stop [alice, 3f2a...]
    127.0.0.1:50314 POST /v1/chat/completions 400 in 0.002 s: temperature: Input should be a valid number
        [alice, my-id-17]

In brackets: the name of the API key, where there are keys, and the request's id, which is in x-request-id of the
response: the client's own if it sent one that can stand in a log, else a new one. The reason of a
refusal is its error message without what it quotes, which may be anything that a client sent.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktransformers.server.http.api_paths import PROBE_PATHS, is_of_page, plain_path
from ktransformers.server.telemetry.metrics import Refusals
from ktransformers.server.telemetry.request_metrics import RequestMetrics
from ktransformers.server.telemetry.status_window import PastRequest, RecentRequests
from ktransformers.server.telemetry.traces import Answering, Outcome, TraceSink, span_of

__all__ = [
    "RequestLog",
    "note_id",
    "note_key",
    "note_reason",
    "note_request",
    "refusals_of",
    "request_id_of",
    "without_quotes",
]

logger = logging.getLogger("ktransformers.server")

_NOTES_KEY, _REFUSALS_KEY = "ktransformers.notes", "ktransformers.refusals"
_LEFT = 499  # the client's doing, and nobody has refused anything
_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_MAX_PATH, _MAX_REASON = 120, 240
_QUOTED = re.compile(r"""(?<!\w)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"].*)""", re.DOTALL)  # also one never closed


@dataclass(slots=True)
class _Notes:
    """What became known of a request on its way. Copies of its scope share the one object."""

    request_id: str = ""
    key_name: str = ""
    reason: str = ""
    answering: Answering | None = None
    error: str = ""


def _notes(scope: MutableMapping[str, Any]) -> _Notes:
    notes = scope.setdefault(_NOTES_KEY, _Notes())
    assert isinstance(notes, _Notes)
    return notes


def request_id_of(request: Request) -> str:
    """Return the id under which the log shows this request."""
    return _notes(request.scope).request_id


def refusals_of(request: Request) -> Refusals:
    """Return the counts of requests that the server which got this request has refused until now."""
    found = request.scope.get(_REFUSALS_KEY)
    return found if isinstance(found, Refusals) else Refusals()


def note_id(scope: MutableMapping[str, Any], request_id: str) -> None:
    """Note the id under which a request is known, for one that is asked again without RequestLog in front."""
    _notes(scope).request_id = request_id


def note_request(request: Request, answering: Answering) -> None:
    """Note which generations this request is about, for its line in the log and its spans."""
    _notes(request.scope).answering = answering


def note_key(scope: MutableMapping[str, Any], name: str) -> None:
    """Note the name of the request's API key, not the key, for its line in the log."""
    _notes(scope).key_name = name


def note_reason(scope: MutableMapping[str, Any], reason: str, error: BaseException | None = None) -> None:
    """Note why this request is refused, for its line in the log: nothing that the client wrote may be in it.

    error: whose class its span names.
    """
    notes = _notes(scope)
    notes.reason, notes.error = reason, "" if error is None else type(error).__name__


def without_quotes(message: str) -> str:
    """Return an error message as the log may show it: what it quotes is left out."""
    return _QUOTED.sub("'...'", message)


def _reasons(request_metrics: RequestMetrics) -> str:
    left = "goes on" if request_metrics.goes_on else "cut off"
    return ", ".join(dict.fromkeys(reason or left for reason in request_metrics.finish_reasons))


def _described(notes: _Notes) -> str:
    if notes.answering is None:
        return ""
    request_metrics = notes.answering.request_metrics
    total, reasons = request_metrics.total, _reasons(request_metrics)
    drafts = f", {total.num_accepted} of {total.num_drafted} draft tokens accepted" if total.num_drafted else ""
    return (
        f", {notes.answering.id}: {total.prompt_len} prompt tokens ({total.cached_len} cached), "
        f"prefill {total.prefill_seconds:.3f} s ({total.prefill_rate:.1f} tokens/s), "
        f"{total.completion_len} tokens in {total.decode_seconds:.3f} s ({total.decode_rate:.1f} tokens/s)"
        f"{drafts}, {reasons}"
    )


def _refused(notes: _Notes) -> str:
    reason = " ".join(notes.reason.split())
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


def _new_notes(scope: Scope) -> _Notes:
    """With the id that the client sent. One that could not stand in a log is as if it were not there."""
    sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
    is_good = len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0]) is not None
    return _Notes(sent[0].decode() if is_good else secrets.token_hex(8))


def _is_for_answers(scope: Scope, notes: _Notes, status: int) -> bool:
    """Those that got that far, and those that were refused on their way. Strangers without a key leave no trace."""
    return notes.answering is not None or (scope["method"] == "POST" and status >= 400 and status not in (401, 404))


def _past(scope: Scope, notes: _Notes, status: int, seconds: float) -> PastRequest:
    past = PastRequest(
        notes.request_id, round(time.time() - seconds, 3), _asked_for(scope), status, round(seconds, 4), notes.key_name
    )
    if notes.answering is None:
        return past
    request_metrics = notes.answering.request_metrics
    total = request_metrics.total
    return replace(
        past,
        id=notes.answering.id,
        prompt_tokens=total.prompt_len,
        cached_tokens=total.cached_len,
        completion_tokens=total.completion_len,
        draft_tokens=total.num_drafted,
        accepted_tokens=total.num_accepted,
        ttft=None if request_metrics.first_token_seconds is None else round(request_metrics.first_token_seconds, 4),
        finish_reason=_reasons(request_metrics),
    )


def _trace(traces: TraceSink, scope: Scope, notes: _Notes, status: int, seconds: float) -> None:
    outcome = Outcome(
        path=plain_path(scope["path"]),
        status=status,
        seconds=seconds,
        answering=notes.answering,
        error=notes.error,
        server=scope.get("server"),
    )
    span = span_of(outcome)
    if span is None:
        return
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    traces.write(span, headers)


class RequestLog:
    """The outermost ASGI middleware, which logs each request. recent: where requests for answers are kept; traces:
    where their spans go; refusals: where answers with an error status are counted, but those of probes.

    clock: seconds, for tests.
    """

    def __init__(
        self,
        app: ASGIApp,
        recent: RecentRequests | None = None,
        clock: Callable[[], float] = time.perf_counter,
        traces: TraceSink | None = None,
        refusals: Refusals | None = None,
    ):
        self._app, self._recent, self._clock, self._traces = app, recent, clock, traces
        self._refusals = Refusals() if refusals is None else refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI), and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = self._clock(), 0
        notes = scope[_NOTES_KEY] = _new_notes(scope)
        scope[_REFUSALS_KEY] = self._refusals

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", notes.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            status = status or 500  # the framework answers so, outside of us
            notes.error = type(error).__name__
            raise
        finally:
            seconds = self._clock() - began
            if self._recent is not None and _is_for_answers(scope, notes, status):
                self._recent.add(_past(scope, notes, status, seconds))
            if self._traces is not None and _is_for_answers(scope, notes, status):
                _trace(self._traces, scope, notes, status, seconds)
            is_probe = plain_path(scope["path"]) in PROBE_PATHS
            if status >= 400 and status != _LEFT and not is_probe:
                self._refusals.count(status)
            is_quiet = is_probe or is_of_page(scope["path"])
            level = logging.DEBUG if is_quiet else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(
                    level,
                    "%s %s %s %s in %.3f s%s [%s]",
                    _asked_by(scope),
                    scope["method"],
                    _asked_for(scope),
                    status or "without an answer",
                    seconds,
                    _described(notes) + _refused(notes),
                    ", ".join(filter(None, (notes.key_name, notes.request_id))),
                )
