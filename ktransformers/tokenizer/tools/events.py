"""The events into which parsers turn an answer's text. Knows nothing of ids or dialects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ArgumentsPiece", "CallEnded", "CallStarted", "ParsedEvent", "ReasoningPiece", "TextPiece", "ToolSchemas"]

ToolSchemas = Mapping[str, Mapping[str, Any] | None]
"""The tools that a model may call: name to the JSON schema of its parameters, None when nobody gave one."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call whose name is known. Calls do not overlap."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A piece of a call's arguments: together they are a JSON object, unless the model broke off or wrote nonsense."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call's arguments. is_whole: they are an object that the model closed; else it broke off inside."""

    is_whole: bool = True


ParsedEvent = TextPiece | ReasoningPiece | CallStarted | ArgumentsPiece | CallEnded
