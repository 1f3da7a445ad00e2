"""Tools whose input is a text instead of an object. The model is shown a function of one text, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from ktransformers.server.answers.requests import Tool

__all__ = ["CUSTOM_INPUT", "custom_text", "custom_tool"]

CUSTOM_INPUT = "input"
"""The one parameter of a custom tool as the model sees it."""


def custom_text(arguments: str, is_whole: bool = True) -> str:
    """Return the text for a custom tool in the arguments that the model wrote; these themselves if it wrote something
    else.

    is_whole: see ToolCallEnded; of those that are not, as much of the text as there is.
    """
    try:
        made = json.loads(arguments) if is_whole else from_json(arguments, allow_partial="trailing-strings")
    except (ValueError, RecursionError):
        return arguments if is_whole else ""
    if not is_whole and not made:
        return ""
    text = made.get(CUSTOM_INPUT) if isinstance(made, dict) else None
    return text if isinstance(text, str) else arguments


def custom_tool(name: str, description: str | None, syntax: str | None, definition: str | None) -> Tool:
    """Return a custom tool as the model sees it, a function of one text. definition: the grammar of its input, which it
    is shown and free not to follow; or None.
    """
    shown = description or ""
    if definition is not None:
        shown += f"\n\nThe input must follow this {syntax} grammar:\n{definition}"
    text = {"type": "string", "description": "The tool's input, as plain text."}
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
    }
    return Tool(name=name, description=shown.strip() or None, parameters=parameters)
