"""The bodies of requests, as Ollama's API defines them, once their fields are sorted by fields.py.

Whole numbers may be written as 40.0, as clients of several languages do. Unknown keys inside messages and tools are
taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ktransformers.server.api.field_types import Whole, few_stops
from ktransformers.server.api.sampling_fields import SamplingFields

__all__ = [
    "AnswerBody",
    "ChatBody",
    "EmbedBody",
    "EmbedOneBody",
    "GenerateBody",
    "NameBody",
    "OllamaBody",
    "Options",
    "PastMessage",
    "ToolBody",
]

_ZERO = re.compile(r"0+(\.0*)?(ns|us|ms|s|m|h)?")


def _stops(value: Any) -> Any:
    """One or several, without the empty ones, which stop nothing."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("stop must be a text or a list of texts")
    stops = [stop for stop in stops if stop]
    return few_stops(stops)


def _only(is_right: Callable[[Any], bool], what: str) -> BeforeValidator:
    """Looked at before pydantic tries the members of a union one by one, and names them in its errors."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"it must be {what}")
        return value

    return BeforeValidator(check)


def _is_duration(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number or (isinstance(value, str) and len(value) <= 64)


_LEVELS = ("low", "medium", "high", "max")
Duration = Annotated[int | float | str, _only(_is_duration, 'a number of seconds or a text such as "5m"')]
Format = Annotated[
    Literal["json"] | dict[str, Any],
    _only(lambda value: value == "json" or isinstance(value, dict), '"json" or a JSON schema'),
]
Think = Annotated[
    bool | Literal["low", "medium", "high", "max"],
    _only(lambda value: isinstance(value, bool) or value in _LEVELS, "true, false, low, medium, high or max"),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class _Model(BaseModel):
    """A part of the history, or a tool."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, data: Any) -> Any:
        """Null is as if absent."""
        return {name: one for name, one in data.items() if one is not None} if isinstance(data, dict) else data


class Options(_Body, SamplingFields):
    """Options of how the answer is drawn. num_predict: most tokens of it; 0 and less: to the end of the context."""

    num_predict: Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    num_ctx: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None


class OllamaBody(_Body):
    """The fields that all bodies share. keep_alive: seconds, or a text such as "5m"."""

    model: str | None = None
    options: Options = Options()
    keep_alive: Duration | None = None

    @property
    def is_to_unload(self) -> bool:
        """Whether the body asks to unload the model after this request: keep_alive is zero."""
        if isinstance(self.keep_alive, str):
            return _ZERO.fullmatch(self.keep_alive.strip()) is not None
        return self.keep_alive == 0


class AnswerBody(OllamaBody):
    """The fields that chat and generate share. format: "json" or a JSON schema. think: whether to reason, or how much.

    truncate, shift: whether the oldest turns leave where the conversation is longer than the context. Ollama tells
    prompts from answers there; here turns leave before an answer begins, and make room for it.
    """

    stream: bool | None = None
    format: Format | None = None
    think: Think | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _tops_need_logprobs(self) -> AnswerBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is streamed, which is the default."""
        return self.stream is not False


class CalledFunction(_Model):
    """The function of an earlier tool call. arguments: an object; as JSON in a text too, as other dialects have it; or
    whatever the model wrote instead.
    """

    name: Annotated[str, Field(max_length=256)] = ""
    arguments: Any = None


class PastCallBody(_Model):
    """A call that an earlier answer made."""

    id: str | int | None = None
    function: CalledFunction = CalledFunction()


class PastMessage(_Model):
    """A turn of a conversation. The role goes to the chat template as it is. images: base64. tool_name: whose result
    this is.
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Any = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[PastCallBody], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> PastMessage:
        if self.role == "tool":  # whatever it is, it comes back in each further turn
            return self
        if self.content is not None and not isinstance(self.content, str):
            raise ValueError("content must be a text")
        if self.images and not all(isinstance(image, str) for image in self.images):
            raise ValueError("images must be texts: the pictures as base64")
        return self


class FunctionBody(_Model):
    """A function that the model may call. parameters: a JSON schema, shown to the model as it is."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(_Model):
    """A tool, as an element of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionBody


class ChatBody(AnswerBody):
    """The body of POST /api/chat. One without messages only asks that the model is there."""

    messages: Annotated[list[PastMessage], Field(fail_fast=True)] = []
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] = []


class GenerateBody(AnswerBody):
    """The body of POST /api/generate. raw: the prompt as it is, without chat template. images: base64. Without a
    prompt: as chat.
    """

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: Annotated[list[str], Field(fail_fast=True)] = []

    @model_validator(mode="after")
    def _raw_has_no_turns(self) -> GenerateBody:
        if self.raw and self.images:
            raise ValueError("images have no place in a raw prompt: the chat template writes them; leave raw out")
        if self.raw and self.system:
            raise ValueError("system has no place in a raw prompt: write it into the prompt, or leave raw out")
        return self


class EmbedBody(OllamaBody):
    """The body of POST /api/embed. truncate false: a text that is too long is an error. dimensions: how many of each
    vector's.
    """

    input: str | Annotated[list[str], Field(fail_fast=True)]
    truncate: bool | None = None
    dimensions: Annotated[Whole, Field(ge=1, lt=1 << 31)] | None = None


class EmbedOneBody(OllamaBody):
    """The body of POST /api/embeddings, as older clients have it."""

    prompt: str


class NameBody(_Body):
    """A body that names a model."""

    model: str
