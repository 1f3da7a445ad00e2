"""From a conversation to prompt ids. Knows what chat templates expect, not who asked."""

from __future__ import annotations

from typing import Any

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.server.answers.requests import Conversation, Message, Tool
from ktransformers.tokenizer import Tokenizer

__all__ = ["chat_prompt"]

_FORCED_NEWLINE = "\n"
"""Follows a reasoning tag that the server opens, as the templates of DeepSeek-R1 and Qwen3 write it."""

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "tokenize", "documents"})


def _turn(message: Message) -> dict[str, Any]:
    """What the model's template gets: what the message has, under the names that templates use."""
    turn: dict[str, Any] = {"role": message.role, "content": message.text}
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
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _template_kwargs(tokenizer: Tokenizer, asked: Conversation) -> dict[str, Any]:
    """What the template gets besides messages and tools. Raises for what it would ignore."""
    kwargs = dict(asked.template_kwargs)
    if asked.reasoning_effort is not None:
        kwargs["reasoning_effort"] = asked.reasoning_effort
    reserved = sorted(_RESERVED & kwargs.keys())
    if reserved:
        raise ConfigError(f"chat_template_kwargs must not hold {reserved[0]}")
    for name in kwargs:
        if not tokenizer.template_knows(name):
            raise UnsupportedError(f"this model's chat template does not know {name[:100]!r}")
    return kwargs


def chat_prompt(
    tokenizer: Tokenizer, asked: Conversation, *, max_len: int | None = None, force_think: bool = False
) -> list[int]:
    """Prompt ids of a conversation. force_think: open the reasoning when the template has not done it.

    Raises ConfigError and UnsupportedError for what the template refuses or would ignore, ContextLengthError for more
    than max_len tokens.
    """
    kwargs = _template_kwargs(tokenizer, asked)
    if asked.tools and not tokenizer.template_knows("tools"):
        raise UnsupportedError("this model's chat template does not know tools")
    turns, tools = [_turn(message) for message in asked.messages], [_shown(tool) for tool in asked.tools]
    try:
        text = tokenizer.render_chat_template(turns, tools, asked.opens_answer, **kwargs)
    except RecursionError as error:
        raise ConfigError(
            "tools, tool calls or chat_template_kwargs are nested too deeply for a chat template"
        ) from error
    prompt_ids = tokenizer.encode(text, add_special_tokens=False, max_len=max_len)
    tags = tokenizer.reasoning_tags
    if force_think and tags is not None and asked.opens_answer and not tokenizer.opens_reasoning(prompt_ids):
        prompt_ids += tokenizer.encode(tags[0] + _FORCED_NEWLINE, add_special_tokens=False)
    return prompt_ids
