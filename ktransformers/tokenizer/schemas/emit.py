"""Writes nodes as a core schema. What several parts use, or what lies deep, is among its `$defs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ktransformers.tokenizer.schemas.emptiness import children
from ktransformers.tokenizer.schemas.nodes import (
    AnyLeaf,
    ArrayLeaf,
    Leaf,
    ObjectLeaf,
    ScalarLeaf,
    SchemaNode,
    ValuesLeaf,
)

__all__ = ["reachable", "written"]

_MAX_DEPTH = 12


def reachable(nodes: Sequence[SchemaNode], root: int) -> Counter[int]:
    """Count how often each node is used by those that the root leads to."""
    used, waiting = Counter({root: 1}), [root]
    while waiting:
        for option in nodes[waiting.pop()].options:
            for other in (option,) if isinstance(option, int) else children(option):
                if not used[other]:
                    waiting.append(other)
                used[other] += 1
    return used


class _Writer:
    def __init__(self, nodes: Sequence[SchemaNode], has: Sequence[bool], root: int):
        self._nodes, self._has, self._root = nodes, has, root
        self._used = reachable(nodes, root)
        self._names: dict[int, str] = {}
        self._waiting: list[int] = []

    def write(self) -> dict[str, Any]:
        whole = self._node(self._root, 0)
        shared: dict[str, Any] = {}
        while self._waiting:
            number = self._waiting.pop(0)
            shared[self._names[number]] = self._node(number, 0)
        if self._root in self._names:
            whole = {"$ref": f"#/$defs/{self._names[self._root]}"}
        return {**whole, "$defs": shared} if shared else whole

    def _refer(self, number: int, depth: int) -> Any:
        """A node where another has it."""
        if not self._has[number]:
            return False
        if number != self._root and (self._is_small(number) or (self._used[number] == 1 and depth < _MAX_DEPTH)):
            return self._node(number, depth + 1)
        if number not in self._names:
            self._names[number] = f"n{len(self._names)}"
            self._waiting.append(number)
        return {"$ref": f"#/$defs/{self._names[number]}"}

    def _is_small(self, number: int) -> bool:
        options = self._nodes[number].options
        if len(options) != 1:
            return False
        (option,) = options
        return isinstance(option, AnyLeaf | ScalarLeaf) or (isinstance(option, ValuesLeaf) and len(option.values) < 9)

    def _node(self, number: int, depth: int) -> dict[str, Any]:
        values: list[Any] = []
        made: list[dict[str, Any]] = []
        for option in self._nodes[number].options:
            one = self._refer(option, depth) if isinstance(option, int) else self._leaf(option, depth)
            if set(one) == {"enum"}:
                if not values:
                    made.append({"enum": values})
                values += [value for value in one["enum"] if not _is_among(value, values)]
            elif one not in made:
                made += one["anyOf"] if set(one) == {"anyOf"} else [one]
        if {} in made:
            return {}
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _leaf(self, leaf: Leaf, depth: int) -> dict[str, Any]:
        match leaf:
            case AnyLeaf():
                return {}
            case ValuesLeaf():
                return {"enum": leaf.values}
            case ScalarLeaf():
                return {"type": leaf.kind, **leaf.bounds}
            case ArrayLeaf():
                return self._array(leaf, depth)
            case ObjectLeaf():
                return self._object(leaf, depth)

    def _array(self, leaf: ArrayLeaf, depth: int) -> dict[str, Any]:
        prefix = leaf.prefix if leaf.most is None else leaf.prefix[: leaf.most]
        made: dict[str, Any] = {"type": "array"}
        if prefix:
            made["prefixItems"] = [self._refer(one, depth) for one in prefix]
        items = False if leaf.most is not None and leaf.most <= len(prefix) else self._refer(leaf.items, depth)
        if items != {}:
            made["items"] = items
        if leaf.least:
            made["minItems"] = leaf.least
        if leaf.most is not None and (items is not False or leaf.most < len(prefix)):
            made["maxItems"] = leaf.most
        return made

    def _object(self, leaf: ObjectLeaf, depth: int) -> dict[str, Any]:
        others = self._refer(leaf.others, depth)
        made: dict[str, Any] = {"type": "object"}
        properties = {
            name: self._refer(number, depth)
            for name, number in leaf.properties.items()
            if self._has[number] or others is not False or leaf.patterns
        }
        if properties:
            made["properties"] = properties
        if leaf.required:
            made["required"] = leaf.required
        if leaf.patterns:
            made["patternProperties"] = {name: self._refer(one, depth) for name, one in leaf.patterns.items()}
        if others != {}:
            made["additionalProperties"] = others
        if leaf.least:
            made["minProperties"] = leaf.least
        if leaf.most is not None:
            made["maxProperties"] = leaf.most
        return made


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    if isinstance(value, str):  # most are; there may be many
        return len(values) < 64 and value in values
    return any(type(value) is type(one) and value == one for one in values)


def written(nodes: Sequence[SchemaNode], has: Sequence[bool], root: int) -> Mapping[str, Any]:
    """Return the core schema of a node that has values."""
    return _Writer(nodes, has, root).write()
