"""Past calls as a template wants them: their ids, their arguments, or the calls as text where it wants none."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ktransformers.tokenizer.tools.shapes import CallShape, Spelling

__all__ = ["SpellCalls", "name_of", "spelled", "with_arguments", "with_ids"]

SpellCalls = Callable[[Sequence[Mapping[str, Any]]], str]
"""From the calls of a turn to the text that the model itself would have written."""

_NINE = re.compile(r"[A-Za-z0-9]{9}")


def name_of(call: Mapping[str, Any]) -> str:
    """Return the name of the function that a call calls, "" when it has none."""
    function = call.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


class _Waiting(NamedTuple):
    """A call without a result. new_id: that the template gets."""

    new_id: str | None
    name: str


class _Ids:
    """The ids of one conversation: those that clients made, and those that the template takes."""

    def __init__(self, form: str, needs_ids: bool, given: set[str]):
        self._form, self._needs_ids, self._given = form, needs_ids, given
        self._count = 0
        self._waiting: dict[int, _Waiting] = {}  # calls without a result, in their order
        self._by_id: dict[str, deque[int]] = {}
        self._next = 0

    def _is_fine(self, call_id: str | None, name: str | None) -> bool:
        if call_id is None:
            return not self._needs_ids
        if self._form == "nine":
            return _NINE.fullmatch(call_id) is not None
        if self._form.startswith("functions"):
            # Of a result the name may not be known.
            return re.fullmatch(rf"functions\.{'.+' if name is None else re.escape(name)}:\d+", call_id) is not None
        return True

    def _made(self, name: str) -> str:
        if self._form.startswith("functions"):
            return f"functions.{name}:{self._count}"
        self._next = max(self._next, self._count)
        while (made := f"call{self._next:05}") in self._given:
            self._next += 1
        self._given.add(made)
        return made

    def of_calls(self, calls: Sequence[Any]) -> list[Any]:
        """The calls of a turn with their ids."""
        self._waiting, self._by_id = {}, {}
        made: list[Any] = []
        if self._form == "functions_turn":
            self._count = 0
        for call in calls:
            given, name = call.get("id"), name_of(call)
            new = given if self._is_fine(given, name) else self._made(name)
            self._waiting[len(made)] = _Waiting(new, name)
            if given is not None:
                self._by_id.setdefault(given, deque()).append(len(made))
            self._count += 1
            made.append(call if new == given else {**call, "id": new})
        return made

    def of_result(self, message: dict[str, Any], needs_name: bool) -> dict[str, Any]:
        """A result with the id of its call: the one that it names, else the first that has no result."""
        given, name = message.get("tool_call_id"), message.get("name")
        named = self._by_id.get(given) if given is not None else None
        key = named.popleft() if named else None
        if given is None:
            key = next((key for key, one in self._waiting.items() if name in (None, one.name)), None)
        found = None if key is None else self._waiting.pop(key, None)
        if found is None:
            if not self._is_fine(given, None):
                return {**message, "tool_call_id": self._made(str(name or "unknown"))}
            return message
        made = message if found.new_id in (given, None) else {**message, "tool_call_id": found.new_id}
        return {**made, "name": found.name} if needs_name and name is None else made


def with_ids(
    messages: Sequence[dict[str, Any]], form: str, *, needs_ids: bool, needs_names: bool
) -> list[dict[str, Any]]:
    """Return the messages with ids of the form that CallForm names.

    They are the same for the same calls, whatever clients call them.
    Ids that have the form already stay. needs_ids: calls without one get one. needs_names: results get the name of
    their call where they have none.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    ids = _Ids(form, needs_ids, {call["id"] for call in calls if call.get("id")})
    made = []
    for message in messages:
        if message.get("tool_calls"):
            made.append({**message, "tool_calls": ids.of_calls(message["tool_calls"])})
        elif message.get("role") == "tool":
            made.append(ids.of_result(message, needs_names))
        else:
            made.append(message)
    return made


def with_arguments(call: Mapping[str, Any], *, as_text: bool, takes_text: bool) -> dict[str, Any]:
    """Return the call with its arguments as JSON text, or as a mapping.

    takes_text: text is written as it is even where a mapping is wanted. Text that is no JSON object is then an argument
    itself: the model has said it.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    elif not as_text and not isinstance(arguments, Mapping) and not (takes_text and isinstance(arguments, str)):
        arguments = _mapping(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _mapping(arguments: Any) -> Mapping[str, Any]:
    if arguments is None or arguments == "":
        return {}
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments
    return parsed if isinstance(parsed, Mapping) else {"arguments": parsed}


def spelled(calls: Sequence[Mapping[str, Any]], shape: CallShape | None) -> str:
    """Return the calls as text, in the shape that the model writes them; as JSON objects where that is not known."""
    if shape is None:
        return "\n".join(
            json.dumps({"name": name_of(call), "arguments": _arguments(call)}, ensure_ascii=False) for call in calls
        )
    sep = "\n" if shape.sep is None else shape.sep
    return shape.open + sep.join(_one(call, index, shape) for index, call in enumerate(calls)) + shape.close


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return _mapping(function.get("arguments") if isinstance(function, Mapping) else None)


def _one(call: Mapping[str, Any], index: int, shape: CallShape) -> str:
    arguments = _arguments(call)
    head = shape.head.replace(":#", f":{index}").replace("NAME", name_of(call))
    return head + _SPELL[shape.spelling](arguments, shape) + shape.foot


def _json(arguments: Mapping[str, Any], shape: CallShape) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _tags(arguments: Mapping[str, Any], shape: CallShape) -> str:
    before, behind = shape.parameter
    written = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        word = shape.kinds.get(_kind(value), "true" if is_text else "false")
        opening = before.replace("KIND", word).replace("KEY", key)
        written.append(f"{opening}{text}{behind.replace('KEY', key)}")
    return "".join(written)


def _kind(value: Any) -> str:
    """JSON Schema's word for the type of a value."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return kinds.get(type(value), "object")


def _python(arguments: Mapping[str, Any], shape: CallShape) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _gemma(arguments: Any, shape: CallShape) -> str:
    if isinstance(arguments, Mapping):
        return "{" + ",".join(f"{key}:{_gemma(value, shape)}" for key, value in arguments.items()) + "}"
    if isinstance(arguments, list):
        return "[" + ",".join(_gemma(value, shape) for value in arguments) + "]"
    return f'<|"|>{arguments}<|"|>' if isinstance(arguments, str) else json.dumps(arguments)


_SPELL: Mapping[Spelling, Callable[[Mapping[str, Any], CallShape], str]] = {
    Spelling.JSON: _json,
    Spelling.TAGS: _tags,
    Spelling.PYTHON: _python,
    Spelling.GEMMA: _gemma,
}
