"""Types of fields that the bodies of several dialects have: whole numbers, texts, stop strings, token ids, choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)

from ktransformers.server.answers.tool_choices import AskedChoice, read_choice

__all__ = [
    "MAX_ID",
    "Choice",
    "Penalty",
    "Seconds",
    "Stop",
    "TokenId",
    "UnicodeText",
    "Whole",
    "are_ids",
    "as_list",
    "few_stops",
    "quick_ids",
]

_MAX_STOPS = 32
_MAX_STOP_CHARS = 1024
_MAX_STOP_CHARS_IN_ALL = 8192
MAX_ID = (1 << 31) - 1
"""The largest token id that a body may hold."""


def _whole(value: object) -> object:
    """30.0 is a whole number, as JSON schemas and clients of several languages see it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unicode(text: str) -> str:
    """Text that can be sent to other processes and the tokenizer: lone surrogates have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: {error.reason} at character {error.start}") from error
    return text


def few_stops(stops: list[str]) -> list[str]:
    """Return stop strings, of which there are few and short ones, else raise ValueError."""
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings are more than {_MAX_STOPS}")
    if max(map(len, stops), default=0) > _MAX_STOP_CHARS or sum(map(len, stops)) > _MAX_STOP_CHARS_IN_ALL:
        raise ValueError(
            f"a stop string may have {_MAX_STOP_CHARS} characters, and all of them {_MAX_STOP_CHARS_IN_ALL} together"
        )
    return [_unicode(stop) for stop in stops]


def _stop(stop: str | list[str]) -> str | list[str]:
    few_stops([stop] if isinstance(stop, str) else stop)
    if not isinstance(stop, str) and not all(stop):
        raise ValueError("stop strings must not be empty")
    return stop


def as_list(value: object, item: Mapping[str, str], key: str) -> object:
    """Return a list, or null, as it is, and a text as a list of one `item` with the text under `key`. Raises
    ValueError."""
    if isinstance(value, str):
        return [{**item, key: value}]
    if value is not None and not isinstance(value, list):
        raise ValueError("Input should be a valid string or a valid list")
    return value


def are_ids(value: object) -> bool:
    """Whether this is a list of token ids, one at least. Takes a tenth of the time that pydantic takes."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_ID


def quick_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Take a list of token ids as it is, with one check of the whole list in the place of pydantic's of each id."""
    return value if are_ids(value) else handler(value)


def _choice(value: object) -> AskedChoice:
    asked = value if isinstance(value, AskedChoice) else read_choice(value)
    if asked is None:
        raise ValueError("it must be auto, none or required, or name a tool")
    return asked


Whole = Annotated[int, BeforeValidator(_whole)]
"""An int, or a float that is one."""

UnicodeText = Annotated[str, AfterValidator(_unicode)]
Stop = Annotated[
    str | Annotated[list[str], Field(fail_fast=True, json_schema_extra={"maxItems": _MAX_STOPS})], AfterValidator(_stop)
]
TokenId = Annotated[Whole, Field(ge=0, le=MAX_ID)]
Seconds = Annotated[FiniteFloat, Field(gt=0, le=1e6)]
Penalty = Annotated[FiniteFloat, Field(ge=-2, le=2)]
Choice = Annotated[
    AskedChoice, BeforeValidator(_choice), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
]
"""Which tools are called, in any program's words."""
