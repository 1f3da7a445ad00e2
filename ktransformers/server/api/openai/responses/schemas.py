"""The body of POST /v1/responses, once `fields` has sorted it. Items and tools are read in `items` and `tools`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ktransformers.server.answers.tool_choices import read_choice
from ktransformers.server.api.field_types import Stop, UnicodeText, as_list
from ktransformers.server.api.openai.constraint_fields import ConstraintFields
from ktransformers.server.api.openai.schemas.prediction import PredictionFields
from ktransformers.server.api.sampling_fields import SamplingFields, SchedulingFields

__all__ = ["Reasoning", "ResponsesBody", "TextSettings"]

_MAX_FIELDS = 256
_NAMING = ("function", "custom")


class _Fields(BaseModel):
    """What `fields` lets through."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Reasoning(_Fields):
    """The `reasoning` field: how much the model reasons, and how that is shown. effort: the chat template's word for
    it. summary: as which of its two forms reasoning comes back.
    """

    effort: Annotated[UnicodeText, Field(max_length=64)] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(_Fields):
    """The format that the answer's text must have. A schema is always followed; strict: whole, or not at all."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def as_sent(self) -> dict[str, Any]:
        """Return the format as `constraint_of` reads it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextSettings(_Fields):
    """The `text` field, with the format of the answer's text. verbosity: taken as a hint."""

    format: TextFormat | None = None
    verbosity: str | None = None


def _as_items(value: Any) -> Any:
    """A text is a message of the user."""
    return as_list(value, {"type": "message", "role": "user"}, "content")


def _as_texts(value: Any) -> Any:
    """Values of metadata are texts; clients send numbers all the same."""
    if not isinstance(value, dict):
        return value
    if len(value) > _MAX_FIELDS:
        raise ValueError(f"metadata may have {_MAX_FIELDS} pairs")
    return {key: one if isinstance(one, str) else str(one) for key, one in value.items()}


def _as_choice(value: Any) -> Any:
    """OpenAI's words for what any program calls it; its own stay as they are, and what nobody says for the error."""
    is_own = isinstance(value, dict) and (("name" in value and value.get("type") in _NAMING) or "tools" in value)
    asked = None if is_own else read_choice(value)
    if asked is None:
        return value
    if asked.allowed is not None:
        tools = [{"type": "function", "name": name} for name in asked.allowed]
        return {"type": "allowed_tools", "mode": "auto" if asked.mode == "none" else asked.mode, "tools": tools}
    if asked.name is None:
        return asked.mode
    return {"type": "custom" if asked.is_custom else "function", "name": asked.name}


class ResponsesBody(ConstraintFields, PredictionFields, SamplingFields, SchedulingFields):
    """The body of POST /v1/responses. input: a text, or items: the whole conversation, or what follows
    previous_response_id.
    """

    input: (
        Annotated[
            Annotated[list[dict[str, Any]], Field(fail_fast=True)],
            BeforeValidator(_as_items),
            Field(
                json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            ),
        ]
        | None
    ) = None
    model: str | None = None
    instructions: UnicodeText | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(_as_choice)] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Echoed, without effect on the answer.
    metadata: Annotated[dict[str, str], BeforeValidator(_as_texts)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # Extensions, as in chat completions.
    stop: Stop | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def keeps(self) -> bool:
        """Whether the client wants the answer to be kept: yes unless it says no, as at OpenAI."""
        return self.store is not False

    @property
    def text_format(self) -> dict[str, Any]:
        """The format that the answer's text must have, as it was sent."""
        form = None if self.text is None else self.text.format
        return {"type": "text"} if form is None else form.as_sent()

    @property
    def summary(self) -> str | None:
        """The kind of reasoning summary that was asked for."""
        asked = None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary
        return None if asked == "none" else asked
