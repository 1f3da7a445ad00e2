"""OpenAI's `prediction`: text that a client expects of the answer, as when it has a file rewritten.

https://platform.openai.com/docs/guides/predicted-outputs. Draft tokens are looked for in it (scheduler/drafting), so
that the parts which come true take fewer steps; the answer is the same without.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ktransformers.server.api.field_types import UnicodeText, as_list

__all__ = ["PredictedContent", "PredictionFields"]

_MAX_PARTS = 1024


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: UnicodeText


def _as_parts(value: object) -> object:
    """A text is its only part."""
    return as_list(value, {"type": "text"}, "text")


class PredictedContent(BaseModel):
    """The `prediction` of a body: a text, whole or in parts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["content"]
    content: Annotated[
        Annotated[list[_Part], Field(max_length=_MAX_PARTS, fail_fast=True)],
        BeforeValidator(_as_parts, json_schema_input_type=str | list[_Part]),
    ]


class PredictionFields(BaseModel):
    """Base of OpenAI's bodies that ask for an answer."""

    prediction: PredictedContent | None = None

    @property
    def predicted_text(self) -> str:
        """The text that the client expects, empty when it says none."""
        return "" if self.prediction is None else "".join(part.text for part in self.prediction.content)
