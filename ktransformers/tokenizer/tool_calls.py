"""Finds tool calls of the Hermes/Qwen form in an answer, as it streams.

The form is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
Nothing is lost: a call that is not valid JSON comes back as text, tags included. Does not run tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ktransformers.tokenizer.stop import held_back

__all__ = ["ToolCall", "ToolCallParser"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. arguments is a JSON object as text, the way OpenAI's API hands it to clients."""

    name: str
    arguments: str


def _parse(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models quote the object
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))
    except RecursionError:  # deeper than it can be written, though not than it can be read
        return None


class ToolCallParser:
    """Feed pieces of content; each call returns the text that is not part of a call, and the calls completed by it.

    Line breaks between a call's closing tag and the next opening tag belong to neither and are dropped.
    """

    def __init__(self) -> None:
        self._text = ""
        self._is_inside = False
        self._after_call = False

    def feed(self, piece: str) -> tuple[str, list[ToolCall]]:
        self._text += piece
        shown, calls = [], []
        while True:
            tag = _CLOSE if self._is_inside else _OPEN
            start = self._text.find(tag)
            if start < 0:
                break
            before, self._text = self._text[:start], self._text[start + len(tag) :]
            if not self._is_inside:
                shown.append(self._outside(before))
            elif call := _parse(before):
                calls.append(call)
                self._after_call = True
            else:
                shown.append(_OPEN + before + _CLOSE)
                self._after_call = False
            self._is_inside = not self._is_inside
        if not self._is_inside:
            keep = len(self._text) - held_back(self._text, (_OPEN,))
            if self._after_call and not self._text[:keep].strip():
                keep = 0  # blank so far: dropped if another call follows
            shown.append(self._outside(self._text[:keep]))
            self._text = self._text[keep:]
        return "".join(shown), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The end of the answer. A last call without its closing tag still counts when its JSON is complete."""
        text, self._text = self._text, ""
        if not self._is_inside:
            return self._outside(text), []
        self._is_inside = False
        call = _parse(text)
        return ("", [call]) if call else (_OPEN + text, [])

    def _outside(self, text: str) -> str:
        if self._after_call and not text.strip():
            return ""
        if text:
            self._after_call = False
        return text
