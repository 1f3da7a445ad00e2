"""From messages and tools to prompt ids. Knows what chat templates expect, not who asked.

Two forms differ between OpenAI's API and the templates that models come with: content parts (templates want one text)
and the arguments of earlier tool calls (JSON as text there, an object here).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.server.json_limits import MAX_DEPTH, json_size
from ktransformers.server.schemas import ChatMessage, Tool
from ktransformers.tokenizer import Tokenizer

__all__ = ["FORCED_NEWLINE", "chat_prompt", "template_message"]

FORCED_NEWLINE = "\n"
"""Follows a reasoning tag that the server opens, as the templates of DeepSeek-R1 and Qwen3 write it."""


def _arguments(text: str, at: str) -> dict[str, Any]:
    if json_size(text.encode("utf-8", "surrogatepass")).depth > MAX_DEPTH:
        raise ConfigError(f"{at}.function.arguments has more than {MAX_DEPTH} lists and objects within each other")
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{at}.function.arguments is not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"{at}.function.arguments must be a JSON object")
    return arguments


def template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """What the model's template gets for messages[index]: the fields that were sent, in its forms."""
    turn: dict[str, Any] = {"role": message.role}
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    turn["content"] = content or ""
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        turn["reasoning_content"] = reasoning
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"messages[{index}].tool_calls[{i}]"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return turn


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool] | None,
    template_kwargs: dict[str, Any],
    add_generation_prompt: bool = True,
    force_think: bool = False,
    max_len: int | None = None,
) -> list[int]:
    """Prompt ids of a conversation. force_think: open the reasoning when the template has not done it.

    Raises ConfigError and UnsupportedError for what the template refuses or would ignore, ContextLengthError for more
    than max_len tokens.
    """
    reserved = sorted({"messages", "tools", "add_generation_prompt", "tokenize", "documents"} & template_kwargs.keys())
    if reserved:
        raise ConfigError(f"chat_template_kwargs must not hold {reserved[0]}")
    for name in template_kwargs:
        if not tokenizer.template_knows(name):
            raise UnsupportedError(f"this model's chat template does not know {name[:100]!r}")
    if tools and not tokenizer.template_knows("tools"):
        raise UnsupportedError("this model's chat template does not know tools")
    turns = [template_message(message, index) for index, message in enumerate(messages)]
    shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    try:
        text = tokenizer.render_chat_template(turns, shown, add_generation_prompt, **template_kwargs)
    except RecursionError as error:
        raise ConfigError(
            "tools, tool calls or chat_template_kwargs are nested too deeply for a chat template"
        ) from error
    prompt_ids = tokenizer.encode(text, add_special_tokens=False, max_len=max_len)
    tags = tokenizer.reasoning_tags
    if force_think and tags is not None and add_generation_prompt and not tokenizer.opens_reasoning(prompt_ids):
        prompt_ids += tokenizer.encode(tags[0] + FORCED_NEWLINE, add_special_tokens=False)
    return prompt_ids
