"""Renders made-up conversations through a chat template, to see which of their texts it keeps.

A conversation is written as a word, one letter for each turn:

    S system   D developer   U user   A assistant   T result of a call
    C a call   B two calls   X text and a call      V user without text   E assistant without text

Every text, name and argument in it is a number that nothing else holds: templates that trim a text, change its case or
write it as JSON leave it as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import ConversationError
from ktransformers.tokenizer.templates.rendering import Message, Render

__all__ = ["ARGUMENT", "PROBE_TOOLS", "CallForm", "Prober", "Sample", "is_kept", "sample"]

_log = logging.getLogger(__name__)

MAX_SECONDS = 1.0
"""Of processor time, for all probes of one template; they take a hundredth of it."""

_KEY = {"type": "string", "description": "What to look up."}
PROBE_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "Looks a key up.",
            "parameters": {"type": "object", "properties": {"key": _KEY}, "required": ["key"]},
        },
    },
)
"""What the probes with tools show. Its name is not the name of any call in them."""

ARGUMENT = "sought"
"""The argument of calls. No tool has one of this name."""

ROLES = {"S": "system", "D": "developer", "U": "user", "V": "user", "A": "assistant", "E": "assistant", "T": "tool"}


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which past calls and their results are given to a template.

    arguments: "mapping", or "text" for JSON as text. ids: "given" as clients made them, "nine" letters and digits, or
    functions.NAME:INDEX, which counts the calls of the conversation ("functions") or of the turn ("functions_turn").
    content: of a turn that only calls. text_field: where text beside a call is. has_names: results need the name of the
    call.
    """

    arguments: str = "mapping"
    ids: str = "given"
    content: str | None = ""
    text_field: str = "content"
    has_names: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """A made-up conversation. texts: what a template that keeps everything writes, in this order. names: of calls."""

    messages: list[dict[str, Any]]
    texts: list[str]
    names: list[str]


def _number(turn: int, part: int = 0) -> str:
    return str(60_217_401 + 37_019 * turn + 1_009 * part)


def _sample_id(form: CallForm, name: str, count: int) -> str:
    if form.ids == "nine":
        return f"call{count:05}"
    return f"functions.{name}:{count}" if form.ids.startswith("functions") else f"call_kQ7wZp3vN8sXyT2rLm5bD{count:03}"


def sample(word: str, form: CallForm = CallForm(), parts: frozenset[str] = frozenset(), empty: str = "") -> Sample:
    """Return the conversation that `word` stands for. parts: roles whose content is a list.

    empty: the content of V and E.
    """
    made = Sample([], [], [])
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for turn, letter in enumerate(word):
        text = _number(turn)
        message: dict[str, Any] = {"role": ROLES.get(letter, "assistant"), "content": text}
        if letter in "CBX":
            message["content"] = form.content
            if letter == "X":
                message[form.text_field] = text
                made.texts.append(text)
            before = 0 if form.ids == "functions_turn" else len(made.names)
            calls = _calls(turn, 2 if letter == "B" else 1, form, before)
            message["tool_calls"] = calls
            waiting = [(call["id"], call["function"]["name"]) for call in calls]
            made.names.extend(name.removeprefix("f") for _, name in waiting)
            made.texts.extend(_number(turn, 2 * index + 2) for index in range(len(calls)))
        elif letter in "VE":
            message["content"] = empty
        else:
            made.texts.append(text)
        if letter == "T":
            message["tool_call_id"], name = waiting.pop(0) if waiting else (_sample_id(form, "probe", 900 + turn), None)
            if form.has_names and name is not None:
                message["name"] = name
        if message["role"] in parts and isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        made.messages.append(message)
    return made


def _calls(turn: int, count: int, form: CallForm, before: int) -> list[dict[str, Any]]:
    made = []
    for index in range(count):
        name, value = f"f{_number(turn, 2 * index + 1)}", _number(turn, 2 * index + 2)
        arguments: Any = {ARGUMENT: value} if form.arguments == "mapping" else f'{{"{ARGUMENT}": "{value}"}}'
        call_id = _sample_id(form, name, before + index)
        made.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return made


def is_kept(text: str, wanted: Iterable[str], *, in_order: bool = True) -> bool:
    """Whether a rendered text holds all of the `wanted` texts; in_order: one behind the other."""
    at = 0
    for one in wanted:
        found = text.find(one, at if in_order else 0)
        if found < 0:
            return False
        at = found + len(one)
    return True


class Prober:
    """Renders conversations through one template, all of them together within MAX_SECONDS."""

    def __init__(self, render: Render):
        self._render = render
        self._seconds = MAX_SECONDS

    @property
    def is_exhausted(self) -> bool:
        """Whether the time for rendering is used up, so that nothing more is known about the template."""
        return self._seconds <= 0

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str | None:
        """Return the text of a conversation, ended by the header of an answer unless options say otherwise.

        None when the template refuses it, or when the time is used up.
        """
        if self._seconds <= 0:
            return None
        began = time.thread_time()
        try:
            return self._render(messages, tools, **{"add_generation_prompt": True, **options})
        except ConversationError:
            return None
        finally:
            self._seconds -= time.thread_time() - began
            if self._seconds <= 0:
                _log.warning("the chat template is slow: what it does with unusual turns is not looked at")
