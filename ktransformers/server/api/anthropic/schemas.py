"""The bodies of requests, as Anthropic's API defines them, and the extensions that this server's other routes have.

Top-level fields are sorted by fields.py first. Keys of messages, blocks and tools that are not named here
(cache_control, citations, what other servers put into a history) say nothing about the answer and are taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from ktransformers.server.api.field_types import Choice, Whole, as_list, few_stops
from ktransformers.server.api.picture_parts import sent_pictures
from ktransformers.server.api.sampling_fields import SamplingFields, SchedulingFields

__all__ = [
    "Block",
    "CompactionBlock",
    "ConversationBody",
    "DocumentBlock",
    "ImageBlock",
    "InputMessage",
    "LeftOutBlock",
    "MessagesBody",
    "OtherBlock",
    "OutputConfig",
    "RedactedThinkingBlock",
    "ResultBlock",
    "SearchResultBlock",
    "ServerBlock",
    "TextBlock",
    "Thinking",
    "ThinkingBlock",
    "ToolDefinition",
    "ToolReferenceBlock",
    "ToolResultBlock",
    "ToolUseBlock",
]

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(_Part):
    """A block of text."""

    type: Literal["text"]
    text: str


def _blocks(value: Any) -> Any:
    """A string is one block of text."""
    return as_list(value, {"type": "text"}, "text")


_TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]
TextBlocks = Annotated[_TextBlocks, BeforeValidator(_blocks, json_schema_input_type=str | _TextBlocks)]


class TextSource(_Part):
    """The source of a document's text. Only text that comes with the request is read."""

    type: str
    data: str | None = None
    content: TextBlocks | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if not (self.type == "text" and self.data is not None) and not (
            self.type == "content" and self.content is not None
        ):
            raise ValueError("only documents of plain text are supported: send the text itself")
        return self


class ImageBlock(_Part):
    """A picture: {"type": "base64", "data": ...} or {"type": "url", "url": ...} as source."""

    type: Literal["image"]
    source: dict[str, object]

    @model_validator(mode="after")
    def _has_picture(self) -> Self:
        sent_pictures(vars(self))
        return self


class DocumentBlock(_Part):
    """A document of plain text."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Part):
    """A result of a search that the client made."""

    type: Literal["search_result"]
    source: str
    title: str
    content: TextBlocks


class ToolReferenceBlock(_Part):
    """The name of a tool that was found when the client searched for tools."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(_Part):
    """Reasoning of an earlier answer. signature: not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Part):
    """Reasoning that Anthropic's models encrypted: nobody else can read it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Part):
    """A call that an earlier answer made. input: an object, or whatever the model wrote instead."""

    type: Literal["tool_use"]
    id: str | None = None
    name: str | None = None
    input: Any = None


class ServerBlock(_Part):
    """A tool, a fetch or a container that ran on another provider's servers, and its result."""

    type: str


class CompactionBlock(_Part):
    """A summary that another server made of the turns before. content: None where it failed."""

    type: Literal["compaction"]
    content: str | None = None


class LeftOutBlock(_Part):
    """A part of a tool's result that no model here is shown. Its fields besides its type are not looked at."""

    type: str = "content"


class OtherBlock(_Part):
    """Content that no model here is shown. Refused."""

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise ValueError(f"content of the type {self.type[:64]!r} is not supported")


_RESULT_TYPES = ("text", "image", "document", "search_result", "tool_reference")
_TYPES = (*_RESULT_TYPES, "thinking", "redacted_thinking", "tool_use", "tool_result", "compaction")
_SERVER_TYPES = frozenset(
    {"server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload", "mcp_tool_listing", "fallback"}
)


def _tag_in(known: tuple[str, ...], value: Any) -> str:
    """Tags stand in angle brackets, so that they differ from fields where an error says its place."""
    type = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{type}>" if isinstance(type, str) and type in known else "<other>"


def _is_picture(value: object) -> bool:
    try:
        ImageBlock.model_validate(value)
    except ValidationError:
        return False
    return True


def _result_tag(value: Any) -> str:
    tag = _tag_in(_RESULT_TYPES, value)
    if isinstance(value, dict) and tag == "<image>":
        return tag if _is_picture(value) else "<other>"
    source = value.get("source") if isinstance(value, dict) and tag == "<document>" else None
    is_text = not isinstance(source, dict) or source.get("type") in ("text", "content")
    return tag if is_text else "<other>"


def _is_of_servers(type: Any) -> bool:
    """Results of their tools are named after them: web_search_tool_result, bash_code_execution_tool_result, ..."""
    return isinstance(type, str) and (type in _SERVER_TYPES or type.endswith("_tool_result"))


def _tag(value: Any) -> str:
    type = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<server>" if _is_of_servers(type) else _tag_in(_TYPES, value)


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[LeftOutBlock, Tag("<other>")],
    Discriminator(_result_tag),
]

_ResultBlocks = Annotated[list[ResultBlock], Field(fail_fast=True)]
ResultContent = Annotated[_ResultBlocks, BeforeValidator(_blocks, json_schema_input_type=str | _ResultBlocks)]


class ToolResultBlock(_Part):
    """The result of a tool call, or why the call failed."""

    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: ResultContent | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ServerBlock, Tag("<server>")]
    | Annotated[CompactionBlock, Tag("<compaction>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_tag),
]

_Blocks = Annotated[list[Block], Field(fail_fast=True)]


class InputMessage(_Part):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks, BeforeValidator(_blocks, json_schema_input_type=str | _Blocks)]


class ToolDefinition(_Part):
    """A tool that the client runs. input_schema: a JSON schema, shown to the model as it is."""

    type: str | None = None
    name: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_others(cls, data: Any) -> Any:
        """OpenAI's shapes."""
        if not isinstance(data, dict) or data.get("type") != "function" or "input_schema" in data:
            return data
        function = data["function"] if isinstance(data.get("function"), dict) else data
        schema = function.get("parameters")
        return function | {"type": "custom", "input_schema": {"type": "object"} if schema is None else schema}


class Thinking(_Part):
    """Setting of whether the model reasons before it answers. display "omitted": without showing it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Whole | None = None
    display: str | None = None


class OutputFormat(BaseModel):
    """A JSON schema that the answer has to fit. It is always followed; strict: whole, or not at all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class OutputConfig(_Part):
    """The output that the client wants. effort: how much the model reasons. format: what the answer has to fit."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class Trigger(_Part):
    """The number of tokens or tool uses above which a context edit is done."""

    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[Whole, Field(ge=0)]


class Keep(_Part):
    """The number of newest items that a context edit keeps; "all" has no number."""

    type: Literal["tool_uses", "thinking_turns", "all"]
    value: Annotated[Whole, Field(ge=0)] | None = None


class ClearAtLeast(_Part):
    """The number of tokens that a context edit must clear, else it is not done."""

    type: Literal["input_tokens"]
    value: Annotated[Whole, Field(ge=0)]


class ContextEdit(_Part):
    """An edit of the conversation: what is cleared, and when (context_edits.py). None: Anthropic's default."""

    type: str
    trigger: Trigger | None = None
    keep: Keep | Literal["all"] | None = None
    clear_at_least: ClearAtLeast | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ContextManagement(_Part):
    """Edits of the conversation before the model reads it."""

    edits: Annotated[list[ContextEdit], Field(max_length=16)] | None = None


class ConversationBody(BaseModel):
    """The body of POST /v1/messages/count_tokens, whose fields /v1/messages has too."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(ConversationBody, SamplingFields, SchedulingFields):
    """The body of POST /v1/messages. max_tokens 0 computes the prompt into the cache, and answers nothing."""

    max_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None

    @field_validator("stop_sequences")
    @classmethod
    def _few_chars(cls, stops: list[str] | None) -> list[str] | None:
        return None if stops is None else list(filter(None, few_stops(stops)))
