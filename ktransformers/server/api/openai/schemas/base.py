"""Parts of which the bodies of OpenAI's routes are made: strict types, whole numbers, stop strings, token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidatorFunctionWrapHandler,
    model_validator,
)

from ktransformers.server.answers.requests import MAX_ANSWERS
from ktransformers.server.api.whole_numbers import Whole

__all__ = [
    "Body",
    "History",
    "Seconds",
    "Stop",
    "TokenId",
    "UnicodeText",
    "number_values",
    "quick_ids",
    "quick_prompt",
]

_MAX_STOPS = 32
_MAX_STOP_CHARS = 1024
_MAX_STOP_CHARS_IN_ALL = 8192
_MAX_FIELDS = 256
_MAX_ID = (1 << 31) - 1


class Body(BaseModel):
    """Base of bodies with only the fields that the dialect's table lets through; it has sorted the others out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: Any) -> Any:
        """Each unknown one is an error of its own, all of which pydantic would collect."""
        if isinstance(data, dict) and len(data) > _MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are more than any request has")
        return data


class History(BaseModel):
    """Base of the parts of a conversation; fields that clients keep beside it (ids, times, cache marks) are taken and
    not read.
    """

    model_config = ConfigDict(extra="ignore", strict=True)


def _unicode(text: str) -> str:
    """Text that can be sent to other processes and the tokenizer: lone surrogates have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: {error.reason} at character {error.start}") from error
    return text


def _few_stops(stop: str | list[str]) -> str | list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings are more than {_MAX_STOPS}")
    if not isinstance(stop, str) and not all(stops):
        raise ValueError("stop strings must not be empty")
    if max(map(len, stops), default=0) > _MAX_STOP_CHARS or sum(map(len, stops)) > _MAX_STOP_CHARS_IN_ALL:
        raise ValueError(
            f"a stop string may have {_MAX_STOP_CHARS} characters, and all of them {_MAX_STOP_CHARS_IN_ALL} together"
        )
    for one in stops:
        _unicode(one)
    return stop


def number_values(value: Any) -> Any:
    """Refuse a logit_bias that is no object of numbers in range, before each is looked at by itself."""
    if isinstance(value, dict):
        if not set(map(type, value.values())) <= {int, float}:
            raise ValueError("the values of logit_bias must be numbers")
        if not all(-100 <= bias <= 100 for bias in value.values()):
            raise ValueError("the values of logit_bias must be between -100 and 100")
    return value


def _are_ids(value: object) -> bool:
    """Whether this is a list of token ids, one at least. Takes a tenth of the time that pydantic takes."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _MAX_ID


def quick_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Take a list of token ids as it is, with one check of the whole list in the place of pydantic's of each id."""
    return value if _are_ids(value) else handler(value)


def quick_prompt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Take lists of token ids as they are, and refuse too many prompts before each is looked at."""
    if _are_ids(value):
        return value
    if isinstance(value, list):
        if len(value) > MAX_ANSWERS:
            raise ValueError(f"one request may have {MAX_ANSWERS} prompts or a list of token ids from 0 to {_MAX_ID}")
        if value and all(map(_are_ids, value)):
            return value
    return handler(value)


UnicodeText = Annotated[str, AfterValidator(_unicode)]
Stop = Annotated[
    str | Annotated[list[str], Field(fail_fast=True, json_schema_extra={"maxItems": _MAX_STOPS})],
    AfterValidator(_few_stops),
]
TokenId = Annotated[Whole, Field(ge=0, le=_MAX_ID)]
Seconds = Annotated[FiniteFloat, Field(gt=0, le=1e6)]
