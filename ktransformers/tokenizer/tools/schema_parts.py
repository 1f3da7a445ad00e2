"""JSON schemas taken apart, for values that are not written as JSON and so have to be spelled by our own grammars.

What cannot be followed here is a ConfigError that names it, as llguidance refuses what it cannot follow in JSON.
`format` counts as an annotation, which is what the specification says it is by default.
Source: JSON Schema, draft 2020-12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import ConfigError

__all__ = ["Leaf", "Member", "alternatives", "count_of", "members", "resolved"]

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
_LOGIC = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
_OF_OBJECTS = (
    *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    "unevaluatedProperties",
)
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
"""Keywords that say more about a value of a type, and nothing about one of another."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One way that a value may be. kind: JSON schema's name of its type; "" when anything goes.

    values: the only ones, of this kind; None: any that fits the schema.
    """

    kind: str
    schema: Schema
    values: tuple[Any, ...] | None = None

    @property
    def has_bounds(self) -> bool:
        """Whether the schema says more than the type."""
        return any(key in self.schema for key in _OF_TYPE.get(self.kind, ()))


@dataclass(frozen=True, slots=True)
class Member:
    """One property of an object."""

    key: str
    schema: Any
    is_required: bool


def count_of(schema: Schema, key: str, otherwise: int) -> int:
    """A number of characters, items or properties. Raises ConfigError for what is none."""
    value = schema.get(key, otherwise)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise ConfigError(f"{key} must be a whole number")
    return value


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
    """The same without a reference and without an allOf of one. Raises ConfigError."""
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


def alternatives(schema: Any, root: Any, depth: int = _MAX_DEPTH) -> list[Leaf]:
    """Every way that a value of this schema may be. Raises ConfigError."""
    if not depth:
        raise ConfigError("alternatives lie too deep within each other")
    found = resolved(schema, root)
    for name in ("anyOf", "oneOf"):
        options = found.get(name)
        if not isinstance(options, list):
            continue
        beside = [key for key in found if key != name and key not in _ANNOTATIONS]
        if beside:
            raise ConfigError(f"{name} beside {beside[0]!r}")
        leaves = list[Leaf]()
        for option in options:
            leaves += alternatives(option, root, depth - 1)
            if len(leaves) > _MAX_LEAVES:
                raise ConfigError(f"a value may be more than {_MAX_LEAVES} things")
        if name == "oneOf" and not _are_apart(leaves):
            raise ConfigError("oneOf whose options are not of different types")
        return leaves
    _refuse(found, _LOGIC)
    if "enum" in found or "const" in found:
        return _of_values(found)
    kinds = found.get("type")
    if kinds is None:
        said = [key for key in found if key not in _ANNOTATIONS]
        if said:
            raise ConfigError(f"{said[0]!r} without a type")
        return [Leaf("", found)]
    return [Leaf(str(kind), {**found, "type": kind}) for kind in (kinds if isinstance(kinds, list) else [kinds])]


def _are_apart(leaves: list[Leaf]) -> bool:
    kinds = ["number" if leaf.kind == "integer" else leaf.kind for leaf in leaves]
    return (len(set(kinds)) == len(kinds) and "" not in kinds) or len(kinds) == 1


def _of_values(schema: Schema) -> list[Leaf]:
    """A leaf for each kind of values."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise ConfigError("enum must be a list of values")
    if "const" in schema and "enum" in schema:
        raise ConfigError("enum beside const")
    given = schema.get("type")
    allowed = None if given is None else given if isinstance(given, list) else [given]
    found: dict[str, list[Any]] = {}
    for value in values:
        kind = _kind_of(value)
        if allowed is None or kind in allowed or (kind == "integer" and "number" in allowed):
            found.setdefault(kind, []).append(value)
    if not found:
        raise ConfigError("enum has no value of the type")
    _refuse(schema, [key for keys in _OF_TYPE.values() for key in keys])
    return [Leaf(kind, {"enum": list(some)}, tuple(some)) for kind, some in found.items()]


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def members(schema: Schema) -> list[Member]:
    """An object's properties; those that are required and not described may be anything. Raises ConfigError."""
    _refuse(schema, (*_LOGIC, *_OF_OBJECTS, "enum", "const"))
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_listed = isinstance(required, list) and all(isinstance(key, str) for key in required)
    if not isinstance(properties, Mapping) or not is_listed:
        raise ConfigError("properties must be an object, and required a list of names")
    others = schema.get("additionalProperties", True)
    missing = [key for key in required if key not in properties]
    if missing and others is False:
        raise ConfigError(f"{missing[0]!r} is required and not among the properties")
    impossible = [key for key, one in properties.items() if one is False]
    if set(impossible) & set(required):
        raise ConfigError("a required property may have no value")
    found = [Member(key, one, key in required) for key, one in properties.items() if key not in impossible]
    found += [Member(key, others, True) for key in missing]
    if count_of(schema, "minProperties", 0) > len(required):
        raise ConfigError("minProperties above the number of required ones")
    if count_of(schema, "maxProperties", len(found)) < len(found):
        raise ConfigError("maxProperties below the number of properties")
    return found


def _refuse(schema: Schema, keys: Any) -> None:
    for key in keys:
        if key in schema:
            raise ConfigError(f"{key!r} cannot be followed here")
