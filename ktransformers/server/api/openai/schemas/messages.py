"""Conversations and tools as OpenAI's clients send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from ktransformers.server.answers.history import left_out
from ktransformers.server.answers.requests import Part
from ktransformers.server.api.openai.schemas.base import History
from ktransformers.server.api.picture_parts import PICTURE_TYPES, sent_pictures

__all__ = [
    "ChatMessage",
    "ChatTool",
    "ContentPart",
    "CustomTool",
    "FunctionCall",
    "FunctionDefinition",
    "FunctionTool",
    "MessageToolCall",
]

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of parts that are text, and the field that holds it."""

_MEDIA = {
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "file": "files",
    "input_file": "files",
}


class ContentPart(History):
    """A part of the content of a message: a text, or pictures, which have several shapes (api/picture_parts.py).

    left_out: what a tool's result had in its place.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    left_out: str | None = None
    image_url: object = None
    detail: object = None
    source: object = None
    image: object = None
    data: object = None
    url: object = None
    video: object = None
    video_url: object = None
    file_id: object = None

    @field_validator("type")
    @classmethod
    def _is_known(cls, type: str) -> str:
        if type in _MEDIA:
            raise ValueError(
                f"no support for {_MEDIA[type]}: models read text and pictures here; send parts of type text or "
                "image_url"
            )
        if type not in _TEXTS and type not in PICTURE_TYPES:
            raise ValueError(f"parts are of type text or image_url, got {type[:40]!r}")
        return type

    @model_validator(mode="after")
    def _has_picture(self) -> ContentPart:
        if self.has_pictures:
            sent_pictures(vars(self))
        return self

    @property
    def has_pictures(self) -> bool:
        """Whether this part is a picture, or the frames of a video."""
        return self.type in PICTURE_TYPES

    def parts(self, place: str) -> Iterator[Part]:
        """Yield the text or the pictures of this part, which is no reasoning. place: in the body."""
        if self.has_pictures:
            yield from sent_pictures(vars(self)).at(place, f"messages.content.{self.type}")
        else:
            yield self.content

    @property
    def is_reasoning(self) -> bool:
        """Whether this part is an earlier answer's reasoning."""
        return self.type == "thinking"

    @property
    def content(self) -> str:
        """The text of a part without pictures."""
        return str(getattr(self, _TEXTS[self.type]) or "")


def _kind(content: Any) -> str:
    return "<parts>" if isinstance(content, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(_kind),  # an error is then about the one that was meant
]


class FunctionCall(History):
    """An earlier answer's call of a function. arguments: a JSON object, as text or as it is; or whatever the model
    wrote instead.
    """

    name: str | None = None
    arguments: Any = None


class CustomCall(History):
    """An earlier answer's call of a custom tool. input: text."""

    name: str | None = None
    input: Any = None


class MessageToolCall(History):
    """A call that an earlier answer made, as the client has it: right or wrong."""

    id: str | int | None = None
    type: str | None = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatMessage(History):
    """A turn of a conversation. The role goes to the model's chat template as it is; the template knows which roles
    there are.

    refusal: an earlier answer's text, where it has no other. function_call, and the role `function`: what tool calls
    were before. prefix, partial: the last message is the beginning of the answer.
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None
    prefix: bool | None = None
    partial: bool | None = None
    has_result_as_json: Annotated[bool, Field(exclude=True)] = False

    @model_validator(mode="before")
    @classmethod
    def _result_as_text(cls, data: Any) -> Any:
        """A tool's result comes back in each further turn, so nothing in it is a reason to refuse the conversation."""
        if not isinstance(data, dict) or data.get("role") not in ("tool", "function"):
            return data
        content = data.get("content")
        if content is None or isinstance(content, str):
            return data
        if isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
            return data | {"content": [_as_text(part) for part in content]}
        return data | {"content": json.dumps(content, ensure_ascii=False), "has_result_as_json": True}


def _as_text(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    shown = str(kind)[:64]
    if kind in _TEXTS:
        return part
    if isinstance(kind, str) and kind in PICTURE_TYPES:
        try:
            ContentPart.model_validate(part)
        except ValidationError:
            shown = "picture"
        else:
            return part
    elif isinstance(kind, str) and kind in _MEDIA:
        shown = _MEDIA[kind].removesuffix("s")
    return {"type": "text", "text": left_out(shown), "left_out": str(kind)}


class FunctionDefinition(History):
    """A function that the model may call. parameters: a JSON schema, shown to the model as it is."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(History):
    """A tool that is a function, an element of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class CustomDefinition(History):
    """A tool whose input is a text. format: of that text; a grammar stands in it, or in its `grammar`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    format: dict[str, Any] | None = None

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Syntax and definition of the grammar of the tool's input; None for plain text."""
        form = self.format or {}
        if form.get("type") != "grammar":
            return None
        inner = form["grammar"] if isinstance(form.get("grammar"), dict) else form
        return str(inner.get("syntax")), str(inner.get("definition"))


class CustomTool(History):
    """A tool whose input is a text, an element of `tools`."""

    type: Literal["custom"]
    custom: CustomDefinition


def _tool_kind(tool: Any) -> str:
    type = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "<custom>" if type == "custom" else "<function>"


def _as_tool(tool: Any) -> Any:
    """As chat completions spell it what /v1/responses and Anthropic do: without a level between."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        return tool
    kind = tool.get("type", "custom" if "format" in tool else "function")
    if kind not in ("function", "custom") or kind in tool:
        return tool
    inner = {name: one for name, one in tool.items() if name != "type"}
    if "input_schema" in inner:
        kind, inner["parameters"] = "function", inner.pop("input_schema")
    return {"type": kind, kind: inner}


ChatTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(_tool_kind),
    BeforeValidator(_as_tool),
]
