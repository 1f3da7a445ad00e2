"""Reads which model a request wants from its body, before its route sees it. Knows the dialects' field names."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import ConfigError, FieldError
from ktransformers.server.http.json_limits import JsonLimits

__all__ = ["ANSWERING", "STREAMING", "RoutingFields", "read_routing_fields"]

_OLLAMA_ANSWERS = frozenset({"/api/chat", "/api/generate"})
_OLLAMA = _OLLAMA_ANSWERS | {"/api/embed", "/api/embeddings"}

STREAMING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Routes whose streams are server-sent events."""

ANSWERING = STREAMING | _OLLAMA | {"/v1/embeddings", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
"""Routes that need a loaded model: each names it in the field `model` of its body."""

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")


@dataclass(frozen=True, slots=True)
class RoutingFields:
    """The fields of a body that decide which model answers, and when.

    model: as the client names it. timeout, keep_alive: seconds; None: the body does not say.
    is_only_unload: nothing is asked but that the model be gone.
    """

    model: str | None
    is_streamed: bool
    timeout: float | None
    keep_alive: float | None
    is_only_unload: bool


def read_routing_fields(path: str, data: bytes, limits: JsonLimits) -> RoutingFields | None:
    """Read the fields that decide about routing; None for what is no JSON object within the limits: the route says what
    is wrong with it.

    Raises FieldError for a keep_alive that means nothing.
    """
    try:
        limits.check(data)
        body = json.loads(data)
    except (ConfigError, ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    model, timeout = body.get("model"), _number(body.get("timeout"))
    keep_alive = _seconds(body.get("keep_alive")) if path in _OLLAMA else None
    is_load = path in _OLLAMA_ANSWERS and not body.get("messages") and not body.get("prompt")
    return RoutingFields(
        model=model if isinstance(model, str) else None,
        is_streamed=body.get("stream") is True,
        timeout=timeout if timeout is not None and timeout > 0 else None,
        keep_alive=keep_alive,
        is_only_unload=is_load and keep_alive == 0.0,
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _seconds(value: Any) -> float | None:
    """Ollama's keep_alive: seconds, or a duration in Go's words such as 1h30m; less than 0: for ever.

    https://github.com/ollama/ollama/blob/main/docs/api.md, https://pkg.go.dev/time#ParseDuration
    """
    if value is None:
        return None
    number = _number(value)
    if number is not None:
        return math.inf if number < 0 else float(number)
    text = value.strip() if isinstance(value, str) else ""
    if len(text) <= 64 and _NUMBER.fullmatch(text):
        return _seconds(float(text))
    sign, rest = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    parts = _PART.findall(rest)
    if not parts or len(text) > 64 or "".join(amount + unit for amount, unit in parts) != rest:
        raise FieldError('keep_alive: it must be a number of seconds or a text such as "5m"', "keep_alive")
    return math.inf if sign == "-" else sum(float(amount) * _UNITS[unit] for amount, unit in parts)
