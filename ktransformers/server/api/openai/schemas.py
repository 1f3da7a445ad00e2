"""The bodies of requests, as OpenAI's API defines them, with the extensions that vLLM's and llama.cpp's users know.

Types are strict and unknown fields are refused: nothing that a client asks for is ignored. Fields that change nothing
here (who asks, for what purpose) are listed in `_Neutral` and accepted; where only some values change nothing, only
those are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from ktransformers.server.answers.requests import MAX_ANSWERS
from ktransformers.server.api.openai.constraint_fields import ConstraintFields

__all__ = [
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DetokenizeBody",
    "FunctionTool",
    "GenerationFields",
    "MessageToolCall",
    "TokenizeBody",
]

_MAX_STOPS = 32
_MAX_STOP_CHARS = 1024
_MAX_STOP_CHARS_IN_ALL = 8192
_MAX_FIELDS = 256
_MAX_ID = (1 << 31) - 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: Any) -> Any:
        """Each unknown one is an error of its own, all of which pydantic would collect."""
        if isinstance(data, dict) and len(data) > _MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are more than any request has")
        return data


def _unicode(text: str) -> str:
    """What other processes and the tokenizer can be told: lone surrogates have no bytes."""
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


def _few_pairs(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise ValueError(f"metadata may have {_MAX_FIELDS} pairs")
    return value


def _number_values(value: Any) -> Any:
    if isinstance(value, dict):
        if not set(map(type, value.values())) <= {int, float}:
            raise ValueError("the values of logit_bias must be numbers")
        if not all(-100 <= bias <= 100 for bias in value.values()):
            raise ValueError("the values of logit_bias must be between -100 and 100")
    return value


def _are_ids(value: object) -> bool:
    """Whether this is a list of token ids, one at least. Takes a tenth of the time that pydantic takes."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _MAX_ID


def _quick_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    return value if _are_ids(value) else handler(value)


def _quick_prompt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Prompts of many ids are taken as they are, and those that are too many are not looked at one by one."""
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
TokenId = Annotated[int, Field(ge=0, le=_MAX_ID)]
Seconds = Annotated[FiniteFloat, Field(gt=0, le=1e6)]


class StreamOptions(_Model):
    """include_usage: a last chunk without choices carries the usage, all others carry `usage: null`."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Neutral(_Model):
    """Accepted because they change nothing about the answer of a server that keeps nothing and has one tier."""

    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few_pairs)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class GenerationFields(_Neutral, ConstraintFields):
    """What chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]], BeforeValidator(_number_values)] | None
    ) = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    # Extensions.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=1e-3, le=1e3)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(_quick_ids)] | None
    ) = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Seconds | None = None
    cache_salt: Annotated[UnicodeText, Field(max_length=256)] | None = None
    return_speed: bool | None = None

    @field_validator("stop")
    @classmethod
    def _stop_is_not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop == "":
            raise ValueError("stop strings must not be empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or {}:
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise ValueError(f"the keys of logit_bias must be token ids, got {key[:20]!r}")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class TextPart(_Model):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(_Model):
    """arguments: a JSON object as text."""

    name: str
    arguments: str


class MessageToolCall(_Model):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # what clients keep of a stream


class ChatMessage(_Model):
    """One turn. The role goes to the model's chat template as it is; the template knows which roles there are."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # What the official client sends back when an answer is put into the conversation as it came.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(_Model):
    """A function that the model may call. parameters: a JSON schema, shown to the model as it is."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # true would promise that arguments follow the schema


class FunctionTool(_Model):
    """An element of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatBody(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    thinking_budget: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        return self


class CompletionBody(GenerationFields):
    """POST /v1/completions. prompt: one text, several, the token ids of one, or of several.

    max_tokens 0 is allowed with echo: the answer is then the prompt alone. return_token_ids: choices carry the
    answer's token_ids, its end token included.
    """

    prompt: Annotated[
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)],
        WrapValidator(_quick_prompt),
    ]
    return_token_ids: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo: true")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported; leave it out, or set it to n")
        return self


class TokenizeBody(_Model):
    """POST /tokenize: a text, or a conversation through the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        of_messages = (self.tools, self.chat_template_kwargs, self.add_generation_prompt)
        if self.prompt is not None and any(field is not None for field in of_messages):
            raise ValueError("tools, chat_template_kwargs and add_generation_prompt belong to messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens belongs to prompt; a chat template writes its own special tokens")
        return self


class DetokenizeBody(_Model):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_quick_ids)]
