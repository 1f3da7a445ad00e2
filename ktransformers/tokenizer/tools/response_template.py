"""Parses answers of a checkpoint that brings its own `response_template`, which transformers reads.

The regions of such a template are told as they come; a tool call is known when its region has closed. Where the
template cannot make anything of a region, the region's text is the answer's text, and so is all that follows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from ktransformers.tokenizer.tools.events import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    ParsedEvent,
    ReasoningPiece,
    TextPiece,
    ToolSchemas,
)

__all__ = ["ResponseTemplateParser", "why_not_usable"]

_log = logging.getLogger(__name__)

_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
_CALLS = frozenset({"tool_calls", "tool_call"})
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def why_not_usable(template: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a checkpoint's response template, or None."""
    try:
        ResponseParser(template, prefix="")
    except _ERRORS as error:
        return str(error)[:200]
    return None


class ResponseTemplateParser:
    """A parser of one answer by a response template.

    prompt: its text, because templates write the beginning of answers. tools: None to find no calls.
    """

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: ToolSchemas | None):
        shown = [{"function": {"name": name, "parameters": schema}} for name, schema in (tools or {}).items()]
        self._parser: Any = ResponseParser(template, prefix=prompt, tools=shown)
        self._has_tools = tools is not None
        self._region: list[str] = []  # of the calls that are open, as the model wrote them
        self._is_broken = False

    def feed(self, text: str) -> list[ParsedEvent]:
        """Return the events that this piece of the answer makes certain."""
        told: list[ParsedEvent] = []
        for at, character in enumerate(text):  # one at a time, so that an error costs no event before it
            if self._is_broken:
                return [*told, TextPiece(text[at:])]
            try:
                told += self._read(self._parser.feed(character))
            except _ERRORS as error:
                told += self._give_up(error)
        return told

    def flush(self, is_cut: bool = False) -> list[ParsedEvent]:
        """Return the events at the end of the answer. Call once.

        is_cut: the model was stopped, and a call that it had begun is not told.
        """
        if self._is_broken or (is_cut and self._region):
            return []
        try:
            return self._read(self._parser.finalize()[1])
        except _ERRORS as error:
            return self._give_up(error)

    def _read(self, events: list[dict[str, Any]]) -> list[ParsedEvent]:
        told: list[ParsedEvent] = []
        for event in events:
            field = event["field"]
            if field in _CALLS and self._has_tools:
                told += self._call_event(event)
            elif event["type"] == "region_chunk" and event["text"]:
                told.append((ReasoningPiece if field in _REASONING else TextPiece)(event["text"]))
        return told

    def _call_event(self, event: dict[str, Any]) -> list[ParsedEvent]:
        if event["type"] == "region_chunk":
            self._region.append(event["text"])
            return []
        text, self._region = "".join(self._region), []
        if event["type"] != "region_close":
            return []
        value = event["value"]
        told: list[ParsedEvent] = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, dict) else {}
            name, arguments = function.get("name"), function.get("arguments", {})
            if not isinstance(name, str) or not name:
                return [TextPiece(text)] if text else []
            spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            told += [CallStarted(name), ArgumentsPiece(spelled or "{}"), CallEnded()]
        return told

    def _give_up(self, error: Exception) -> list[ParsedEvent]:
        """The region that was open is text."""
        _log.warning("the model's response_template cannot read an answer, which stays text: %s", str(error)[:200])
        self._is_broken = True
        text, self._region = "".join(self._region), []
        return [TextPiece(text)] if text else []
