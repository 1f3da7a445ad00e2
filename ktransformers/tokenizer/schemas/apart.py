"""Tests whether no value fits two nodes, so that exactly one of them is as good as any of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ktransformers.tokenizer.schemas.nodes import (
    AnyLeaf,
    ArrayLeaf,
    Leaf,
    ObjectLeaf,
    ScalarLeaf,
    SchemaNode,
    ValuesLeaf,
    leaves,
    type_of,
)
from ktransformers.tokenizer.schemas.patterns import followed

__all__ = ["are_nodes_apart"]

_MAX_DEPTH = 4


def are_nodes_apart(
    nodes: Sequence[SchemaNode], has: Sequence[bool], one: int, other: int, depth: int = _MAX_DEPTH
) -> bool:
    """Whether no value fits both nodes; True only where that is certain. has: which nodes have values."""
    if not has[one] or not has[other]:
        return True
    if one == other or not depth:
        return False
    pairs = [(first, second) for first in leaves(nodes, one) for second in leaves(nodes, other)]
    return len(pairs) <= 400 and all(_are_apart(nodes, has, first, second, depth) for first, second in pairs)


def _are_apart(nodes: Sequence[SchemaNode], has: Sequence[bool], one: Leaf, other: Leaf, depth: int) -> bool:
    if isinstance(one, AnyLeaf) or isinstance(other, AnyLeaf):
        return False
    if isinstance(other, ValuesLeaf):
        one, other = other, one
    if isinstance(one, ValuesLeaf):
        return all(_lies_outside(value, other) for value in one.values)
    kinds = {_family(one), _family(other)}
    if len(kinds) == 2:
        return True
    if isinstance(one, ScalarLeaf) and isinstance(other, ScalarLeaf):
        return kinds == {"number"} and _are_ranges_apart(one.bounds, other.bounds)
    if isinstance(one, ObjectLeaf) and isinstance(other, ObjectLeaf):
        return any(
            _tells_apart(nodes, has, name, first, second, depth)
            for first, second in ((one, other), (other, one))
            for name in first.required
        )
    if isinstance(one, ArrayLeaf) and isinstance(other, ArrayLeaf):
        return any(
            (first.most is not None and first.most < second.least) for first, second in ((one, other), (other, one))
        )
    return False


def _tells_apart(
    nodes: Sequence[SchemaNode], has: Sequence[bool], name: str, one: ObjectLeaf, other: ObjectLeaf, depth: int
) -> bool:
    """Whether a property that `one` must have cannot be in `other`, or not like that."""
    if name not in other.properties:
        return not other.patterns and not has[other.others]
    theirs = other.properties[name]
    if not has[theirs]:
        return True
    return name in other.required and are_nodes_apart(nodes, has, one.properties[name], theirs, depth - 1)


def _family(leaf: Leaf) -> str:
    if isinstance(leaf, ScalarLeaf):
        return "number" if leaf.kind == "integer" else leaf.kind
    return type(leaf).__name__


def _are_ranges_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def top(bounds: Mapping[str, Any]) -> tuple[float, bool]:
        most, below = bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf)
        return (below, True) if below <= most else (most, False)

    def bottom(bounds: Mapping[str, Any]) -> tuple[float, bool]:
        least, above = bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf)
        return (above, True) if above >= least else (least, False)

    for first, second in ((one, other), (other, one)):
        (most, is_below), (least, is_above) = top(first), bottom(second)
        if most < least or (most == least and (is_below or is_above) and math.isfinite(most)):
            return True
    return False


def _lies_outside(value: Any, leaf: Leaf) -> bool:
    if isinstance(leaf, ValuesLeaf):
        return json.dumps(value, sort_keys=True) not in {json.dumps(one, sort_keys=True) for one in leaf.values}
    kind = type_of(value)
    if isinstance(leaf, ScalarLeaf):
        if kind != leaf.kind and (kind, leaf.kind) != ("integer", "number"):
            return True
        return bool(leaf.bounds) and followed({"enum": [value], "anyOf": [{"type": leaf.kind, **leaf.bounds}]}) is None
    return kind != ("array" if isinstance(leaf, ArrayLeaf) else "object")
