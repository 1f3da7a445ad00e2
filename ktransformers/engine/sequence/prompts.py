"""Prompts and conversations as callers give them: strings, ids in lists, arrays and tensors, messages.

Knows arrays by what they can do (`tolist`), so that neither numpy nor torch nor others are imported for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from ktransformers.errors import ConfigError
from ktransformers.media.records import MediaItem

__all__ = [
    "PromptIds",
    "check_callable",
    "check_conversation",
    "check_tools",
    "ids_of",
    "is_one_conversation",
    "media_of",
    "prompts_of",
    "shown",
]

_MOST_SHOWN = 60

_PROMPT = "a prompt is a string or a list of token ids"
_PROMPTS = "prompts are a string, a list of token ids, or a list of those"
_MESSAGE = "a message is a dict with `role` and `content`"
_CONVERSATION = 'a conversation is a string, or a list of messages: [{"role": "user", "content": "..."}]'


class PromptIds(list[int]):
    """The token ids of a prompt. media: its pictures, whose positions have pseudo-ids."""

    def __init__(self, ids: Iterable[int] = (), media: Sequence[MediaItem] = ()):
        super().__init__(ids)
        self.media = tuple(media)


def media_of(prompt_ids: Sequence[int]) -> tuple[MediaItem, ...]:
    """Return the pictures of a prompt: those of PromptIds, none of other ids."""
    return prompt_ids.media if isinstance(prompt_ids, PromptIds) else ()


def shown(value: object) -> str:
    """Return a value as an error message shows it, cut to a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def check_callable(name: str, value: object) -> None:
    """Raise ConfigError for what is neither None nor a function."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function, got {shown(value)}")


def prompts_of(given: Any) -> list[Any]:
    """Return the single prompts in what `generate` was given, each for `ids_of`. Raises ConfigError for what holds
    none."""
    if isinstance(given, str | Mapping | PromptIds):
        return [given]
    if _is_array(given):
        rows = _listed(given)
        return rows if rows and isinstance(rows[0], list) else [rows]
    if isinstance(given, bytes | bytearray) or not isinstance(given, Sequence):
        raise ConfigError(f"{_PROMPTS}, got {shown(given)}")
    return [given] if len(given) and _is_id(given[0]) else list(given)


def ids_of(prompt: object, encode: Callable[[str], list[int]]) -> PromptIds:
    """Token ids of one prompt: PromptIds as they are, and those of what `_plain_ids` takes."""
    return prompt if isinstance(prompt, PromptIds) else PromptIds(_plain_ids(prompt, encode))


def _plain_ids(prompt: Any, encode: Callable[[str], list[int]]) -> list[int]:
    """Token ids of one prompt: text, which `encode` turns into ids, or ids. Raises ConfigError for what is neither.

    Ids may be a sequence, an array or a tensor of whole numbers (one row), or vLLM's {"prompt_token_ids": ids}.
    """
    if isinstance(prompt, Mapping):
        prompt = _inside(prompt)
    if isinstance(prompt, str):
        return encode(prompt)
    if _is_array(prompt):
        rows = _listed(prompt)
        if rows and isinstance(rows[0], list):
            if len(rows) != 1:
                raise ConfigError(f"{_PROMPT}, got an array of {len(rows)} rows; `generate` of LLM takes several")
            return cast("list[int]", rows[0])
        return rows
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not is_list or not all(_is_id(one) for one in prompt):
        raise ConfigError(f"{_PROMPT}, got {shown(prompt)}")
    return [operator.index(one) for one in prompt]


def _inside(prompt: Mapping[str, Any]) -> Any:
    """What vLLM's TextPrompt and TokensPrompt hold."""
    names = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    if len(names) != 1 or len(prompt) > 2:
        raise ConfigError(f'{_PROMPT}, or {{"prompt": text}} or {{"prompt_token_ids": ids}}, got {shown(prompt)}')
    return prompt[names[0]]


def _is_id(value: object) -> bool:
    if isinstance(value, bool | str) or getattr(value, "shape", ()) not in ((), []):
        return False
    try:
        operator.index(cast("Any", value))
    except TypeError:
        return False
    return type(value).__name__ not in ("bool_", "bool")


def _is_array(value: object) -> bool:
    """Whether this is an array or a tensor of some library."""
    return hasattr(value, "tolist") and hasattr(value, "shape") and hasattr(value, "dtype")


def _listed(array: Any) -> list[Any]:
    """An array of one or two axes as lists of ids. Raises ConfigError for others, and for what is not whole numbers."""
    rows, kind = array.tolist(), f"an array of {array.dtype} and shape {tuple(array.shape)}"
    if len(tuple(array.shape)) not in (1, 2):
        raise ConfigError(f"token ids are an array of one axis, or of two for several prompts, got {kind}")
    flat = rows if not rows or not isinstance(rows[0], list) else [one for row in rows for one in row]
    if any(type(one) is not int for one in flat):
        raise ConfigError(f"token ids are whole numbers, got {kind}")
    return cast("list[Any]", rows)


def is_one_conversation(given: Any) -> bool:
    """Whether this is one conversation, rather than several. Raises ConfigError for what is neither."""
    if isinstance(given, str):
        return True
    if isinstance(given, Mapping):
        raise ConfigError(f"{_CONVERSATION}, got one message, {shown(given)}; put it in a list")
    if isinstance(given, bytes | bytearray) or not isinstance(given, Sequence):
        raise ConfigError(f"{_CONVERSATION}, got {shown(given)}")
    if not given:
        raise ConfigError("a conversation needs at least one message")
    return isinstance(given[0], Mapping)


def check_conversation(messages: Any) -> None:
    """Raise ConfigError for what no chat template can take. messages: one conversation."""
    if isinstance(messages, bytes | bytearray | Mapping) or not isinstance(messages, Sequence):
        raise ConfigError(f"{_CONVERSATION}, got {shown(messages)}")
    for index, message in enumerate(messages):
        where = f"message {index} of {len(messages)} (counted from 0)" if len(messages) > 1 else "the message"
        if not isinstance(message, Mapping):
            raise ConfigError(f'{_MESSAGE}, got {shown(message)}; a question by itself is a string: chat("...")')
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ConfigError(f"{where} has no `role`, or one that is no word: {_MESSAGE}, got {shown(message)}")
        if content is None and (role != "assistant" or set(message) <= {"role", "content"}):
            raise ConfigError(f"{where}, of the {role}, has no `content`: {_MESSAGE}, got {shown(message)}")
        is_parts = isinstance(content, Sequence) and all(isinstance(part, Mapping | str) for part in content)
        if content is not None and not is_parts:
            raise ConfigError(f"the `content` of {where} must be a string, or a list of parts, got {shown(content)}")


def check_tools(tools: Any) -> None:
    """Raise ConfigError for what is no list of tools."""
    if tools is None:
        return
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools must be a list of dicts, as OpenAI's API has them, got {shown(tools)}")
    for tool in tools:
        if not isinstance(tool, Mapping) and not callable(tool):
            raise ConfigError(f"a tool is a dict with `type` and `function`, got {shown(tool)}")
