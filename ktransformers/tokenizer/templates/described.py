"""Tools in words, for chat templates that know none, or not these: a text of the conversation's system turn.

The same bytes for the same tools, so that prompts that go on share their beginning. Where the template keeps no system
turn, fold.py makes it part of the user's. llama.cpp does the same by its "generic" format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ktransformers.tokenizer.templates.calls import SpellCalls
from ktransformers.tokenizer.templates.rendering import Message

__all__ = ["completed", "described_tools", "with_described_tools"]

_EXAMPLE = {
    "id": "functions.FUNCTION_NAME:0",
    "type": "function",
    "function": {"name": "FUNCTION_NAME", "arguments": {"PARAMETER": "VALUE"}},
}
_TEXT = """# Functions

You can call functions to help with what the user asks. Each line here is the JSON description of one:
{tools}

To call a function, answer with nothing but the call, written like this:
{example}
Write several calls one behind the other. The next turns bring their results. Where no function is needed, answer \
without a call."""


def described_tools(tools: Sequence[Mapping[str, object]], spell: SpellCalls) -> str:
    """Return a text that says what tools there are and how to call them. spell: writes calls as the model does."""
    shown = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return _TEXT.format(tools="\n".join(shown), example=spell([_EXAMPLE]))


def with_described_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]], spell: SpellCalls
) -> list[Message]:
    """Return the conversation with the tools' description behind its instructions, or in a system turn of its own."""
    text, first = described_tools(tools, spell), messages[0]
    content = first.get("content")
    if first.get("role") not in ("system", "developer") or not isinstance(content, str | list):
        return [{"role": "system", "content": text}, *messages]
    if isinstance(content, str):
        joined: str | list[object] = f"{content}\n\n{text}" if content else text
    else:
        joined = [*content, {"type": "text", "text": text}]
    return [{**first, "content": joined}, *messages[1:]]


def completed(tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the tools with empty descriptions, and an object without properties for parameters, where they have none:
    OpenAI's API requires a function's name alone, and many templates read the others.
    """
    made = []
    for tool in tools:
        function = _described(tool.get("function"))
        parameters = {"type": "object", "properties": {}} | _described(function.get("parameters"))
        made.append({**tool, "function": function | {"parameters": parameters}})
    return made


def _described(schema: object) -> dict[str, object]:
    """The schema, or function, in which it and all properties have a text for their description."""
    if not isinstance(schema, Mapping):
        return {"description": ""}
    made: dict[str, object] = {**schema, "description": schema.get("description") or ""}
    if isinstance(properties := schema.get("properties"), Mapping):
        made["properties"] = {name: _described(one) for name, one in properties.items()}
    if isinstance(items := schema.get("items"), Mapping):
        made["items"] = _described(items)
    return made
