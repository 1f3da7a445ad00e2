"""Parts of which the bodies of OpenAI's routes are made: strict bases, and checks of long lists before pydantic's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, model_validator

from ktransformers.server.answers.requests import MAX_ANSWERS
from ktransformers.server.api.field_types import MAX_ID, are_ids

__all__ = ["Body", "History", "number_values", "quick_prompt"]

_MAX_FIELDS = 256


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


def number_values(value: Any) -> Any:
    """Refuse a logit_bias that is no object of numbers in range, before each is looked at by itself."""
    if isinstance(value, dict):
        if not set(map(type, value.values())) <= {int, float}:
            raise ValueError("the values of logit_bias must be numbers")
        if not all(-100 <= bias <= 100 for bias in value.values()):
            raise ValueError("the values of logit_bias must be between -100 and 100")
    return value


def quick_prompt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Take lists of token ids as they are, and refuse too many prompts before each is looked at."""
    if are_ids(value):
        return value
    if isinstance(value, list):
        if len(value) > MAX_ANSWERS:
            raise ValueError(f"one request may have {MAX_ANSWERS} prompts or a list of token ids from 0 to {MAX_ID}")
        if value and all(map(are_ids, value)):
            return value
    return handler(value)
