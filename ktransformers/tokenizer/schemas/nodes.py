"""Schemas taken apart: a node is what a value may be, as alternatives; a leaf is one of them, of one type.

Children are numbers of nodes, so that schemas may refer to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "TYPES",
    "AnyLeaf",
    "ArrayLeaf",
    "Leaf",
    "ObjectLeaf",
    "ScalarLeaf",
    "SchemaNode",
    "ValuesLeaf",
    "leaves",
    "type_of",
]

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


@dataclass(slots=True)
class AnyLeaf:
    """A leaf that any value fits."""


@dataclass(slots=True)
class ScalarLeaf:
    """A leaf for a string, a number, a truth value or null. bounds: its keywords, as of a core schema."""

    kind: str
    bounds: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ValuesLeaf:
    """A leaf for one of some given values."""

    values: list[Any]


@dataclass(slots=True)
class ArrayLeaf:
    """A leaf for an array. items: behind the prefix. most: None: no limit.

    is_unique_at: where it says that items differ.
    """

    prefix: list[int]
    items: int
    least: int = 0
    most: int | None = None
    is_unique_at: str | None = None


@dataclass(slots=True)
class ObjectLeaf:
    """A leaf for an object. others: of names that no other part is about. most: None: no limit.

    at, at_least, at_most: where its properties are said, and their numbers.
    """

    properties: dict[str, int]
    required: list[str]
    patterns: dict[str, int]
    others: int
    least: int = 0
    most: int | None = None
    at: str = "#"
    at_least: str = "#"
    at_most: str = "#"


Leaf = AnyLeaf | ScalarLeaf | ValuesLeaf | ArrayLeaf | ObjectLeaf


@dataclass(slots=True)
class SchemaNode:
    """A set of alternatives. options: what a value may be: leaves, and numbers of nodes that say the same of it.

    at: where it is said. why: what keyword left no options, if one did, and where. cause: a node without values that
    left this one without.
    """

    at: str
    options: list[Leaf | int] = field(default_factory=list)
    why: tuple[str, str] | None = None
    cause: int | None = None


def leaves(nodes: Sequence[SchemaNode], number: int) -> Iterator[Leaf]:
    """Yield all leaves of a node, those of nodes that it stands for included. No node stands for itself."""
    for option in nodes[number].options:
        if isinstance(option, int):
            yield from leaves(nodes, option)
        else:
            yield option


def type_of(value: Any) -> str:
    """Return JSON Schema's name of a value's type, "integer" for whole numbers."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array"}
    return kinds.get(type(value), "object")
