"""Merges parts that hold at once for strings, numbers and single values; what no grammar follows of it is widened."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from ktransformers.tokenizer.schemas.nodes import type_of
from ktransformers.tokenizer.schemas.patterns import MAX_PATTERN, followed, is_plain, matches, without_assertions
from ktransformers.tokenizer.schemas.references import SubSchema
from ktransformers.tokenizer.schemas.report import WideningReport, refuse

__all__ = ["FORMATS", "count_of", "is_number", "number_bounds", "string_bounds", "values_of"]

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Those that grammars hold strings to. By default a format is a remark, so that others change nothing."""

_MAX_COUNT = 1 << 31
_LARGEST = 1.7976931348623157e308
_MAX_MULTIPLE = 5000
"""Digits of a `multipleOf`, as a number: a grammar has a state for each, and a million of them take half a minute."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def count_of(part: SubSchema, keyword: str) -> int | None:
    """Return a keyword's number of characters, items or properties; None where there is none.

    Raises SchemaError for what is none.
    """
    value = part.get(keyword)
    if value is None:
        return None
    if not is_number(value) or value != int(value):
        refuse(part.at, keyword, "it must be a whole number")
    if value < _MAX_COUNT:
        return int(value)
    # No answer gets so long: a limit is none, and a minimum is out of reach.
    return None if keyword.startswith("max") else refuse(part.at, keyword, "no answer gets so long")


def string_bounds(parts: Sequence[SubSchema], report: WideningReport) -> dict[str, Any] | tuple[str, str]:
    """Return the keywords of a string; or the keyword, and its place, that leaves no value."""
    bounds: dict[str, Any] = {}
    where: dict[str, str] = {}
    patterns: dict[str, str] = {}
    for part in parts:
        least, most = count_of(part, "minLength"), count_of(part, "maxLength")
        if least is not None and least > bounds.get("minLength", 0):
            bounds["minLength"], where["minLength"] = least, part.at
        if most is not None and most < bounds.get("maxLength", math.inf):
            bounds["maxLength"], where["maxLength"] = most, part.at
        _add_format(part, bounds, where, report)
        pattern = _pattern(part, report)
        if pattern is not None:
            patterns.setdefault(pattern, part.at)
    if bounds.get("minLength", 0) > bounds.get("maxLength", math.inf) or bounds.get("maxLength", 0) < 0:
        return where["maxLength"], "maxLength"
    return _kept("string", bounds, where, patterns, report)


def _add_format(part: SubSchema, bounds: dict[str, Any], where: dict[str, str], report: WideningReport) -> None:
    name = part.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        return
    if bounds.setdefault("format", name) != name:
        report.widen(part.at, "format")
    where.setdefault("format", part.at)


def _pattern(part: SubSchema, report: WideningReport) -> str | None:
    """The part's pattern, as far as it can be followed by itself."""
    pattern = part.get("pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, str):
        refuse(part.at, "pattern", "it must be text")
    tried = [pattern] if is_plain(pattern) else [without_assertions(pattern)]
    for one in tried if len(pattern) <= MAX_PATTERN else []:
        if followed({"type": "string", "pattern": one}) is not False:
            if one != pattern:
                report.widen(part.at, "pattern")
            return one
    report.widen(part.at, "pattern")
    return None


def _kept(
    kind: str, bounds: dict[str, Any], where: dict[str, str], patterns: dict[str, str], report: WideningReport
) -> dict[str, Any] | tuple[str, str]:
    """As many of these as can be followed together."""
    said: list[tuple[str, Any, str]] = [(key, value, where[key]) for key, value in bounds.items()]
    said += [("pattern", pattern, at) for pattern, at in patterns.items()]
    if not said or all(key in ("minLength", "maxLength") for key, _, _ in said):
        return bounds
    for left_out in itertools.chain.from_iterable(
        itertools.combinations(range(len(said)), number) for number in range(min(len(said), 4))
    ):
        kept = [one for number, one in enumerate(said) if number not in left_out]
        made = _joined(kept)
        verdict = followed({"type": kind, **made})
        if verdict is None and not left_out:
            return said[-1][2], said[-1][0]
        if verdict:
            for number in left_out:
                report.widen(said[number][2], said[number][0])
            return made
    for key, _, at in said:
        report.widen(at, key)
    return {}


def _joined(said: Iterable[tuple[str, Any, str]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    patterns = []
    for key, value, _ in said:
        if key == "pattern":
            patterns.append(value)
        else:
            made[key] = value
    if len(patterns) == 1:
        made["pattern"] = patterns[0]
    elif patterns:
        made["allOf"] = [{"pattern": pattern} for pattern in patterns]
    return made


def number_bounds(kind: str, parts: Sequence[SubSchema], report: WideningReport) -> dict[str, Any] | tuple[str, str]:
    """Return the keywords of a number; or the keyword, and its place, that leaves no value."""
    bounds: dict[str, Any] = {}
    where: dict[str, str] = {}

    def note(key: str, value: Any, at: str, is_closer: bool) -> None:
        if key not in bounds or is_closer:
            bounds[key], where[key] = value, at

    for part in parts:
        for key, value in _limits(part):
            is_lower = key in ("minimum", "exclusiveMinimum")
            note(key, value, part.at, value > bounds.get(key, value) if is_lower else value < bounds.get(key, value))
        multiple = part.get("multipleOf")
        if multiple is None:
            continue
        if not is_number(multiple) or multiple <= 0:
            refuse(part.at, "multipleOf", "it must be a number above 0")
        if _digits(multiple) > _MAX_MULTIPLE:
            report.widen(part.at, "multipleOf")
            continue
        other = bounds.get("multipleOf", multiple)
        both = math.lcm(other, multiple) if isinstance(other, int) and isinstance(multiple, int) else 0
        if 0 < _digits(both) <= _MAX_MULTIPLE:
            note("multipleOf", both, part.at, True)
        elif other != multiple:
            report.widen(part.at, "multipleOf")
        else:
            note("multipleOf", multiple, part.at, False)
    return _kept(kind, bounds, where, {}, report)


def _digits(number: float) -> int:
    """The digits of a number without the zeros at its ends."""
    return int("".join(map(str, Decimal(repr(number)).as_tuple().digits)).rstrip("0") or "0")


def _limits(part: SubSchema) -> list[tuple[str, Any]]:
    """The bounds of a part. In drafts up to 4 a truth value says whether a bound is left out itself."""
    found = []
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        value, without = part.get(bound), part.get(exclusive)
        if without is True:
            value, without = None, value
        for key, one in ((bound, value), (exclusive, without)):
            if one is None or one is False:
                continue
            if not is_number(one):
                refuse(part.at, key, "it must be a number")
            if abs(one) < _LARGEST:  # else every number of JSON is within
                found.append((key, one))
    return found


def values_of(parts: Sequence[SubSchema], report: WideningReport) -> list[Any] | None:
    """Return the values that all parts allow, by enum and const, as far as they fit the rest; None: any."""
    found: list[Any] | None = None
    for part in parts:
        for keyword in ("enum", "const"):
            if keyword not in part.schema or (keyword == "enum" and part.schema["enum"] is None):
                continue
            said = part.schema[keyword] if keyword == "enum" else [part.schema["const"]]
            if not isinstance(said, list):
                refuse(part.at, keyword, "it must be a list of values")
            keys = {_key(value) for value in said}
            found = said if found is None else [value for value in found if _key(value) in keys]
    if found is None:
        return None
    once = {_key(value): value for value in found}
    return [value for value in once.values() if all(_fits(value, part, report) for part in parts)]


def _key(value: Any) -> str:
    """The same for values that are equal in JSON, where 1.0 is 1 and true is neither."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


_OF_LISTS = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "additionalItems")
_OF_OBJECTS = (
    *("properties", "required", "patternProperties", "additionalProperties", "propertyNames", "minProperties"),
    "maxProperties",
)


def _fits(value: Any, part: SubSchema, report: WideningReport) -> bool:
    """Whether a value is what the part's other keywords say, as far as they are about what it is itself."""
    kind = type_of(value)
    if kind == "string":
        least, most = count_of(part, "minLength") or 0, count_of(part, "maxLength")
        if len(value) < least or (most is not None and len(value) > most):
            return False
        pattern = _pattern(part, report)
        return pattern is None or matches(pattern, value)
    if kind in ("integer", "number"):
        return _is_within(value, part)
    for keyword in {"array": _OF_LISTS, "object": _OF_OBJECTS}.get(kind, ()):
        if part.get(keyword) is not None:
            report.widen(part.at, keyword)
    return True


def _is_within(value: Any, part: SubSchema) -> bool:
    for key, bound in _limits(part):
        if not {
            "minimum": value >= bound,
            "exclusiveMinimum": value > bound,
            "maximum": value <= bound,
            "exclusiveMaximum": value < bound,
        }[key]:
            return False
    multiple = part.get("multipleOf")
    return not is_number(multiple) or multiple <= 0 or not value % multiple
