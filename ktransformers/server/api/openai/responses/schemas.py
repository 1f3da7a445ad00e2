"""The body of POST /v1/responses, and the table of its fields. Items and tools are read in `items` and `tools`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from ktransformers.errors import UnsupportedError
from ktransformers.server.api.openai.responses.policy import Rule, hint, mapped, refuse, sort_fields
from ktransformers.server.api.openai.schemas.base import Seconds, Stop, UnicodeText

__all__ = ["TABLE", "Reasoning", "ResponsesBody", "TextSettings"]

_MAX_FIELDS = 256

TABLE: dict[str, Rule] = {
    "background": refuse("leave it out, and wait for the answer", False),
    "conversation": refuse("use previous_response_id"),
    "prompt": refuse("send the prompt's text in instructions and input"),
    "n": refuse("send the request again", 1),
    "context_management": refuse("send a shorter input", []),
    "stream_options": hint(),
    "max_tool_calls": hint(),
    "prompt_cache_retention": hint(),
    "prompt_cache_options": hint(),
    "client_metadata": hint(),
    "extra_body": hint(),
    "request_id": hint(),
    "max_tokens": mapped("max_output_tokens"),
    "max_completion_tokens": mapped("max_output_tokens"),
}
"""Fields that ResponsesBody does not have. max_tool_calls counts calls of tools that run on the server."""


class _Lenient(BaseModel):
    """Types are strict; names that are not known are kept, so that the response can name them."""

    model_config = ConfigDict(extra="allow", strict=True)


class Reasoning(_Lenient):
    """effort: the chat template's word for it. summary: as which of its two forms reasoning comes back."""

    effort: Annotated[UnicodeText, Field(max_length=64)] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextSettings(_Lenient):
    """format: what the text has to be. verbosity: taken as a hint."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


def _as_items(value: Any) -> Any:
    """A text is a message of the user."""
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def _as_texts(value: Any) -> Any:
    """Values of metadata are texts; clients send numbers all the same."""
    if not isinstance(value, dict):
        return value
    if len(value) > _MAX_FIELDS:
        raise ValueError(f"metadata may have {_MAX_FIELDS} pairs")
    return {key: one if isinstance(one, str) else str(one) for key, one in value.items()}


class ResponsesBody(_Lenient):
    """POST /v1/responses. input: a text, or items: the whole conversation, or what follows previous_response_id."""

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
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Echoed, without effect on the answer.
    metadata: Annotated[dict[str, str], BeforeValidator(_as_texts)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # Extensions, as in chat completions.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=1e-3, le=1e3)] | None = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Seconds | None = None
    cache_salt: Annotated[UnicodeText, Field(max_length=256)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _sorted(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are more than any request has")
        try:
            return sort_fields(data, TABLE)
        except UnsupportedError as error:
            raise ValueError(str(error)) from error

    @property
    def keeps(self) -> bool:
        """Whether the client wants the answer to be kept: yes unless it says no, as at OpenAI."""
        return self.store is not False

    @property
    def summary(self) -> str | None:
        """The kind of reasoning summary that was asked for."""
        asked = None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary
        return None if asked == "none" else asked

    def unknown_fields(self) -> list[str]:
        """Names that have no meaning here."""
        names = list(self.model_extra or ())
        for prefix, inner in (("text", self.text), ("reasoning", self.reasoning)):
            names += [
                f"{prefix}.{name}" for name, value in ((inner and inner.model_extra) or {}).items() if value is not None
            ]
        return names
