"""Renders small conversations of words that occur nowhere else, within a limit of time for all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import KTransformersError
from ktransformers.tokenizer.recognition.segments import Splitter
from ktransformers.tokenizer.template_limits import TemplateLimitError

__all__ = ["CONTENT", "THOUGHTS", "TOOLS", "Call", "Probe", "Render"]

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool], str]
"""Messages, tools, and whether an answer is to be opened, to text. Raises KTransformersError."""

MAX_SECONDS = 2.0
"""Of processor time, for everything that is rendered of one template."""

_QUESTION, CONTENT, THOUGHTS, _RESULT = "qzquestion", "qzanswer", "qzthoughts", "qzresult"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def _schema(*keys: str) -> dict[str, Any]:
    spec = {key: {"type": "string", "description": "d"} for key in keys}
    return {"type": "object", "properties": spec, "required": list(keys)}


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": _schema("qzkeya", "qzkeyb")}}
    for name in ("qzfirst", "qzsecond")
]


@dataclass(frozen=True, slots=True)
class Call:
    """A made-up call of a past turn."""

    name: str
    arguments: Mapping[str, Any]


_CALL = Call("qzfirst", {"qzkeya": "qzvaluea", "qzkeyb": "qzvalueb"})


class Probe:
    """Renders small conversations through `render`. tokens: the tokenizer's added tokens.

    What a template refuses is None.
    """

    def __init__(self, render: Render, tokens: Sequence[str]):
        self._render = render
        self.splitter = Splitter(tokens)
        self.before = ""
        """What stood in front of the question in the last text."""
        self._deadline = time.thread_time() + MAX_SECONDS

    def _text(self, turns: Sequence[Mapping[str, Any]], *, has_tools: bool = False, opens: bool = False) -> str | None:
        """What stands behind the question."""
        began = time.thread_time()
        if began > self._deadline:
            return None
        try:
            text = self._render([{"role": "user", "content": _QUESTION}, *turns], TOOLS if has_tools else None, opens)
        except KTransformersError as error:
            if isinstance(error.__cause__, TemplateLimitError):  # it would run into that again
                self._deadline = began
            return None
        before, found, after = text.rpartition(_QUESTION)
        self.before = before
        return after if found else None

    def opening(self, *, has_tools: bool = False) -> str | None:
        """Return the prompt behind the question, up to where an answer begins."""
        return self._text([], has_tools=has_tools, opens=True)

    def answer(self, content: str, *, has_tools: bool = False) -> str | None:
        """Return a past answer as the template writes it."""
        return self._text([{"role": "assistant", "content": content}], has_tools=has_tools)

    def thoughtful_answers(self) -> list[tuple[str, str]]:
        """Return a past answer with reasoning, in the ways that templates take, as far as they write the reasoning.

        Each with the word that follows the reasoning: the text, or the name of a call, beside which alone some
        templates keep reasoning.
        """
        thoughts = dict.fromkeys(_REASONING_KEYS, THOUGHTS)
        parts = [{"type": "thinking", "thinking": THOUGHTS}, {"type": "text", "text": CONTENT}]
        blocks = [{"type": "thoughts", "text": THOUGHTS}, {"type": "response", "text": CONTENT}]
        ways: list[tuple[dict[str, Any], str]] = [
            ({"content": CONTENT, **thoughts}, CONTENT),
            ({"content": parts}, CONTENT),
            ({"content": {"blocks": blocks}}, CONTENT),
            ({**_turn([_CALL], "", as_text=False, has_names=True), **thoughts}, _CALL.name),
        ]
        texts = [
            (self._text([{"role": "assistant", **way}], has_tools="tool_calls" in way), word) for way, word in ways
        ]
        return [(text, word) for text, word in texts if text and 0 <= text.find(THOUGHTS) < text.rfind(word)]

    def calls(self, calls: Sequence[Call], content: str = "") -> list[str]:
        """Return a past turn with these calls, in the ways that templates take, as far as they write all names."""
        texts = list[str]()
        for way in range(4):
            turn = _turn(calls, content, as_text=way == 1, has_names=way == 2)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": _RESULT}
                for call in turn["tool_calls"]
            ]
            text = self._text([turn, *(results if way == 3 else ())], has_tools=True)
            if text is not None:
                text = text.partition(_RESULT)[0]
                if all(call.name in text for call in calls):
                    texts.append(text)
        return texts


def _turn(calls: Sequence[Call], content: str, *, as_text: bool, has_names: bool) -> dict[str, Any]:
    """as_text: the arguments are a text of JSON. has_names: ids are as Kimi K2 wants them."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"functions.{call.name}:{number}" if has_names else f"qzid{number:05}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments) if as_text else dict(call.arguments),
                },
            }
            for number, call in enumerate(calls)
        ],
    }
