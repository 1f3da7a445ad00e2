"""Tools that the model may call: functions, custom tools (text in, shown as a function of one text), and groups of
both.

Tools that OpenAI's servers run, or models were trained for (web_search, local_shell, ...), have no meaning here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ktransformers.errors import ConfigError, FieldError, UnsupportedError
from ktransformers.server.answers.custom_tools import custom_tool
from ktransformers.server.answers.requests import Tool, ToolChoice

__all__ = ["Callable", "ToolSet", "read_tools", "shown_name"]


class _Definition(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Callable:
    """A tool under the name that the model knows: the client's name for it, and how its calls come back."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(slots=True)
class ToolSet:
    """The tools of a request. shown: to the model. callables: by shown name. echoed: for the response. ignored: what
    means nothing here.

    choice: what has to be called, without how many calls there may be.
    """

    shown: list[Tool] = field(default_factory=list)
    callables: dict[str, Callable] = field(default_factory=dict)
    echoed: list[dict[str, Any]] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    choice: ToolChoice = field(default_factory=ToolChoice)


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool: names of groups are part of it."""
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def read_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> ToolSet:
    """Return the tools that the choice leaves. Raises ConfigError and UnsupportedError."""
    made = ToolSet()
    for index, tool in enumerate(tools or ()):
        _add(made, tool, f"tools[{index}]", None)
    allowed = _allowed(choice)
    if allowed is not None:
        made.shown = [tool for tool in made.shown if tool.name in allowed]
    made.choice = _choice(choice, made)
    return made


def _add(into: ToolSet, tool: Mapping[str, Any], at: str, namespace: str | None) -> None:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise ConfigError(f"{at}.type must be a string")
    if kind not in ("function", "custom", "namespace"):
        into.ignored[f"tools.{kind}"] = None
        return
    if kind == "function" and isinstance(tool.get("function"), dict):  # as chat completions spell it
        tool = {"type": kind, **tool["function"]}
    read = _definition(tool, at)
    if namespace is None:
        into.echoed.append({"parameters": None, "strict": None} | dict(tool) if kind == "function" else dict(tool))
    if kind != "namespace":
        _show(into, read, at, namespace)
        return
    if namespace is not None:
        raise ConfigError(f"{at}: a namespace cannot hold another")
    for index, inner in enumerate(read.tools or ()):
        _add(into, inner, f"{at}.tools[{index}]", read.name)


def _definition(tool: Mapping[str, Any], at: str) -> _Definition:
    try:
        return _Definition.model_validate(tool)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{at}.{first['loc'][0]}: {first['msg']}") from error


def _show(into: ToolSet, tool: _Definition, at: str, namespace: str | None) -> None:
    shown = shown_name(tool.name, namespace)
    if shown in into.callables:
        raise ConfigError(f"{at}: there are two tools of the name {shown[:64]!r}")
    is_custom = tool.type == "custom"
    into.callables[shown] = Callable(tool.name, namespace, is_custom)
    if not is_custom:
        into.shown.append(_function(tool, shown))
        return
    into.shown.append(_custom(tool, shown))
    if (tool.format or {}).get("type") == "grammar":
        into.ignored["tools.custom.format"] = None


def _function(tool: _Definition, shown: str) -> Tool:
    return Tool(name=shown, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _custom(tool: _Definition, shown: str) -> Tool:
    form = tool.format or {}
    definition = str(form.get("definition")) if form.get("type") == "grammar" else None
    return custom_tool(shown, tool.description, form.get("syntax"), definition)


def _allowed(choice: Any) -> set[str] | None:
    """The shown names that tool_choice leaves; None: all."""
    match choice:
        case "none":
            return set()
        case {"type": "allowed_tools", "mode": "auto" | "required", "tools": list(listed)}:
            return {_named(tool, "tool_choice.tools must hold objects") for tool in listed}
    return None


def _choice(choice: Any, tools: ToolSet) -> ToolChoice:
    """What has to be called of the tools that are left."""
    match choice:
        case None | "auto" | "none" | {"type": "allowed_tools", "mode": "auto", "tools": list()}:
            return ToolChoice()
        case "required" | {"type": "allowed_tools", "mode": "required", "tools": list()}:
            if not tools.shown:
                raise FieldError("tool_choice: a call is required, and there are no tools", "tool_choice")
            return ToolChoice(is_required=True)
        case {"type": "function" | "custom"}:
            name = _named(choice, "tool_choice must be an object")
            if name not in tools.callables:
                raise FieldError(f"tool_choice: there is no tool {name[:100]!r} among the tools", "tool_choice")
            return ToolChoice(is_required=True, name=name, max_calls=1)
    said = choice.get("type") if isinstance(choice, dict) else choice
    raise UnsupportedError(
        f"tool_choice: {str(said)[:100]!r} is not supported; use auto, none, required, function, custom or "
        "allowed_tools"
    )


def _named(tool: Any, otherwise: str) -> str:
    """The shown name of an element of allowed_tools; one that is not there leaves nothing to call."""
    if not isinstance(tool, dict):
        raise ConfigError(otherwise)
    return shown_name(str(tool.get("name")), str(tool.get("namespace") or ""))
