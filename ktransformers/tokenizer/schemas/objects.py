"""Merges the parts of a schema that hold at once for an object: for each name all that its value has to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktransformers.tokenizer.schemas.expand import NARROWING, Expander, is_free
from ktransformers.tokenizer.schemas.nodes import ObjectLeaf
from ktransformers.tokenizer.schemas.patterns import are_apart, followed, is_plain, matches, without_assertions
from ktransformers.tokenizer.schemas.references import SubSchema
from ktransformers.tokenizer.schemas.report import WideningReport, refuse
from ktransformers.tokenizer.schemas.scalars import count_of

__all__ = ["MAX_OPTIONAL", "merged_object"]

MAX_OPTIONAL = 499
"""Properties of one object that may be left out one after the other: a grammar keeps a few places for each of them."""

_MAX_NAMES = 20_000
_MAX_MATCHES = 4000


@dataclass(slots=True)
class _Names:
    """What one part says of names. others: of those that it does not name; None: nothing."""

    at: str
    properties: dict[str, SubSchema] = field(default_factory=dict)
    patterns: dict[str, SubSchema] = field(default_factory=dict)
    others: SubSchema | None = None


def _object(part: SubSchema, keyword: str) -> Mapping[str, Any]:
    value = part.get(keyword)
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(part.at, keyword, "it must be an object")
    return value


def merged_object(
    parts: Sequence[SubSchema], expander: Expander, report: WideningReport, child: Callable[[Sequence[SubSchema]], int]
) -> ObjectLeaf | tuple[str, str]:
    """Return the leaf of all parts; or the keyword, and its place, that leaves none.

    child: the node of all these parts.
    """
    return _Merger(parts, expander, report, child).leaf()


class _Merger:
    def __init__(
        self,
        parts: Sequence[SubSchema],
        expander: Expander,
        report: WideningReport,
        child: Callable[[Sequence[SubSchema]], int],
    ):
        self._parts, self._expander, self._report, self._child = parts, expander, report, child
        self._said: list[_Names] = []
        self._num_matches = 0

    def leaf(self) -> ObjectLeaf | tuple[str, str]:
        for part in self._parts:
            self._said += self._names(part)
        for part in self._parts:
            self._said += self._allowed_names(part)
        for part in self._parts:
            self._said += self._unevaluated(part)
        required = self._required()
        names = dict.fromkeys([*(name for said in self._said for name in said.properties), *required])
        if len(names) > _MAX_NAMES:
            refuse(self._at("properties"), "properties", f"an object of {len(names)} properties is too large")
        properties = {name: self._child(self._of_name(name)) for name in names}
        others = self._child([said.others for said in self._said if said.others is not None])
        patterns, others = self._patterns(others)
        leaf = ObjectLeaf(properties, required, patterns, others, at=self._at("properties"))
        return self._counted(leaf)

    def _at(self, keyword: str) -> str:
        return next((part.at for part in self._parts if part.get(keyword) is not None), self._parts[0].at)

    def _names(self, part: SubSchema) -> list[_Names]:
        properties = _object(part, "properties")
        patterns = {self._followed(part, pattern): one for pattern, one in _object(part, "patternProperties").items()}
        others = part.get("additionalProperties")
        if not properties and not patterns and others is None:
            return []
        made = _Names(part.at)
        made.properties = {
            name: part.below(one, "properties", name) for name, one in properties.items() if one is not None
        }
        for pattern, one in patterns.items():
            if pattern is not None:
                made.patterns[pattern] = part.below(one, "patternProperties", pattern)
        # Names of a pattern that cannot be followed may be any.
        if others is not None and None not in patterns:
            made.others = part.below(others, "additionalProperties")
        return [made]

    def _followed(self, part: SubSchema, pattern: str) -> str | None:
        tried = pattern if is_plain(pattern) else without_assertions(pattern)
        if tried != pattern:
            self._report.widen(part.at, "patternProperties")
        if followed({"type": "string", "pattern": tried}):
            return tried
        self._report.widen(part.at, "patternProperties")
        return None

    def _allowed_names(self, part: SubSchema) -> list[_Names]:
        """`propertyNames`, as what other keywords say."""
        if part.get("propertyNames") is None:
            return []
        names = self._expander.followed(part.below(part.schema["propertyNames"], "propertyNames"))
        if is_free(names.schema):
            return []
        none_else = names.beside(False)
        if names.schema is False:
            return [_Names(part.at, others=none_else)]
        if not isinstance(names.schema, dict):
            refuse(part.at, "propertyNames", "a schema must be an object")
        said = {key: value for key, value in names.schema.items() if key in NARROWING and value is not None}
        if said.get("type") == "string":
            del said["type"]
        if not said:
            return []
        free = names.beside(True)
        values = said.get("enum", [said["const"]] if "const" in said else None)
        if len(said) == 1 and isinstance(values, list):
            return [_Names(part.at, {value: free for value in values if isinstance(value, str)}, {}, none_else)]
        pattern, is_all = _pattern_of(said)
        is_followed = pattern is not None and followed({"type": "string", "pattern": pattern})
        if not is_all or not is_followed:
            self._report.widen(part.at, "propertyNames")
        return [_Names(part.at, {}, {pattern: free}, none_else)] if pattern is not None and is_followed else []

    def _unevaluated(self, part: SubSchema) -> list[_Names]:
        """`unevaluatedProperties`: of names that neither the part nor any schema in it, at its place, is about."""
        if part.get("unevaluatedProperties") is None or is_free(part.schema["unevaluatedProperties"]):
            return []
        within = [one for one in self._parts if one is part or id(part.schema) in one.chain]
        inner = [one for one in within if one is not part and one.get("unevaluatedProperties") is not None]
        if inner or any(one.get("additionalProperties") is not None for one in within):
            return []
        if any(one.is_option or one.has_conditions for one in within):
            self._report.widen(part.at, "unevaluatedProperties")
            return []
        made = _Names(part.at, others=part.below(part.schema["unevaluatedProperties"], "unevaluatedProperties"))
        for one in within:
            for name in _object(one, "properties"):
                made.properties[name] = one.below(True, "properties", name)
            for pattern in _object(one, "patternProperties"):
                made.patterns[self._followed(one, pattern) or ""] = one.below(True, "patternProperties", pattern)
        return [made]

    def _required(self) -> list[str]:
        found: dict[str, None] = {}
        for part in self._parts:
            names = part.get("required")
            if isinstance(names, bool):  # of draft 3, where a property said it of itself
                if names:
                    self._report.widen(part.at, "required")
                continue
            if names is None:
                continue
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                refuse(part.at, "required", "it must be a list of names")
            found.update(dict.fromkeys(names))
        return list(found)

    def _of_name(self, name: str) -> list[SubSchema]:
        """All that a property's value has to fit."""
        found = []
        for said in self._said:
            fitting = [said.properties[name]] if name in said.properties else []
            for pattern, part in said.patterns.items():
                self._num_matches += 1
                if self._num_matches > _MAX_MATCHES:
                    refuse(said.at, "patternProperties", "there are too many of them beside so many properties")
                if matches(pattern, name):
                    fitting.append(part)
            if not fitting and said.others is not None:
                fitting = [said.others]
            found += fitting
        return found

    def _patterns(self, others: int) -> tuple[dict[str, int], int]:
        """Nodes of names that patterns match, and of all other names."""
        said = dict.fromkeys(pattern for one in self._said for pattern in one.patterns)
        if not said:
            return {}, others
        of = {
            pattern: self._child(
                [found for one in self._said if (found := one.patterns.get(pattern, one.others)) is not None]
            )
            for pattern in said
        }
        if len(of) == 1 or are_apart(list(of)):
            return of, others
        at = next(one.at for one in self._said if one.patterns)
        self._report.widen(at, "patternProperties")
        joined = "|".join(f"({pattern})" for pattern in of)
        anything = self._child([])
        if followed({"type": "string", "pattern": joined}):
            return {joined: anything}, others
        return {}, anything

    def _counted(self, leaf: ObjectLeaf) -> ObjectLeaf | tuple[str, str]:
        for part in self._parts:
            least, most = count_of(part, "minProperties"), count_of(part, "maxProperties")
            if least is not None and least > leaf.least:
                leaf.least, leaf.at_least = least, part.at
            if most is not None and (leaf.most is None or most < leaf.most):
                leaf.most, leaf.at_most = most, part.at
        if leaf.most is not None and max(leaf.least, len(leaf.required)) > leaf.most:
            return self._at("maxProperties"), "maxProperties"
        return leaf


def _pattern_of(said: Mapping[str, Any]) -> tuple[str | None, bool]:
    """A pattern for names, and whether it is all that is said of them."""
    pattern, is_length = said.get("pattern"), set(said) <= {"minLength", "maxLength"}
    if isinstance(pattern, str):
        return without_assertions(pattern), len(said) == 1 and is_plain(pattern)
    if is_length and all(type(value) is int for value in said.values()):
        return f"^[\\s\\S]{{{said.get('minLength', 0)},{said.get('maxLength', '')}}}$", True
    return None, False
