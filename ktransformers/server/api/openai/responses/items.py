"""Turns the items of a request into the turns of a conversation. Knows no model.

    input ── typed ──> Turns.add ──> [Message, ...]

What the assistant did comes as several items (reasoning, message, calls), which are one turn for a chat template.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ktransformers.errors import ConfigError, FieldError, UnsupportedError
from ktransformers.server.answers.custom_tools import CUSTOM_INPUT
from ktransformers.server.answers.history import is_arguments, left_out, past_arguments, result_text
from ktransformers.server.answers.requests import Content, Message, Part, PastCall, joined
from ktransformers.server.api.openai.responses.tools import shown_name
from ktransformers.server.api.picture_parts import PICTURE_TYPES, sent_pictures

__all__ = ["Turns", "answered_calls", "kind_of", "sealed", "unsealed"]

_SEAL = b"ktransformers reasoning 1\n"
_MAX_SEALED = 4 << 20

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_REFUSED_PARTS = {
    "input_file": "files are not supported; send their text as input_text",
    "input_audio": "audio is not supported; send a transcript as input_text",
}
_REFUSED_ITEMS = {
    "compaction": "what another server compacted cannot be read here; send the items themselves",
}


class _Item(BaseModel):
    """Keys that clients keep beside these are taken."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _MessageItem(_Item):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None


class _FunctionCall(_Item):
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    arguments: Any = None
    namespace: str | None = None
    status: str | None = None


class _CustomCall(_Item):
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    namespace: str | None = None
    status: str | None = None


class _ShellCall(_Item):
    call_id: str | None = None
    id: str | None = None
    action: dict[str, Any]


class _CallOutput(_Item):
    call_id: str | None = None
    id: str | None = None
    output: Any = None


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
    """Return reasoning as `encrypted_content`, which a client keeps until the next turn and need not read.

    None for more than clients may be expected to carry about.
    """
    text = reasoning.encode("utf-8", "replace")
    return base64.b64encode(_SEAL + text).decode() if len(text) <= _MAX_SEALED else None


def unsealed(content: str) -> str | None:
    """Return the reasoning in a value of `encrypted_content`; None for what another server made."""
    if len(content) > 2 * _MAX_SEALED:
        return None
    try:
        data = base64.b64decode(content, validate=True)
        return data.removeprefix(_SEAL).decode() if data.startswith(_SEAL) else None
    except (binascii.Error, ValueError):
        return None


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the item's type, which messages may leave out."""
    kind = item.get("type")
    return "message" if kind is None and "role" in item else str(kind)


def answered_calls(items: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the ids of the calls whose results are among these items."""
    outputs = (item for item in items if kind_of(item) in _KINDS and _KINDS[kind_of(item)][0] == "output")
    ids = (item.get("call_id") or item.get("id") for item in outputs)
    return frozenset(id for id in ids if isinstance(id, str))


def _content(content: str | Iterable[Mapping[str, Any]] | None, at: str) -> Content:
    """Neighbouring texts are joined with line breaks, as in chat completions."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Part] = []
    for index, part in enumerate(content):
        kind, place = str(part.get("type")), f"{at}[{index}]"
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind in _REFUSED_PARTS:
            raise UnsupportedError(f"{place}: {_REFUSED_PARTS[kind]}")
        if kind in PICTURE_TYPES:
            try:
                parts += sent_pictures(part).at(place, f"input.message.{kind}")
            except ValueError as error:
                raise FieldError(f"{place}.{error}", place) from error
            continue
        if kind not in _TEXT_PARTS and kind != "refusal":
            raise UnsupportedError(f"{place}: a part of type {kind[:64]!r} is not supported")
        if not isinstance(text, str):
            raise ConfigError(f"{place}.text must be a string")
        parts.append(text)
    return joined(parts)


def _text(content: Iterable[Mapping[str, Any]] | None, at: str) -> str:
    found = _content(content, at)
    if not isinstance(found, str):
        raise ConfigError(f"{at}: pictures do not belong there")
    return found


def _read(model: type[_Item], item: Mapping[str, Any], at: str) -> Any:
    try:
        return model.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = next((f".{part}" for part in first["loc"] if isinstance(part, str)), "")
        raise ConfigError(f"{at}{name}: {first['msg']}") from error


@dataclass(slots=True)
class Turns:
    """Builds the turns of a conversation from items, fed in their order. answered: ids of calls that have a result
    among all items, see `answered_calls`.

    ignored: types of items, and fields, that mean nothing here. altered: what the model is shown in another form.
    """

    answered: frozenset[str] = frozenset()
    messages: list[Message] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    altered: dict[str, None] = field(default_factory=dict)
    _reasoning: str = ""
    _said: Content | None = None
    _calls: list[PastCall] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # of the calls, by their ids

    def add(self, item: Mapping[str, Any], at: str) -> None:
        """Add the next item. at: where it stands, for errors. Raises ConfigError and UnsupportedError."""
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
                self._add_function_call(read)
            case "custom":
                self._add_custom_call(read)
            case "shell":
                self._add_call(read.call_id or read.id, "local_shell", read.action)
            case "output":
                shown = self._output(read.output, f"input.{kind}.output", f"{at}.output")
                self._add_output(read.call_id or read.id, shown)
            case "reasoning":
                self._add_reasoning(read, at)

    def end(self) -> list[Message]:
        """End the last turn, and return all turns."""
        if self._reasoning or self._said is not None or self._calls:
            self.messages.append(
                Message(
                    role="assistant",
                    content=self._said or "",
                    reasoning=self._reasoning,
                    tool_calls=tuple(self._calls),
                )
            )
        self._reasoning, self._said, self._calls = "", None, []
        return self.messages

    def _add_message(self, item: _MessageItem, at: str) -> None:
        content = _content(item.content, f"{at}.content")
        if item.role != "assistant":
            self.end()
            self.messages.append(Message(role=item.role, content=content))
            return
        if self._said is not None or self._calls:
            self.end()
        self._said = content

    def _alter(self, name: str) -> None:
        self.altered[name] = None

    def _is_unmade(self, item: _FunctionCall | _CustomCall) -> bool:
        """Whether an answer ended in the middle of this call, and nobody has made it all the same."""
        return item.status == "incomplete" and (item.call_id or item.id) not in self.answered

    def _add_function_call(self, item: _FunctionCall) -> None:
        field = "input.function_call.arguments"
        if self._is_unmade(item) and not (isinstance(item.arguments, str) and is_arguments(item.arguments)):
            self._alter("input.function_call")
            return
        arguments = past_arguments(item.arguments, field, self._alter)
        self._add_call(item.call_id or item.id, shown_name(item.name or "", item.namespace), arguments)

    def _add_custom_call(self, item: _CustomCall) -> None:
        if self._is_unmade(item):
            self._alter("input.custom_tool_call")
            return
        text = "" if item.input is None else item.input
        if not isinstance(text, str):
            text = result_text(text, "input.custom_tool_call.input", self._alter)
        self._add_call(item.call_id or item.id, shown_name(item.name or "", item.namespace), {CUSTOM_INPUT: text})

    def _output(self, output: Any, field: str, at: str) -> Content:
        """A result is refused for nothing that it holds: it comes back in each further turn. at: its place."""
        if output is None or isinstance(output, str):
            return output or ""
        if not isinstance(output, list) or not all(isinstance(part, dict) and "type" in part for part in output):
            return result_text(output, field, self._alter)
        parts: list[Part] = []
        for index, part in enumerate(output):
            text, kind = part.get("refusal" if part["type"] == "refusal" else "text"), str(part["type"])
            shown = kind.removeprefix("input_")
            if kind in PICTURE_TYPES:
                text, shown = None, "picture"
                with suppress(ValueError):
                    parts += sent_pictures(part).at(f"{at}[{index}]", f"{field}.{kind}")
                    continue
            if not isinstance(text, str):
                self._alter(f"{field}.{kind}")
                text = left_out(shown)
            parts.append(text)
        return joined(parts)

    def _add_call(self, call_id: str | None, name: str, arguments: Mapping[str, Any]) -> None:
        if call_id is not None:
            self._names[call_id] = name
        self._calls.append(PastCall(id=call_id, name=name, arguments=arguments))

    def _add_output(self, call_id: str | None, content: Content) -> None:
        self.end()
        name = None if call_id is None else self._names.get(call_id)
        self.messages.append(Message(role="tool", content=content, name=name, tool_call_id=call_id))

    def _add_reasoning(self, item: _ReasoningItem, at: str) -> None:
        if self._said is not None or self._calls:
            self.end()
        text = _text(item.content, f"{at}.content") or _text(item.summary, f"{at}.summary")
        if not text and item.encrypted_content:
            found = unsealed(item.encrypted_content)
            if found is None:
                self.ignored["input.reasoning.encrypted_content"] = None
            text = found or ""
        self._reasoning = "\n".join(filter(None, (self._reasoning, text)))
