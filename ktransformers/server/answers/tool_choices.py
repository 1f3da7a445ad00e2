"""Reads `tool_choice` as any program spells it, for every dialect: clients switch servers and keep their spelling.

    "auto" "none" "required" "any" true false "NAME"                   OpenAI, Mistral, LangChain
    {"type": "auto" | "none" | "any" | "required"}                     Anthropic
    {"type": "tool", "name"}  {"type": "function", "name"}             Anthropic, /v1/responses
    {"type": "function", "function": {"name"}}  {"function": {"name"}}  chat completions
    {"type": "custom", "custom": {"name"}}  {"type": "custom", "name"}
    {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}  {"type": "allowed_tools", "mode", "tools"}
    {"auto": {}} {"any": {}} {"tool": {"name"}}                        Bedrock
    {"mode": "AUTO" | "ANY" | "NONE", "allowed_function_names"}        Gemini

Beside any of them `disable_parallel_tool_use` (Anthropic): one call at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import FieldError
from ktransformers.server.answers.requests import Tool, ToolChoice

__all__ = ["AskedChoice", "choose", "read_choice"]

_WORDS = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "required": "required",
    "validated": "auto",
    "AUTO": "auto",
    "NONE": "none",
    "ANY": "required",
    "VALIDATED": "auto",
}


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """A client's tool choice. mode: auto, none or required. name: of the one tool to call. allowed: names of those that
    may be called at all.

    is_single: one call at most. is_custom: the name was said to be a custom tool's.
    """

    mode: str
    name: str | None = None
    allowed: tuple[str, ...] | None = None
    is_single: bool = False
    is_custom: bool = False


def read_choice(value: Any) -> AskedChoice | None:
    """Return the tool choice that was asked for, in any dialect's spelling; None for a spelling that nobody has."""
    if isinstance(value, bool):
        return AskedChoice("required" if value else "none")
    if isinstance(value, str):
        return AskedChoice(_WORDS[value]) if value in _WORDS else AskedChoice("required", value) if value else None
    if not isinstance(value, Mapping):
        return None
    config = value.get("function_calling_config", value.get("functionCallingConfig"))
    if isinstance(config, Mapping):
        return read_choice(config)
    is_single = value.get("disable_parallel_tool_use") is True
    match value:
        case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode), "tools": list(tools)}}:
            return _allowed(mode, tools, is_single)
        case {"type": "allowed_tools", "mode": str(mode), "tools": list(tools)}:
            return _allowed(mode, tools, is_single)
        case {"type": "auto" | "none" | "any" | "required" as mode}:
            return AskedChoice(_WORDS[mode], is_single=is_single)
        case {"mode": str(mode)} if mode in _WORDS:
            names = value.get("allowed_function_names", value.get("allowedFunctionNames"))
            return _allowed(mode, names, is_single) if isinstance(names, list) else AskedChoice(_WORDS[mode])
    if len(value) == 1 and next(iter(value)) in ("auto", "any") and isinstance(next(iter(value.values())), Mapping):
        return AskedChoice(_WORDS[next(iter(value))])
    name = _name(value)
    is_custom = value.get("type") == "custom" or "custom" in value
    return None if name is None else AskedChoice("required", name, None, is_single, is_custom)


def _allowed(mode: str, tools: list[Any], is_single: bool) -> AskedChoice | None:
    names = [tool if isinstance(tool, str) else _name(tool) for tool in tools]
    if mode not in _WORDS or not all(names):
        return None
    return AskedChoice(_WORDS[mode], None, tuple(name for name in names if name), is_single)


def _name(tool: Any) -> str | None:
    """The name in a tool's description, however deep it stands there."""
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "function", "custom", "tool"):
        return None
    for place in ("function", "custom", "tool"):
        if isinstance(tool.get(place), Mapping):
            tool = tool[place]
    name = tool.get("name")
    return name if isinstance(name, str) and name else None


def choose(
    asked: AskedChoice | None, tools: Sequence[Tool], *, is_single: bool = False, field: str = "tool_choice"
) -> tuple[list[Tool], ToolChoice]:
    """Return the tools that a choice leaves, the only ones that the model is shown, and how many of them are called.

    is_single: one call at most, whatever the choice says. field: that it came in. Raises FieldError for a tool that is
    not among them, and for a call that is required of none.
    """
    asked = asked or AskedChoice("auto")
    known = {tool.name for tool in tools}
    for name in (*(asked.allowed or ()), *(() if asked.name is None else (asked.name,))):
        if name not in known:
            raise FieldError(f"{field}: there is no tool {name[:100]!r} among the tools", field)
    if asked.mode == "required" and not tools:
        raise FieldError(f"{field}: a call is required, and there are no tools", field)
    left = [tool for tool in tools if asked.mode != "none" and (asked.allowed is None or tool.name in asked.allowed)]
    max_calls = 1 if left and (is_single or asked.is_single) else None
    return left, ToolChoice(is_required=asked.mode == "required", name=asked.name, max_calls=max_calls)
