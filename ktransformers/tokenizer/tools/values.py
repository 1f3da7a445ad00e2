"""Kinds of value that a parameter can have, by its tool's schema: formats without quotes do not say it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tools.cursor import Cursor, Steps
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.json_text import PYTHON_WORDS, PythonReader, escaped, is_json
from ktransformers.tokenizer.tools.schema_parts import resolved

__all__ = ["as_json", "kinds_in", "kinds_of"]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_MAX_OPTIONS = 64
_MAX_DEPTH = 8
"""How deep alternatives of a schema are followed."""


def kinds_of(tools: ToolSchemas, name: str, parameter: str) -> frozenset[str]:
    """Return JSON schema's names of the types that a tool's parameter can have; empty when nobody says."""
    schema = tools.get(name)
    found = [_kinds(one, schema, _MAX_DEPTH, set()) for one in _described(schema, schema, parameter, _MAX_DEPTH)]
    return frozenset().union(*found) if all(found) else frozenset()


def _described(unresolved: Any, root: Any, parameter: str, depth: int) -> list[Any]:
    """What a schema says of a property, itself or in the parts that it is made of."""
    try:
        schema = resolved(unresolved, root) if isinstance(unresolved, Mapping) and depth else {}
    except ConfigError:
        return []
    properties = schema.get("properties")
    found = [properties[parameter]] if isinstance(properties, Mapping) and parameter in properties else []
    for name in ("allOf", "anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            found += _described(option, root, parameter, depth - 1)
    return found[:_MAX_OPTIONS]


def kinds_in(schema: Any, root: Any) -> frozenset[str]:
    """Return JSON schema's names of the types that a part of a tool's schema `root` can have."""
    return _kinds(schema, root, _MAX_DEPTH, set())


def _kinds(unresolved: Any, root: Any, depth: int, seen: set[int]) -> frozenset[str]:
    """seen: parts that were looked at, because references lead to the same ones again and again."""
    if not isinstance(unresolved, Mapping) or not depth or id(unresolved) in seen:
        return frozenset()
    seen.add(id(unresolved))
    try:
        schema = resolved(unresolved, root)
    except ConfigError:  # a schema that leads nowhere says nothing
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given.lower(),))
    if isinstance(given, list):
        return frozenset(kind.lower() for kind in given if isinstance(kind, str))
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list):
            return frozenset().union(*(_kinds(option, root, depth - 1, seen) for option in options))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found = _kinds(part, root, depth - 1, seen)
        if found:
            return found
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset("string" if isinstance(value, str) else _kind_of(value) for value in values)
    return frozenset()


def _kind_of(value: object) -> str:
    return next((kind for kind, types in _TYPES.items() if type(value) in types), "null")


def as_json(text: str, kinds: frozenset[str]) -> str:
    """Return `text` as a JSON value: of one of `kinds`, where it can be read as one, else a string.

    Without kinds whatever JSON it is. Numbers stay as they are written. Lists and objects may be written as Python
    prints them, which templates do that have no `tojson` there.
    """
    bare = text.strip()
    bare = PYTHON_WORDS.get(bare, bare)
    types = tuple(one for kind in kinds or _TYPES for one in _TYPES.get(kind, ()))
    if types and is_json(bare, types):
        return bare
    if (bare[:1] == "[" and "array" in kinds) or (bare[:1] == "{" and "object" in kinds):
        read = _python_as_json(bare)
        if read is not None and is_json(read, types):
            return read
    return f'"{escaped(text)}"'


def _python_as_json(text: str) -> str | None:
    """A literal of Python as JSON; None when it is none."""
    cursor, parts = Cursor(), list[str]()
    cursor.add(text)
    cursor.end()

    def read() -> Steps[bool]:
        return (yield from PythonReader(cursor).value(parts.append)) and (yield from cursor.blanks()) == ""

    try:
        next(read())
    except StopIteration as found:
        return "".join(parts) if found.value else None
    return None
