"""Reads Anthropic's bodies into the requests of server/answers.

Turns there hold lists of blocks; chat templates want texts and pictures, calls and reasoning beside them, and a turn of
the role `tool` for each result. Neighbouring turns of one role are one turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ktransformers.core import Constraint
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.server.answers.constraints import constraint_of
from ktransformers.server.answers.history import Alter, left_out, past_arguments
from ktransformers.server.answers.requests import (
    ChatRequest,
    Content,
    Conversation,
    Message,
    Part,
    PastCall,
    Tool,
    ToolChoice,
    joined,
)
from ktransformers.server.answers.tool_choices import choose
from ktransformers.server.api.anthropic.context_edits import CLEAR_THINKING, CLEAR_TOOL_USES
from ktransformers.server.api.anthropic.schemas import (
    Block,
    CompactionBlock,
    ContextEdit,
    ConversationBody,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    LeftOutBlock,
    MessagesBody,
    OutputConfig,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    ServerBlock,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from ktransformers.server.api.picture_parts import sent_pictures

__all__ = ["Reading", "edits_of", "read_chat", "read_conversation"]

Note = Callable[[str], None]
"""Called with the name of each field that has no effect."""

_ACCOUNT = "x-anthropic-billing-header:"
"""Begins a line of Claude Code's system prompt that is about billing, and differs in every request: the model is not
shown it, since no prefix of such a prompt would be in the cache."""

_EFFORTS = {"xhigh": "high", "max": "high"}
"""Levels above those that chat templates know."""

_EDITS = (CLEAR_TOOL_USES, CLEAR_THINKING)

_SEARCH_TOOLS = "tool_search_tool_"
"""Begins the types of tools that find other tools. Here the model is shown all of them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A conversation read from a body. ignored: names of fields that have no effect here, whatever the model."""

    conversation: Conversation
    tool_choice: ToolChoice
    ignored: tuple[str, ...]


# The conversation.


def _parts(block: ResultBlock | Block, place: str, alter: Alter) -> Iterator[Part]:
    """place: of the block in the body."""
    if isinstance(block, ImageBlock):
        name = "messages.tool_result.image" if place.count(".content") > 1 else "messages.image"
        yield from sent_pictures(vars(block)).at(place, name)
    else:
        yield _shown(block, alter)


def _shown(block: ResultBlock | Block, alter: Alter) -> str:
    match block:
        case TextBlock():
            return block.text
        case DocumentBlock():
            text = block.source.data or _text(block.source.content or (), alter)
            return "\n".join(part for part in (block.title, block.context, text) if part)
        case SearchResultBlock():
            return "\n".join((block.title, block.source, _text(block.content, alter)))
        case ToolReferenceBlock():
            return block.tool_name
        case LeftOutBlock():
            alter(f"messages.tool_result.{block.type}")
            return left_out("picture" if block.type == "image" else block.type[:64])
    raise AssertionError(block)


def _text(blocks: Sequence[ResultBlock], alter: Alter) -> str:
    return "\n".join(_shown(block, alter) for block in blocks)


def _system(system: Sequence[TextBlock] | None) -> str:
    texts = [block.text for block in system or ()]
    shown = [text.partition("\n")[2] if text.startswith(_ACCOUNT) else text for text in texts]
    return "\n".join(text for text in shown if text)


def _result(block: ToolResultBlock, place: str, alter: Alter) -> Content:
    """Templates know no failed calls: the text has to say it."""
    places = ((one, f"{place}.content[{index}]") for index, one in enumerate(block.content or ()))
    content = joined(part for one, at in places for part in _parts(one, at, alter))
    first, *rest = (content,) if isinstance(content, str) else content
    if not isinstance(first, str):
        first, rest = "", [first, *rest]
    return joined([f"Error: {first}", *rest]) if block.is_error and "error" not in first[:64].lower() else content


class _Turns:
    """Makes the template's turns of the messages, one after the other. altered: see Conversation."""

    def __init__(self, note: Note):
        self.made: list[Message] = []
        self.altered: list[str] = []
        self._note = note
        self._is_begun = False  # whether others than the system spoke
        self._tool_names: dict[str, str] = {}  # by the ids of calls

    def add(self, message: InputMessage, at: str) -> None:
        turns = {"assistant": self._assistant, "user": self._user, "system": self._system}[message.role]
        self.made += turns(message.content, at)
        self._is_begun = self._is_begun or message.role != "system"

    def _assistant(self, blocks: Iterable[Block], at: str) -> Iterator[Message]:
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(blocks):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case RedactedThinkingBlock():
                    self._note("messages.redacted_thinking")
                case ToolUseBlock():
                    calls.append(self._call(block))
                case ServerBlock():
                    self._note(f"messages.{block.type}")
                case CompactionBlock():
                    texts.append(self._summary(block))
                case _:
                    raise ConfigError(f"{at}.content[{index}]: {block.type} does not belong to the assistant's turns")
        yield Message(role="assistant", content="".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls))

    def _call(self, block: ToolUseBlock) -> PastCall:
        name = block.name or ""
        if block.id:
            self._tool_names[block.id] = name
        arguments = past_arguments(block.input, "messages.tool_use.input", self.altered.append)
        return PastCall(name=name, arguments=arguments, id=block.id or None)

    def _summary(self, block: CompactionBlock) -> str:
        """What is left of earlier turns is shown where it stands; one that failed stands for nothing."""
        if not block.content:
            self._note("messages.compaction")
        return block.content or ""

    def _user(self, blocks: Iterable[Block], at: str) -> Iterator[Message]:
        parts: list[Part] = []
        for index, block in enumerate(blocks):
            place = f"{at}.content[{index}]"
            match block:
                case TextBlock() | ImageBlock() | DocumentBlock() | SearchResultBlock() | ToolReferenceBlock():
                    parts += _parts(block, place, self.altered.append)
                case ServerBlock():
                    self._note(f"messages.{block.type}")
                case CompactionBlock():
                    parts.append(self._summary(block))
                case ToolResultBlock():
                    if parts:
                        yield Message(role="user", content=joined(parts))
                        parts = []
                    id = block.tool_use_id or None
                    name = None if id is None else self._tool_names.get(id)
                    content = _result(block, place, self.altered.append)
                    yield Message(role="tool", content=content, tool_call_id=id, name=name)
                case _:
                    raise ConfigError(f"{place}: {block.type} does not belong to the user's turns")
        if parts:
            yield Message(role="user", content=joined(parts))

    def _system(self, blocks: Iterable[Block], at: str) -> Iterator[Message]:
        """Many templates take no system turn but the first. Later ones are written as Claude Code's tools expect it."""
        texts = []
        for index, block in enumerate(blocks):
            if not isinstance(block, TextBlock):
                raise ConfigError(f"{at}.content[{index}]: {block.type} does not belong to the system's turns")
            texts.append(block.text)
        text = "\n".join(texts)
        if self._is_begun:
            yield Message(role="user", content=f"<system-reminder>\n{text}\n</system-reminder>")
        else:
            yield Message(role="system", content=text)


def _joined(turns: Iterable[Message]) -> Iterator[Message]:
    """Neighbours of one role as one turn; results of calls stay apart."""
    for role, group in groupby(turns, key=lambda turn: turn.role):
        run = list(group)
        if role == "tool" or len(run) == 1:
            yield from run
            continue
        yield Message(
            role=role,
            content=joined(part for turn in run for part in turn.parts if part),
            reasoning="\n".join(turn.reasoning for turn in run if turn.reasoning),
            tool_calls=tuple(call for turn in run for call in turn.tool_calls),
        )


def _messages(body: ConversationBody, note: Note) -> tuple[list[Message], list[str]]:
    """The turns, and what of them was altered."""
    turns = _Turns(note)
    system = _system(body.system)
    if system:
        turns.made.append(Message(role="system", content=system))
    for index, message in enumerate(body.messages):
        turns.add(message, f"messages[{index}]")
    messages = list(_joined(turns.made))
    if not messages or messages[-1].role == "system":
        raise ConfigError("messages: there is nothing to answer")
    if messages[-1].tool_calls:
        raise ConfigError("the last message calls a tool: send its result")
    return messages, turns.altered


# Tools.


def _tools(body: ConversationBody, note: Note) -> list[Tool]:
    named = [_tool(tool, f"tools[{index}]", note) for index, tool in enumerate(body.tools or ())]
    tools = [tool for tool in named if isinstance(tool, Tool)]
    refused = [tool for tool in named if isinstance(tool, _Foreign)]
    if refused and not tools:  # beside others, an answer is of use without them
        raise UnsupportedError(refused[0].why)
    for one in refused:
        note(f"tools.{one.type}")
    return tools


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A tool that does not exist here. why: said where it is the only one."""

    type: str
    why: str


def _tool(tool: ToolDefinition, at: str, note: Note) -> Tool | _Foreign | None:
    if tool.type not in (None, "custom"):
        if tool.type.startswith(_SEARCH_TOOLS):
            note("tools.tool_search_tool")
            return None
        return _Foreign(
            tool.type,
            f"{at}: {tool.type[:64]!r} is a tool that Anthropic runs, or whose schema only its models know; "
            "use tools of your own, with an input_schema",
        )
    for field in ("name", "input_schema"):
        if getattr(tool, field) is None:
            raise ConfigError(f"{at}.{field}: Field required")
    return Tool(name=tool.name or "", description=tool.description, parameters=tool.input_schema, strict=tool.strict)


def _field_names(body: ConversationBody) -> dict[str, str]:
    """See Conversation."""
    has_late = any(message.role == "system" for message in body.messages)
    return {
        "messages.system": "system" if _system(body.system) and not has_late else "messages.system",
        "messages.tool_calls": "messages.tool_use",
        "messages.tool": "messages.tool_result",
        "reasoning_effort": "output_config.effort",
        "enable_thinking": "thinking",
    }


def edits_of(body: ConversationBody) -> list[ContextEdit]:
    """Return the edits of the conversation that the body's `context_management` asks for."""
    return [] if body.context_management is None else body.context_management.edits or []


def read_conversation(body: ConversationBody) -> Reading:
    """Read the conversation of a body. Raises ConfigError and UnsupportedError for what this server does not do."""
    ignored: list[str] = []
    config, thinking = body.output_config or OutputConfig(), body.thinking
    messages, altered = _messages(body, ignored.append)
    ignored += [f"context_management.edits.{edit.type}" for edit in edits_of(body) if edit.type not in _EDITS]
    if config.format is not None and messages[-1].role == "assistant":
        raise ConfigError(
            "output_config.format: the last message is the assistant's and begins the answer already; send one of them"
        )
    is_single = body.parallel_tool_calls is False
    tools, tool_choice = choose(body.tool_choice, _tools(body, ignored.append), is_single=is_single)
    conversation = Conversation(
        messages=messages,
        altered=altered,
        field_names=_field_names(body),
        tools=tools,
        template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=_EFFORTS.get(config.effort or "", config.effort),
        thinks=None if thinking is None else thinking.type != "disabled",
        reasoning_budget=None if thinking is None else thinking.budget_tokens,
        continues=messages[-1].role == "assistant",
        drops_oldest=None if body.truncation is None else body.truncation == "auto",
    )
    return Reading(conversation, tool_choice, tuple(dict.fromkeys(ignored)))


def _constraint(body: ConversationBody) -> Constraint | None:
    form = None if body.output_config is None else body.output_config.format
    if form is None:
        return None
    return constraint_of({"output_config.format": form.model_dump(by_alias=True, exclude_none=True)})


def read_chat(body: MessagesBody, reading: Reading) -> ChatRequest:
    """Return the request for an answer to a conversation that was read before. max_tokens 0 computes one token all the
    same.
    """
    return ChatRequest(
        id=f"msg_{secrets.token_hex(12)}",
        model=body.model,
        sampling=body.sampling(max_tokens=max(body.max_tokens, 1), stop=body.stop_sequences),
        constraint=_constraint(body),
        **body.scheduling,
        is_prompt_only=body.max_tokens == 0,
        conversation=reading.conversation,
        tool_choice=reading.tool_choice,
    )
