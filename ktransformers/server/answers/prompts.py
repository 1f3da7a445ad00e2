"""Makes the prompt ids of a conversation. Knows what chat templates expect, not who asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.media.picture import ReadPicture, media_items
from ktransformers.media.records import MediaItem
from ktransformers.server.answers.requests import Conversation, Message, Part, Tool
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.reasoning import OPENED_NEWLINE
from ktransformers.tokenizer.templates.effort import EFFORT_VARIABLES

__all__ = ["Prompt", "TemplateKwargs", "chat_prompt", "template_kwargs"]

_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "documents",
        "continue_final_message",
        "continue_reasoning",
        "reads_special_tokens",
        "max_len",
        "note_changes",
        "pictures",
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt, those of its pictures' positions included, and where its pictures are.

    changes: the names of what was folded in its conversation because the chat template does not keep it.
    """

    ids: Sequence[int]
    media: tuple[MediaItem, ...] = ()
    changes: tuple[str, ...] = ()


def _part(part: Part) -> dict[str, str]:
    """A part of a turn as templates take it that know pictures."""
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _turn(message: Message) -> dict[str, Any]:
    """What the model's template gets: what the message has, under the names that templates use."""
    content = message.content if isinstance(message.content, str) else [_part(part) for part in message.content]
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return turn


def _shown(tool: Tool) -> dict[str, Any]:
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


_SWITCHES = ("enable_thinking", "thinking")
"""How templates call the variable that turns reasoning on and off."""


@dataclass(frozen=True, slots=True)
class TemplateKwargs:
    """A request's variables for the chat template. given: to the template, besides messages and tools.
    ignored: fields of the request that it does not know, by the names that the client's dialect has.
    """

    given: dict[str, Any]
    ignored: tuple[str, ...]


def template_kwargs(tokenizer: Tokenizer, asked: Conversation) -> TemplateKwargs:
    """Return which of a conversation's variables its chat template takes. Raises ConfigError for names that are not the
    client's.
    """
    reserved = sorted(_RESERVED & asked.template_kwargs.keys())
    if reserved:
        raise ConfigError(f"chat_template_kwargs must not hold {reserved[0]}")
    ignored = [f"chat_template_kwargs.{name}" for name in asked.template_kwargs if not tokenizer.template_knows(name)]
    given = {name: value for name, value in asked.template_kwargs.items() if tokenizer.template_knows(name)}
    effort, thinks, budget = asked.reasoning_effort, asked.thinks, asked.reasoning_budget
    if thinks is None and (budget == 0 or effort == "none"):
        thinks = False
    switch = next((name for name in _SWITCHES if tokenizer.template_knows(name)), None)
    variable = next((name for name in EFFORT_VARIABLES if tokenizer.template_knows(name)), None)
    if effort is not None and variable is not None:
        given.setdefault(variable, effort)
    elif effort is not None and not (effort == "none" and switch is not None):
        ignored.append("reasoning_effort")
    if thinks is not None and switch is not None:
        given.setdefault(switch, thinks)
    elif asked.thinks is not None:
        ignored.append("enable_thinking")
    if budget is not None and tokenizer.template_knows("thinking_budget"):
        given.setdefault("thinking_budget", budget)
    return TemplateKwargs(given, asked.named(ignored))


def chat_prompt(
    tokenizer: Tokenizer,
    asked: Conversation,
    *,
    max_len: int | None = None,
    force_think: bool = False,
    reads_special_tokens: bool = False,
) -> Prompt:
    """Return the prompt of a conversation whose pictures are read. force_think: open the reasoning when the template
    has not done it.

    reads_special_tokens: those that a message spells are tokens, too; else they are text, so that nobody can forge a
    turn. Raises ConfigError and UnsupportedError for what the template refuses, ContextLengthError for more than
    max_len tokens.
    """
    kwargs = template_kwargs(tokenizer, asked).given
    if asked.tools and tokenizer.has_chat_template and not tokenizer.has_tool_calls:
        raise UnsupportedError("tools are switched off here (--tool_format none): leave them out")
    # A last message without text is no turn yet: the template opens it, as it opens every answer.
    messages = asked.messages if asked.continues_text or not asked.continues else asked.messages[:-1]
    turns = [_turn(message) for message in messages]
    tools = [_shown(tool) for tool in asked.tools]
    pictures = [part for message in messages for part in message.parts if isinstance(part, ReadPicture)]
    if pictures:
        kwargs = {**kwargs, "pictures": pictures}
    changes: list[str] = []
    prompt_ids = tokenizer.apply_chat_template(
        turns,
        tools,
        asked.opens_answer or asked.continues,
        continue_final_message=asked.continues_text,
        continue_reasoning=asked.messages[-1].reasoning if asked.continues_reasoning else None,
        reads_special_tokens=reads_special_tokens,
        max_len=max_len,
        note_changes=changes.extend,
        **kwargs,
    )
    tags, opens = tokenizer.reasoning_tags, asked.opens_answer and not asked.continues
    if force_think and tags is not None and opens and not tokenizer.opens_reasoning(prompt_ids):
        prompt_ids += tokenizer.encode(tags[0] + OPENED_NEWLINE, add_special_tokens=False)
    return Prompt(prompt_ids, media_items(prompt_ids, pictures), asked.named(changes))
