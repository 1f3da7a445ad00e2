"""Answers with tool calls as the families' templates write them; excerpts of those are in tests/tokenizer/templates."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = Path(__file__).parents[2] / "tokenizer" / "templates"
# A template by its file, and the format that it must be found to write.
FORMAT_OF = {path.stem: path.stem for path in TEMPLATES.glob("*.jinja")} | {"glm47": "glm45", "mistral_v3": "mistral"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "code": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "is_long": {"type": "boolean"},
        "where": {"type": "object"},
        "tags": {"type": "array"},
        "units": {"enum": ["metric", "imperial"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
}
TOOLS = {"get_weather": SCHEMA, "now": None, "add": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "get_weather",
        {
            "city": 'São "Paulo"\\ 北京 😀',
            "code": 'if a < b && c:\n\tprint("</x>")\n\n',
            "days": 12345678901234567890,
            "share": -1.5e-7,
            "is_long": True,
            "where": {"lat": 1.0, "names": ["a", {"b": [False, []]}], "empty": {}},
            "tags": ["x", 2, "3"],
            "units": "metric",
            "maybe": 7,
        },
    ),
    ("now", {}),
    ("add", {"a": 3}),
]
REASONING, CONTENT = "The user asks.\n\nI could call <tool_call>.", "Let me look."


@functools.cache
def rendered(name: str) -> str:
    return render(name)


def render(name: str, calls: list[tuple[str, dict[str, Any]]] = CALLS) -> str:
    """An assistant's turn with reasoning, text and calls, as the family's template writes it."""
    message = {
        "role": "assistant",
        "content": CONTENT,
        "reasoning_content": REASONING,
        "tool_calls": [
            {
                "id": f"call{i:05}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
                "literals": {key: repr(value) for key, value in arguments.items()},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    template = (TEMPLATES / f"{name}.jinja").read_text()
    texts, _ = render_jinja_template(conversations=[[message]], chat_template=template)
    return str(texts[0])
