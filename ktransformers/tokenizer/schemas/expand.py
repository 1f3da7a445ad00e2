"""Expands schemas that hold at the same place to alternatives of parts that all hold, where no keyword leads elsewhere.

`$ref`, `allOf`, `anyOf`, `oneOf` are followed; so are `if`, `not` and dependencies where what they mean can be said
without them, else they are widened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ktransformers.tokenizer.schemas.nodes import TYPES
from ktransformers.tokenizer.schemas.references import Document, SubSchema
from ktransformers.tokenizer.schemas.report import WideningReport, refuse

__all__ = ["NARROWING", "REFERENCES", "Expander", "in_order", "is_free", "parts_of", "types_of"]

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
NARROWING = frozenset(
    {
        *(*REFERENCES, "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"),
        *("dependencies", "type", "enum", "const", "minLength", "maxLength", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items", "prefixItems", "additionalItems"),
        *("minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems", "properties", "required"),
        *("patternProperties", "additionalProperties", "propertyNames", "minProperties", "maxProperties"),
        "unevaluatedProperties",
    }
)
"""Keywords that say something of a value. All others, and those that are null, change nothing."""

_MAX_PRODUCTS = 64
"""Alternatives that come of several lists of them at one place."""

_MAX_OPTIONS = 4096
_MAX_DEPTH = 100

Alternatives = list[list[SubSchema]]


def is_free(schema: Any) -> bool:
    """Whether a schema allows everything."""
    if isinstance(schema, dict):
        return all(key not in NARROWING or (value is None and key != "const") for key, value in schema.items())
    return schema is True


def parts_of(part: SubSchema, keyword: str, *, is_option: bool = False) -> list[SubSchema]:
    """Return the schemas in a keyword's list, which are for the same value.

    Raises SchemaError for what is no list of them.
    """
    options = part.get(keyword)
    if not isinstance(options, list) or not options:
        refuse(part.at, keyword, "it must be a list of schemas")
    return [part.beside(one, keyword, number, is_option=is_option) for number, one in enumerate(options)]


def types_of(part: SubSchema, report: WideningReport) -> frozenset[str] | None:
    """Return the types that a part allows; None: any. Words of other programs are widened."""
    given = part.get("type")
    if given is None:
        return None
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        refuse(part.at, "type", "it must be the name of a type, or a list of names")
    lowered = {name.lower() for name in names}
    if not lowered <= set(TYPES):
        report.widen(part.at, "type")
        return None
    if part.get("nullable") is True and None in (part.get("enum") or ()):
        lowered.add("null")  # OpenAPI 3.0 has no other way to say so
    return frozenset(lowered | {"integer"} if "number" in lowered else lowered)


class Expander:
    """Expands the schemas of one document to alternatives."""

    def __init__(self, document: Document, report: WideningReport):
        self._document, self._report = document, report

    def followed(self, part: SubSchema) -> SubSchema:
        """Return the schema to which a schema that is nothing but a reference leads in the end."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(part.schema, dict):
                return part
            said = [key for key, value in part.schema.items() if key in NARROWING and value is not None]
            if len(said) != 1 or said[0] not in ("$ref", "$recursiveRef"):
                return part
            found = self._document.follow(part, said[0])
            if id(found.schema) in found.chain:
                refuse(part.at, said[0], "it leads back to itself")
            part = found
        return refuse(part.at, "$ref", "it leads too far")

    def expand(self, part: SubSchema, depth: int = 0) -> Alternatives:
        """Return one list of parts for each way that a value may be; none where nothing fits."""
        if isinstance(part.schema, bool):
            return [[]] if part.schema else []
        if not isinstance(part.schema, dict):
            refuse(part.at, "schema", "a schema must be an object")
        if depth > _MAX_DEPTH:
            refuse(part.at, "schema", "schemas lie too deep within each other")
        made: Alternatives = [[part]]
        for keyword, groups in self._beside(part):
            more = [one for option in groups for one in self.expand(option, depth + 1)]
            made = self._both(made, more, part.at, keyword)
        return made

    def expand_all(self, parts: Sequence[SubSchema]) -> Alternatives:
        """Return the alternatives of several schemas that hold at once, as `expand` does of one."""
        made: Alternatives = [[]]
        for part in parts:
            made = self._both(made, self.expand(part), part.at, "anyOf")
        return made

    def _both(self, made: Alternatives, more: Alternatives, at: str, keyword: str) -> Alternatives:
        """Each of these with each of those, unless they would be too many."""
        count = len(made) * len(more)
        if count > _MAX_OPTIONS or (min(len(made), len(more)) > 1 and count > _MAX_PRODUCTS):
            self._report.widen(at, keyword)
            return made
        return [[*one, *other] for one in made for other in more]

    def _beside(self, part: SubSchema) -> Iterator[tuple[str, list[SubSchema]]]:
        """What holds beside a schema, each with its alternatives."""
        for keyword in REFERENCES:
            if part.get(keyword) is not None:
                yield from self._reference(part, keyword)
        if part.get("allOf") is not None:
            for one in parts_of(part, "allOf"):
                yield "allOf", [one]
        if part.get("anyOf") is not None:
            yield "anyOf", parts_of(part, "anyOf", is_option=True)
        if part.get("oneOf") is not None:
            yield "oneOf", parts_of(part, "oneOf")
        yield from self._conditions(part)
        yield from self._negation(part)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if part.get(keyword) is not None:
                yield from self._dependencies(part, keyword)

    def _reference(self, part: SubSchema, keyword: str) -> Iterator[tuple[str, list[SubSchema]]]:
        if keyword == "$dynamicRef" and not self._document.is_static(part):
            self._report.widen(part.at, keyword)
            return
        found = self._document.follow(part, keyword)
        if id(found.schema) in found.chain:
            refuse(part.at, keyword, "it leads back to itself")
        yield keyword, [found]

    def _conditions(self, part: SubSchema) -> Iterator[tuple[str, list[SubSchema]]]:
        condition, then, otherwise = part.get("if"), part.get("then"), part.get("else")
        if condition is None:
            return
        holds = True if is_free(condition) else False if _is_never(condition) else None
        if holds is not None:
            chosen, keyword = (then, "then") if holds else (otherwise, "else")
            if chosen is not None:
                yield keyword, [part.beside(chosen, keyword)]
        elif not (then is None or is_free(then)) or not (otherwise is None or is_free(otherwise)):
            self._report.widen(part.at, "if")

    def _negation(self, part: SubSchema) -> Iterator[tuple[str, list[SubSchema]]]:
        """`not`, where it can be said without: of everything, of types, of properties that must be there."""
        refused = part.get("not")
        if refused is None:
            return
        if is_free(refused):
            yield "not", []
            return
        if _is_never(refused):
            return
        said = {key: value for key, value in refused.items() if key in NARROWING} if isinstance(refused, dict) else {}
        if list(said) == ["type"]:
            barred = types_of(part.below(refused, "not"), self._report)
            if barred is not None:
                left = [kind for kind in TYPES if kind not in barred]
                if "number" in left and "integer" not in left:
                    self._report.widen(part.at, "not")
                yield "not", [part.beside({"type": left}, "not")] if left else []
                return
        names = said.get("required")
        if len(said) == 1 and isinstance(names, list) and len(names) == 1 and part.get("type") == "object":
            yield "not", [part.beside({"properties": {str(names[0]): False}}, "not")]
            return
        self._report.widen(part.at, "not")

    def _dependencies(self, part: SubSchema, keyword: str) -> Iterator[tuple[str, list[SubSchema]]]:
        """What follows from properties that are there in any case."""
        found = part.get(keyword)
        if not isinstance(found, dict):
            refuse(part.at, keyword, "it must be an object")
        required = _names(part.get("required"))
        properties = part.get("properties")
        for name, wanted in found.items():
            schema = {"required": wanted} if isinstance(wanted, list) else wanted
            if is_free(schema) or (isinstance(wanted, list) and set(map(str, wanted)) <= required):
                continue
            if isinstance(properties, dict) and properties.get(name) is False:
                continue
            if name in required and part.get("type") == "object":
                yield keyword, [part.beside(schema, keyword, name)]
            else:
                self._report.widen(part.at, keyword)


def _names(value: Any) -> set[str]:
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


def _is_never(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "not" in schema and is_free(schema["not"]) and schema["not"] is not None
    return schema is False


def in_order(parts: Sequence[SubSchema]) -> list[SubSchema]:
    """Return each schema once, in order."""
    return list({id(part.schema): part for part in reversed(parts)}.values())[::-1]
