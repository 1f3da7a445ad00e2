"""Repairs what no chat template takes as it is in a history: calls that were cut or wrong, results that are no text.

A conversation goes on with them: a refusal would come back in each further turn, since clients send the same again.
`alter` receives the name of each field that the model is shown something else for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ktransformers.server.http.json_limits import MAX_DEPTH, json_size
from ktransformers.tokenizer.unicode import with_whole_texts

__all__ = ["INVALID_ARGUMENTS", "Alter", "is_arguments", "left_out", "past_arguments", "result_text"]

Alter = Callable[[str], None]
"""Called with the name of each field that the model is not shown as it was sent."""

INVALID_ARGUMENTS = "invalid_arguments"
"""The one argument that stands for those that are no JSON object; its value is what the model wrote.

Templates take mappings; most refuse anything else, and some write the members one by one.
"""


def past_arguments(value: Any, field: str, alter: Alter) -> Mapping[str, Any]:
    """Return the arguments of an earlier call, sent as an object or as JSON text, as an object. None and an empty text
    are no arguments.
    """
    if isinstance(value, Mapping):
        return _unicode(value, field, alter)
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    found = _object(value) if isinstance(value, str) else None
    if found is not None:
        return _unicode(found, field, alter)
    alter(field)
    if isinstance(value, str):
        return {} if value.strip() == "null" else _quoted(value) or {INVALID_ARGUMENTS: value}
    return {INVALID_ARGUMENTS: json.dumps(value, ensure_ascii=False)}


def is_arguments(text: str) -> bool:
    """Whether a text can be the arguments of a call: empty, or a JSON object."""
    return not text.strip() or _object(text) is not None


def _parsed(text: str) -> Any:
    """What the text is in JSON; None for what is none, or deeper than templates go."""
    if json_size(text.encode("utf-8", "surrogatepass")).depth > MAX_DEPTH:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(text: str) -> Mapping[str, Any] | None:
    made = _parsed(text)
    return made if isinstance(made, dict) else None


def _unicode(arguments: Mapping[str, Any], field: str, alter: Alter) -> Mapping[str, Any]:
    """The same without halves of characters, which models write where they break off, and no tokenizer can read."""
    found = list[Any]()
    made: Mapping[str, Any] = with_whole_texts(arguments, found.append)
    if not found:
        return arguments
    alter(field)
    return made


def _quoted(text: str) -> Mapping[str, Any] | None:
    """Of arguments that were written as JSON twice."""
    made = _parsed(text)
    return _object(made) if isinstance(made, str) else None


def left_out(kind: str, why: str = "only text can be read here") -> str:
    """Return the text that the model reads in place of a part of a turn that it is not shown. kind: of the part."""
    return f"[{kind} left out: {why}]"


def result_text(value: Any, field: str, alter: Alter) -> str:
    """Return a tool's result that is neither text nor parts of one as JSON text."""
    alter(field)
    return json.dumps(value, ensure_ascii=False)
