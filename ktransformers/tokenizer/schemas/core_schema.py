"""Converts any JSON Schema to a core schema (see the package)."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktransformers.tokenizer.schemas.apart import are_nodes_apart
from ktransformers.tokenizer.schemas.arrays import merged_array
from ktransformers.tokenizer.schemas.emit import reachable, written
from ktransformers.tokenizer.schemas.emptiness import check_depth, check_ends, pruned
from ktransformers.tokenizer.schemas.expand import NARROWING, Expander, in_order, is_free, parts_of, types_of
from ktransformers.tokenizer.schemas.nodes import (
    TYPES,
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
from ktransformers.tokenizer.schemas.objects import MAX_OPTIONAL, merged_object
from ktransformers.tokenizer.schemas.references import Document, SubSchema
from ktransformers.tokenizer.schemas.report import SchemaError, Widened, WideningReport, refuse
from ktransformers.tokenizer.schemas.scalars import number_bounds, string_bounds, values_of

__all__ = ["Core", "core_schema"]

_MAX_NODES = 20_000
_MAX_COUNTED = 20_000
"""Items that all arrays of a schema may have together, where it counts them."""

_OF_KIND = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems"),
    "object": (
        *("properties", "required", "patternProperties", "additionalProperties", "propertyNames", "minProperties"),
        *("maxProperties", "unevaluatedProperties"),
    ),
}


@dataclass(frozen=True, slots=True)
class Core:
    """A core schema, as text, and the places where it takes more than was asked."""

    text: str
    widened: tuple[Widened, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """The core schema, parsed anew each time."""
        made = json.loads(self.text)
        assert isinstance(made, dict)
        return made


def core_schema(schema: object, *, is_object: bool = False) -> Core:
    """Return the same schema in core keywords. is_object: its values are objects whether it says so or not.

    Takes milliseconds for what programs write, and is kept for when the same is asked again. Raises SchemaError, with
    the place and the keyword, for a schema that is wrong, that nothing fits, or that no grammar could follow.
    """
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError("#", "schema", f"it is no JSON: {error}") from error
    made = _known(text, is_object)
    if isinstance(made, SchemaError):
        raise made.with_traceback(None)
    return made


@functools.lru_cache(maxsize=128)
def _known(text: str, is_object: bool) -> Core | SchemaError:
    try:
        return _Builder(json.loads(text), is_object).core()
    except SchemaError as error:
        return error


class _Builder:
    def __init__(self, root: Any, is_object: bool):
        if isinstance(root, dict) and "x-guidance" in root:
            refuse("#", "x-guidance", "how a schema is followed is not the request's to say")
        self._report = WideningReport()
        self._document = Document(root)
        self._expander = Expander(self._document, self._report)
        self._nodes: list[SchemaNode] = []
        self._parts: list[list[SubSchema]] = []  # of each node
        self._known: dict[tuple[int | bool, ...], int] = {}
        self._only_one: list[tuple[str, list[int]]] = []  # nodes of which exactly one may hold
        self._root = self._child([SubSchema(root, "#"), *([SubSchema({"type": "object"}, "#")] if is_object else [])])

    def core(self) -> Core:
        done = 0
        while done < len(self._nodes):
            self._fill(done)
            done += 1
        nodes = self._nodes
        has = pruned(nodes)
        if not has[self._root]:
            self._refuse_empty()
        check_ends(nodes, has, self._root, lambda number: nodes[number].at)
        check_depth(nodes, self._root)
        for at, options in self._only_one:
            pairs = ((one, other) for place, one in enumerate(options) for other in options[:place])
            if len(options) > 60 or not all(are_nodes_apart(nodes, has, *pair) for pair in pairs):
                self._report.widen(at, "oneOf")
        used = reachable(nodes, self._root)
        for number in used:
            self._check_size(number)
            for option in nodes[number].options:
                if isinstance(option, ObjectLeaf):
                    self._limit_properties(option, has)
        self._count_items(used)
        made = written(nodes, has, self._root)
        return Core(json.dumps(made, ensure_ascii=False), self._report.widened)

    def _child(self, parts: Sequence[SubSchema]) -> int:
        """The number of the node of all these, filled later."""
        found: dict[int | bool, SubSchema] = {}
        for part in parts:
            one = self._expander.followed(part)
            if not is_free(one.schema):
                found.setdefault(False if one.schema is False else id(one.schema), one)
        key = tuple(found)
        if key not in self._known:
            if len(self._nodes) >= _MAX_NODES:
                refuse("#", "schema", f"it has more than {_MAX_NODES} parts")
            self._known[key] = len(self._nodes)
            first = next(iter(found.values()), parts[0] if parts else None)
            self._nodes.append(SchemaNode("#" if first is None else first.at))
            self._parts.append(list(found.values()))
        return self._known[key]

    def _fill(self, number: int) -> None:
        node, parts = self._nodes[number], self._parts[number]
        if not parts:
            node.options.append(AnyLeaf())
            return
        if len(parts) == 1 and isinstance(parts[0].schema, dict):
            (part,) = parts
            said = [key for key, value in part.schema.items() if key in NARROWING and value is not None]
            if said in (["anyOf"], ["oneOf"]):
                options = [self._child([one]) for one in parts_of(part, said[0])]
                node.options += dict.fromkeys(options)
                if said == ["oneOf"]:
                    self._only_one.append((part.at, options))
                return
        alternatives = self._expander.expand_all(parts)
        if not alternatives:
            node.why = parts[0].at, "not" if parts[0].get("not") is not None else "schema"
        for one in alternatives:
            self._add_leaves(node, in_order(one))
        for part in {id(one.schema): one for alternative in alternatives for one in alternative}.values():
            if part.get("oneOf") is not None:
                self._note_only_one(part)

    def _note_only_one(self, part: SubSchema) -> None:
        """Of a `oneOf` beside other keywords, whose options are narrower with them."""
        base = {key: value for key, value in part.schema.items() if key != "oneOf"}
        beside = SubSchema(base, part.at)
        self._only_one.append((part.at, [self._child([beside, one]) for one in parts_of(part, "oneOf")]))

    def _add_leaves(self, node: SchemaNode, parts: list[SubSchema]) -> None:
        """What a value is that fits all these, their references and alternatives left aside."""
        kinds = set(TYPES)
        for part in parts:
            allowed = types_of(part, self._report)
            if allowed is not None:
                if not kinds & allowed:
                    node.why = node.why or (part.at, "type")
                kinds &= allowed
        values = values_of([part for part in parts if isinstance(part.schema, dict)], self._report)
        if values is not None:
            fitting = [value for value in values if _types(value) & kinds]
            if not fitting:
                node.why = node.why or (parts[0].at, "enum")
            node.options.append(ValuesLeaf(fitting))
            return
        if len(kinds) == len(TYPES) and not any(
            part.get(key) is not None for part in parts for keys in _OF_KIND.values() for key in keys
        ):
            node.options.append(AnyLeaf())
            return
        if "number" in kinds:
            kinds.discard("integer")
        order = [kind for kind in (*_order(parts), *TYPES) if kind in kinds]
        for kind in dict.fromkeys(order):
            made = self._leaf(kind, parts)
            if isinstance(made, tuple):
                node.why = node.why or made
            else:
                node.options.append(made)

    def _leaf(self, kind: str, parts: list[SubSchema]) -> Leaf | tuple[str, str]:
        """The leaf of a type; or what keyword, and where, leaves none."""
        match kind:
            case "string":
                bounds = string_bounds(parts, self._report)
            case "integer" | "number":
                bounds = number_bounds(kind, parts, self._report)
            case "array":
                return merged_array(parts, self._report, self._child)
            case "object":
                return merged_object(parts, self._expander, self._report, self._child)
            case _:
                bounds = {}
        return bounds if isinstance(bounds, tuple) else ScalarLeaf(kind, bounds)

    def _refuse_empty(self) -> None:
        """Raises SchemaError that says what leaves no answer."""
        number, seen = self._root, set[int]()
        while number not in seen:
            seen.add(number)
            node = self._nodes[number]
            if node.cause is None:
                at, keyword = node.why or (node.at, "schema")
                refuse(at, keyword, "nothing fits this, so that there is no answer")
            number = node.cause
        refuse(self._nodes[number].at, "$ref", "nothing fits this, so that there is no answer")

    def _check_size(self, number: int) -> None:
        """Properties that may be left out, of all alternatives, count together: a grammar has them open at once."""
        runs = []
        for leaf in leaves(self._nodes, number):
            if isinstance(leaf, ObjectLeaf):
                runs.append(_longest_run(leaf))
                if runs[-1] > MAX_OPTIONAL:
                    refuse(leaf.at, "properties", f"more than {MAX_OPTIONAL} of them may be left out one after another")
        if sum(runs) > 3 * MAX_OPTIONAL:
            at = self._nodes[number].at
            refuse(at, "properties", f"alternatives have more than {3 * MAX_OPTIONAL} that may be left out")

    def _limit_properties(self, leaf: ObjectLeaf, has: Sequence[bool]) -> None:
        """Numbers of properties are followed where none may be left out, or none is named."""
        if leaf.least <= len(leaf.required):
            leaf.least = 0
        possible = [name for name, one in leaf.properties.items() if has[one]]
        if leaf.most is not None and not leaf.patterns and not has[leaf.others] and leaf.most >= len(possible):
            leaf.most = None
        if set(possible) <= set(leaf.required):
            return
        if leaf.least:
            self._report.widen(leaf.at_least, "minProperties")
        if leaf.most is not None:
            self._report.widen(leaf.at_most, "maxProperties")
        leaf.least, leaf.most = 0, None

    def _count_items(self, used: Counter[int]) -> None:
        """What a schema counts of items is widened where it is more than a grammar has places for."""
        total = 0
        for number in used:
            for option in self._nodes[number].options:
                if not isinstance(option, ArrayLeaf):
                    continue
                if option.is_unique_at is not None:
                    self._limit_unique(option)
                total += option.least
                if total > _MAX_COUNTED:
                    refuse(self._nodes[number].at, "minItems", f"arrays count more than {_MAX_COUNTED} items together")
                if option.most is not None and total + option.most - option.least > _MAX_COUNTED:
                    self._report.widen(self._nodes[number].at, "maxItems")
                    option.most = None
                total += 0 if option.most is None else option.most - option.least

    def _limit_unique(self, leaf: ArrayLeaf) -> None:
        """There are no more different items than there are different values."""
        if leaf.most is not None and leaf.most < 2:
            return
        assert leaf.is_unique_at is not None
        self._report.widen(leaf.is_unique_at, "uniqueItems")
        if leaf.prefix:
            return
        count = 0
        for one in leaves(self._nodes, leaf.items):
            if isinstance(one, ValuesLeaf):
                count += len(one.values)
            elif isinstance(one, ScalarLeaf) and one.kind in ("boolean", "null"):
                count += 2 if one.kind == "boolean" else 1
            else:
                return
        if leaf.least <= count and (leaf.most is None or leaf.most > count):
            leaf.most = count


def _order(parts: Sequence[SubSchema]) -> list[str]:
    """Types in the order in which they are said."""
    for part in parts:
        given = part.get("type")
        if given is not None:
            return [str(name).lower() for name in (given if isinstance(given, list) else [given])]
    return []


def _types(value: Any) -> set[str]:
    kind = type_of(value)
    return {"integer", "number"} if kind == "integer" else {kind}


def _longest_run(leaf: ObjectLeaf) -> int:
    longest = run = 0
    required = set(leaf.required)
    for name in leaf.properties:
        run = 0 if name in required else run + 1
        longest = max(longest, run)
    return longest
