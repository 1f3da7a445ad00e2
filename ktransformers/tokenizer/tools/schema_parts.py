"""Core schemas (tokenizer/schemas) taken apart, for values that are not written as JSON: our own grammars spell them.

`format` counts as an annotation, which is what the specification says it is by default. `resolved` is for schemas as
they were sent, of which parsers want to know the types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.schemas.nodes import type_of

__all__ = ["Leaf", "Member", "alternatives", "members", "resolved"]

Schema = Mapping[str, Any]

_MAX_DEPTH = 16
"""How deep references and alternatives are followed."""

_MAX_LEAVES = 256
"""Of one value: references make many of a short schema."""

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "format"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "contentMediaType", "contentEncoding"),
    }
)
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
"""Keywords that say more about a value of a type, and nothing about one of another."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An alternative of a value. kind: JSON schema's name of its type; "" when anything goes.

    values: the only ones, of this kind; None: any that fits the schema.
    """

    kind: str
    schema: Schema
    values: tuple[Any, ...] | None = None

    @property
    def has_bounds(self) -> bool:
        """Whether the leaf's schema says more than its type."""
        return any(key in self.schema for key in _OF_TYPE.get(self.kind, ()))


@dataclass(frozen=True, slots=True)
class Member:
    """A property of an object by its name, with its schema."""

    key: str
    schema: Any
    is_required: bool


def _pointed(root: Any, target: str) -> Any:
    """What a reference within `root` leads to. Raises ConfigError."""
    if not target.startswith("#"):
        raise ConfigError(f"$ref {target[:100]!r} leads out of the schema")
    found = root
    for part in target.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise ConfigError(f"$ref {target[:100]!r} leads nowhere")
        found = found[name]
    return found


def resolved(schema: Any, root: Any) -> Schema:
    """Return the schema without a reference and without an allOf of one. Raises ConfigError."""
    for _ in range(_MAX_DEPTH):
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise ConfigError("a schema that allows nothing cannot be followed")
        rest = dict(schema)
        if isinstance(schema.get("$ref"), str):
            inner = _pointed(root, rest.pop("$ref"))
        elif isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            (inner,) = rest.pop("allOf")
        else:
            return schema
        schema = _joined(inner, rest)
    raise ConfigError("$ref leads in a circle, or too far")


def _joined(inner: Any, rest: dict[str, Any]) -> Any:
    """Both at once."""
    if inner is True:
        return rest
    if not isinstance(inner, Mapping):
        return inner
    both = [key for key in rest if key in inner and key not in _ANNOTATIONS and rest[key] != inner[key]]
    if both:
        raise ConfigError(f"{both[0]!r} is said twice, beside a reference and where it leads")
    return {**inner, **rest}


def alternatives(schema: Any, root: Any) -> list[Leaf]:
    """Return every way that a value of this part of the core schema `root` may be. Raises ConfigError for too many."""
    leaves, waiting, seen = list[Leaf](), [schema], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping) and "$ref" in one:
            waiting.insert(0, _pointed(root, one["$ref"]))
        elif isinstance(one, Mapping) and "anyOf" in one:
            waiting = [*one["anyOf"], *waiting]
        elif one is not False:
            leaves += _leaves({} if one is True else one)
        if len(leaves) > _MAX_LEAVES:
            raise ConfigError(f"a value may be more than {_MAX_LEAVES} things")
    return leaves


def _leaves(schema: Schema) -> list[Leaf]:
    """Of a schema without alternatives: a leaf, or one for each kind of its values."""
    if "enum" not in schema:
        return [Leaf(schema.get("type", ""), schema)]
    found: dict[str, list[Any]] = {}
    for value in schema["enum"]:
        found.setdefault(type_of(value), []).append(value)
    return [Leaf(kind, {"enum": list(some)}, tuple(some)) for kind, some in found.items()]


def members(schema: Schema) -> list[Member]:
    """Return the properties that a core schema of objects names, in its order."""
    required = set(schema.get("required", ()))
    return [Member(key, one, key in required) for key, one in schema.get("properties", {}).items() if one is not False]
