"""From the items of a request to the turns of a conversation. Knows no model.

    input ── typed ──> Turns.add ──> [Message, ...]

What the assistant did comes as several items (reasoning, message, calls), which are one turn for a chat template.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.server.answers.requests import Message, PastCall
from ktransformers.server.api.openai.responses.tools import CUSTOM_INPUT, shown_name
from ktransformers.server.json_limits import MAX_DEPTH, json_size

__all__ = ["Turns", "kind_of", "sealed", "unsealed"]

_SEAL = b"ktransformers reasoning 1\n"
_MAX_SEALED = 4 << 20

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_REFUSED_PARTS = {
    "input_image": "images are not supported; describe them in text",
    "computer_screenshot": "images are not supported; describe them in text",
    "input_file": "files are not supported; send their text as input_text",
    "input_audio": "audio is not supported; send a transcript as input_text",
}
_REFUSED_ITEMS = {
    "compaction": "what another server compacted cannot be read here; send the items themselves",
    "computer_call_output": "screenshots are not supported",
}


class _Item(BaseModel):
    """Keys that clients keep beside these are taken."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _MessageItem(_Item):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None


class _FunctionCall(_Item):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    status: str | None = None


class _CustomCall(_Item):
    call_id: str
    name: str
    input: str
    namespace: str | None = None
    status: str | None = None


class _ShellCall(_Item):
    call_id: str | None = None
    id: str | None = None
    action: dict[str, Any]


class _CallOutput(_Item):
    call_id: str | None = None
    id: str | None = None
    output: str | list[dict[str, Any]]


class _ReasoningItem(_Item):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


_Kind = Literal["message", "call", "custom", "shell", "output", "reasoning"]

_KINDS: dict[str, tuple[_Kind, type[_Item]]] = {
    "message": ("message", _MessageItem),
    "function_call": ("call", _FunctionCall),
    "custom_tool_call": ("custom", _CustomCall),
    "local_shell_call": ("shell", _ShellCall),
    "function_call_output": ("output", _CallOutput),
    "custom_tool_call_output": ("output", _CallOutput),
    "local_shell_call_output": ("output", _CallOutput),
    "reasoning": ("reasoning", _ReasoningItem),
}


def sealed(reasoning: str) -> str | None:
    """`encrypted_content`: reasoning for a client that keeps it, and need not read it, until the next turn.

    None for more than clients may be expected to carry about.
    """
    text = reasoning.encode("utf-8", "replace")
    return base64.b64encode(_SEAL + text).decode() if len(text) <= _MAX_SEALED else None


def unsealed(content: str) -> str | None:
    """The reasoning in it; None for what another server made."""
    if len(content) > 2 * _MAX_SEALED:
        return None
    try:
        data = base64.b64decode(content, validate=True)
        return data.removeprefix(_SEAL).decode() if data.startswith(_SEAL) else None
    except (binascii.Error, ValueError):
        return None


def kind_of(item: Mapping[str, Any]) -> str:
    """The item's type; messages may leave it out."""
    kind = item.get("type")
    return "message" if kind is None and "role" in item else str(kind)


def _arguments(text: str, at: str) -> dict[str, Any]:
    if json_size(text.encode("utf-8", "surrogatepass")).depth > MAX_DEPTH:
        raise ConfigError(f"{at}.arguments has more than {MAX_DEPTH} lists and objects within each other")
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{at}.arguments is not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"{at}.arguments must be a JSON object")
    return arguments


def _is_cut(call: _FunctionCall) -> bool:
    """Whether an answer ended in the middle of this call, which then was never made."""
    if call.status != "incomplete":
        return False
    try:
        json.loads(call.arguments)
    except (ValueError, RecursionError):
        return True
    return False


def _text(content: str | Iterable[Mapping[str, Any]] | None, at: str) -> str:
    """Parts are joined with line breaks, as in chat completions."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        kind = str(part.get("type"))
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind in _REFUSED_PARTS:
            raise UnsupportedError(f"{at}[{index}]: {_REFUSED_PARTS[kind]}")
        if kind not in _TEXT_PARTS and kind != "refusal":
            raise UnsupportedError(f"{at}[{index}]: a part of type {kind[:64]!r} is not supported")
        if not isinstance(text, str):
            raise ConfigError(f"{at}[{index}].text must be a string")
        texts.append(text)
    return "\n".join(texts)


def _read(model: type[_Item], item: Mapping[str, Any], at: str) -> Any:
    try:
        return model.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = next((f".{part}" for part in first["loc"] if isinstance(part, str)), "")
        raise ConfigError(f"{at}{name}: {first['msg']}") from error


@dataclass(slots=True)
class Turns:
    """Feed it items in their order. ignored: types of items, and fields, that mean nothing here."""

    messages: list[Message] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    _reasoning: str = ""
    _text: str | None = None
    _calls: list[PastCall] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # of the calls, by their ids

    def add(self, item: Mapping[str, Any], at: str) -> None:
        """at: where it stands, for errors. Raises ConfigError and UnsupportedError."""
        kind = kind_of(item)
        if kind in _REFUSED_ITEMS:
            raise UnsupportedError(f"{at}: {_REFUSED_ITEMS[kind]}")
        if kind not in _KINDS:
            if not isinstance(item.get("type"), str):
                raise ConfigError(f"{at}.type must be a string")
            self.ignored[f"input.{kind}"] = None
            return
        name, model = _KINDS[kind]
        read = _read(model, item, at)
        match name:
            case "message":
                self._add_message(read, at)
            case "call":
                self._add_function_call(read, at)
            case "custom":
                self._add_custom_call(read)
            case "shell":
                self._add_call(read.call_id or read.id, "local_shell", read.action)
            case "output":
                self._add_output(read.call_id or read.id, _text(read.output, f"{at}.output"))
            case "reasoning":
                self._add_reasoning(read, at)

    def end(self) -> list[Message]:
        """All turns."""
        if self._reasoning or self._text is not None or self._calls:
            self.messages.append(
                Message(
                    role="assistant", text=self._text or "", reasoning=self._reasoning, tool_calls=tuple(self._calls)
                )
            )
        self._reasoning, self._text, self._calls = "", None, []
        return self.messages

    def _add_message(self, item: _MessageItem, at: str) -> None:
        text = _text(item.content, f"{at}.content")
        if item.role != "assistant":
            self.end()
            self.messages.append(Message(role=item.role, text=text))
            return
        if self._text is not None or self._calls:
            self.end()
        self._text = text

    def _add_function_call(self, item: _FunctionCall, at: str) -> None:
        if not _is_cut(item):
            self._add_call(item.call_id, shown_name(item.name, item.namespace), _arguments(item.arguments, at))

    def _add_custom_call(self, item: _CustomCall) -> None:
        if item.status != "incomplete":
            self._add_call(item.call_id, shown_name(item.name, item.namespace), {CUSTOM_INPUT: item.input})

    def _add_call(self, call_id: str | None, name: str, arguments: dict[str, Any]) -> None:
        if call_id is not None:
            self._names[call_id] = name
        self._calls.append(PastCall(id=call_id, name=name, arguments=arguments))

    def _add_output(self, call_id: str | None, text: str) -> None:
        self.end()
        name = None if call_id is None else self._names.get(call_id)
        self.messages.append(Message(role="tool", text=text, name=name, tool_call_id=call_id))

    def _add_reasoning(self, item: _ReasoningItem, at: str) -> None:
        if self._text is not None or self._calls:
            self.end()
        text = _text(item.content, f"{at}.content") or _text(item.summary, f"{at}.summary")
        if not text and item.encrypted_content:
            found = unsealed(item.encrypted_content)
            if found is None:
                self.ignored["input.reasoning.encrypted_content"] = None
            text = found or ""
        self._reasoning = "\n".join(filter(None, (self._reasoning, text)))
