"""JSON bodies and error bodies. The one place where our exceptions become HTTP statuses and error shapes.

The shape is OpenAI's, unless the path begins with a prefix in ERROR_SHAPES: the dialect there has its own.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from ktransformers.errors import (
    AuthenticationError,
    CapacityError,
    ConfigError,
    ConflictError,
    ConstraintError,
    ContextLengthError,
    ConversationError,
    DeadlineError,
    EngineError,
    FieldError,
    KTransformersError,
    LoadFailedError,
    MisdirectedRequestError,
    ModelNotFoundError,
    NotReadyError,
    OriginError,
    PayloadTooLargeError,
    PromptError,
    QueueFullError,
    RateLimitError,
    SlowReaderError,
    UnknownIdError,
    UnsupportedError,
)
from ktransformers.server.http.api_paths import nearest_path
from ktransformers.server.http.fields import noted_names
from ktransformers.server.telemetry.request_log import note_reason, request_id_of, without_quotes
from ktransformers.server.validation import Place, first_invalid

__all__ = [
    "ERROR_SHAPES",
    "ApiResponse",
    "ErrorShape",
    "error_body",
    "error_response",
    "install_error_handlers",
    "json_bytes",
    "refuse",
]

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1

ErrorShape = Callable[[int, str, str | None, str | None], dict[str, Any]]
"""The body of an error, from its status, its message, our code for it and the field that it is about, if any."""

ERROR_SHAPES: list[tuple[str, ErrorShape]] = []
"""Prefixes of paths and the shape of errors there; the first that fits decides. app.py fills it, nobody else."""

# The first class that fits decides: subclasses stand before their bases. status, type, code
_ERRORS: tuple[tuple[type[KTransformersError], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (UnsupportedError, 400, "invalid_request_error", "unsupported"),
    (ConfigError, 400, "invalid_request_error", None),
    (ConstraintError, 400, "invalid_request_error", None),
    (AuthenticationError, 401, "invalid_request_error", "invalid_api_key"),
    (OriginError, 403, "invalid_request_error", "origin_not_allowed"),
    (MisdirectedRequestError, 421, "invalid_request_error", "host_not_allowed"),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (UnknownIdError, 404, "invalid_request_error", "not_found"),
    (ConflictError, 409, "invalid_request_error", "conflict"),
    (PayloadTooLargeError, 413, "invalid_request_error", "request_too_large"),
    (RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DeadlineError, 408, "timeout_error", "deadline_exceeded"),
    (SlowReaderError, 408, "timeout_error", "slow_reader"),
    (LoadFailedError, 503, "server_error", "model_not_loaded"),
    (NotReadyError, 503, "server_error", "not_ready"),
    (QueueFullError, 503, "server_error", "queue_full"),
    (CapacityError, 503, "server_error", "out_of_capacity"),
    (EngineError, 500, "server_error", "engine_error"),
    (KTransformersError, 500, "server_error", None),
)


_PROMPT_FIELDS = (
    ("/chat/completions", "messages"),
    ("/completions", "prompt"),
    ("/responses", "input"),
    ("/embeddings", "input"),
    ("/api/embed", "input"),
    ("/generate", "prompt"),
)
"""Ends of paths, and what a dialect calls the field of the prompt there; "messages" elsewhere."""


def json_bytes(content: Any) -> bytes:
    """Return compact UTF-8 JSON. Lone surrogates, which no UTF-8 can carry, stay escaped."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


class ApiResponse(JSONResponse):
    """A response with a JSON body."""

    @override
    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def _body(path: str, status: int, message: str, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    for prefix, shape in ERROR_SHAPES:
        if path.startswith(prefix):
            return shape(status, message, code, param)
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _entry(error: KTransformersError) -> tuple[int, str, str | None]:
    return next(entry[1:] for entry in _ERRORS if isinstance(error, entry[0]))


def error_body(error: KTransformersError, path: str = "") -> dict[str, Any]:
    """Return the body of an error's response, in the shape of this path."""
    status, type, code = _entry(error)
    param = None
    if isinstance(error, FieldError):
        param, code = error.param or None, error.code or code
    if isinstance(error, ContextLengthError | PromptError):
        param = next((name for suffix, name in _PROMPT_FIELDS if path.endswith(suffix)), "messages")
    return _body(path, status, str(error), type, param, code)


def error_response(error: KTransformersError, closes: bool = False, path: str = "") -> ApiResponse:
    """Return the response to a request for this path that failed with one of our errors.

    closes: the rest of its body is not wanted.
    """
    status = _entry(error)[0]
    headers = {}
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, RateLimitError | LoadFailedError):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after), 1))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if closes:
        headers["Connection"] = "close"
    return ApiResponse(error_body(error, path), status, headers)


def _log_text(error: KTransformersError) -> str:
    """What the log may say of it. Our messages put quotation marks around everything that a client sent."""
    if isinstance(error, ConversationError):
        return "the model's chat template refuses this conversation"
    return without_quotes(str(error))


async def refuse(
    error: KTransformersError, scope: Scope, receive: Receive, send: Send, *, closes: bool = False
) -> None:
    """Answer with this error from a middleware. closes: the rest of its body is not wanted."""
    note_reason(scope, _log_text(error), error)
    await error_response(error, closes, scope["path"])(scope, receive, send)


def _path(place: Place) -> str | None:
    """`messages[0].content` for ("messages", 0, "content")."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or None


_FIELD = re.compile(r"\w{1,40}", re.ASCII)


def _log_path(place: Place) -> str:
    """The same for the log: a client's own keys are shown when they look like names of fields."""
    return _path(tuple(p if isinstance(p, int) or _FIELD.fullmatch(p) else "?" for p in place)) or "the body"


def _in_words_of(said: Mapping[str, str], place: str | None, message: str) -> str:
    """A message about several fields of the object at `place`, by the names that the request calls them. Of those that
    are words of English one cannot know."""
    before = f"{place}." if place else ""
    for name, other in said.items():
        own = name.removeprefix(before)
        if name.startswith(before) and "_" in own:
            message = re.sub(rf"\b{re.escape(own)}\b", other.removeprefix(before), message)
    return message


def _validation_response(error: RequestValidationError, scope: Scope) -> ApiResponse:
    path, errors = scope["path"], error.errors()
    if errors[0]["type"] == "json_invalid":
        reason = errors[0].get("ctx", {}).get("error", "")
        note_reason(scope, f"the body is not valid JSON: {without_quotes(reason)}")
        message = f"the body is not valid JSON: {reason}"
        return ApiResponse(_body(path, 400, message, "invalid_request_error", None, None), 400)
    fault, said = first_invalid(errors, error.body), noted_names(scope)
    own = _path(fault.place)
    param = said.get(own or "", own)
    message = _in_words_of(said, own, fault.message)
    if isinstance(fault.value, bytes):  # FastAPI decodes bodies of JSON's content types only
        message = "send the body as JSON, with Content-Type: application/json"
    if fault.kind == "extra_forbidden":
        message = "this server does not support the field"
    # Pydantic quotes what it expects; our own validators quote what came.
    note_reason(
        scope, f"{_log_path(fault.place)}: {without_quotes(message) if fault.kind == 'value_error' else message}"
    )
    shown = f"{param}: {message}" if param else message
    return ApiResponse(_body(path, 400, shown, "invalid_request_error", param, None), 400)


def _http_response(error: HTTPException, path: str) -> ApiResponse:
    status = error.status_code
    type = "invalid_request_error" if status < 500 else "server_error"
    return ApiResponse(_body(path, status, str(error.detail), type, None, None), status, dict(error.headers or {}))


async def _on_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KTransformersError)
    note_reason(request.scope, _log_text(error), error)
    return error_response(error, path=request.scope["path"])


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _validation_response(error, request.scope)


def _unread(error: HTTPException) -> HTTPException:
    """The error of a body that is no JSON for a reason that FastAPI keeps to itself; any other error as it is."""
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return HTTPException(400, "the body is not valid JSON: send it as UTF-8")
    if isinstance(cause, ValueError):  # Python reads numbers up to a length
        return HTTPException(400, "the body is not valid JSON: a whole number in it has too many digits")
    return error


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, KTransformersError):  # raised where FastAPI lets no other exception through
        return await _on_known_error(request, error.__cause__)
    error = _unread(error)
    note_reason(request.scope, without_quotes(str(error.detail)))
    path = request.scope["path"]
    meant = _meant(request, path) if error.status_code == 404 and error.detail == _NO_ROUTE else None
    if meant is None:
        return _http_response(error, path)
    message = f"there is no {path} here; did you mean {meant}?"  # in the shape of that route: its client reads it
    return ApiResponse(_body(meant, 404, message, "invalid_request_error", None, None), 404)


_NO_ROUTE = "Not Found"  # as Starlette says it
_MAX_PATH = 200  # of what is looked at for a likeness


def _meant(request: Request, path: str) -> str | None:
    return nearest_path(path, getattr(request.app.state, "paths", ())) if len(path) <= _MAX_PATH else None


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = "the server made a mistake; its log says more"
    made = _body(request.scope["path"], 500, message, "server_error", None, None)
    return ApiResponse(made, 500, {"x-request-id": request_id_of(request)})  # made outside of the log's middleware


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of this app, foreseen or not, the shape of its path."""
    app.add_exception_handler(KTransformersError, _on_known_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
