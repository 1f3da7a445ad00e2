"""Reads bodies of requests: measured, parsed and sorted by a dialect's table before their fields are checked.

A dialect's router says `APIRouter(route_class=body_route(TABLE))`; its models then see the table's own fields only, and
responses name what was ignored. Halves of characters, which no model can read, become U+FFFD and are named there, too.
Routes without a table (`BodyRoute`) get their bodies as they came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope
from typing_extensions import override

from ktransformers.errors import ConfigError
from ktransformers.server.http.fields import (
    FieldTable,
    ignored_header,
    note_ignored,
    note_said_names,
    said_names,
    sort_fields,
)
from ktransformers.server.http.json_limits import JsonLimits
from ktransformers.server.service import note_altered, service_of
from ktransformers.tokenizer.unicode import may_have_halves, with_whole_texts

__all__ = ["BodyRoute", "body_route", "body_size"]

_SHORT = 16 << 10
"""Bytes that are parsed in less time than a hand-over to another thread takes to pay."""

_EXACT = frozenset({"model", "stop", "stop_sequences", "cache_salt", "options"})
"""Fields that are compared and never read by the model: what is no text there is refused, or is what it is."""

_USERS = frozenset({"arguments", "input", "parameters", "input_schema", "inputSchema", "schema", "metadata"})
"""Fields below which names are the user's, and are named nowhere."""

_PLAIN_TYPES = frozenset({"[text]", "[input_text]", "[output_text]", "[message]", "[function]", "[custom]"})
"""Types that nothing is called by: fields say it."""

_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_MAX_STEPS = 4


class BodyRoute(APIRoute):
    """A route whose body is measured before it is parsed, on a thread when it is long. table: what sorts its fields."""

    table: ClassVar[FieldTable | None] = None

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_measured(request: Request) -> Response:
            response = await handle(_MeasuredRequest(request.scope, request.receive, self.table))
            response.headers.update(ignored_header(request.scope))
            return response

        return handle_measured


def body_route(table: FieldTable, base: type[BodyRoute] = BodyRoute) -> type[BodyRoute]:
    """Return the class of routes whose bodies are sorted by this table."""
    return type(f"Sorted{base.__name__}", (base,), {"table": table})


class _MeasuredRequest(Request):
    """FastAPI asks for `json` when the content type says so."""

    def __init__(self, scope: Scope, receive: Receive, table: FieldTable | None):
        super().__init__(scope, receive)
        self._table = table

    async def json(self) -> Any:
        if not hasattr(self, "_sorted"):
            try:
                self._sorted = self._sort(await self._parsed())
            except ConfigError as error:  # of what is raised here, FastAPI lets its own exceptions through
                raise HTTPException(400, str(error)) from error
        return self._sorted

    async def _parsed(self) -> Any:
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise HTTPException(
                415, f"the body is sent as {coding[:40]}: send it uncompressed, without Content-Encoding"
            )
        data, service = await self.body(), service_of(self)
        if len(data) < _SHORT:
            body, altered = _parse(data, service.json_limits)
        else:
            body, altered = await service.workers.run(len(data), _parse, data, service.json_limits)
        if altered:
            note_altered(self, altered)
        return body

    def _sort(self, body: Any) -> Any:
        if self._table is None or not isinstance(body, dict):
            return body
        service = service_of(self)
        honoured, ignored = sort_fields(body, self._table, is_strict=service.config.is_strict_on_fields)
        note_ignored(self.scope, ignored)
        note_said_names(self.scope, said_names(body, self._table))
        service.log_ignored(ignored)
        return honoured


def _parse(data: bytes, limits: JsonLimits) -> tuple[Any, tuple[str, ...]]:
    """The body, and names of fields in which half characters became U+FFFD."""
    limits.check(data)
    body = json.loads(data)
    if not isinstance(body, dict) or not may_have_halves(data):
        return body, ()
    found: dict[str, None] = {}
    made = {
        name: one if name in _EXACT else with_whole_texts(one, lambda at: found.setdefault(_named(at)), (name,))
        for name, one in body.items()
    }
    return made, tuple(found)


def _named(at: Sequence[str]) -> str:
    """The place of a text, without names of the user's: `input.function_call.output`, `messages.content.text`."""
    steps = [at[0]]
    for one in at[1:]:
        step = one.strip("[]")
        if one in _PLAIN_TYPES:
            continue
        if len(steps) == _MAX_STEPS or not _FIELD.fullmatch(step):
            break
        if step != one and steps[-1] == "content":  # what stands in there has a name of its own
            steps.pop()
        steps.append(step)
        if one in _USERS:
            break
    return ".".join(steps)


async def body_size(request: Request) -> int:
    """Return the size of the request's body in bytes."""
    return len(await request.body())
