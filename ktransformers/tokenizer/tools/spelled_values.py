"""Grammars of arguments that are nearly JSON: as keywords of a Python call, and as Gemma spells them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tools.lark import LarkRules, literal, text_of
from ktransformers.tokenizer.tools.schema_parts import Leaf, Member, alternatives, members

__all__ = ["GemmaValues", "Widen", "python_arguments"]

_KEYWORD = re.compile(r"[\w.\-]+")
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUOTE = '<|"|>'
_MAX_PROPERTIES = 200
"""Of one object; they lie within each other in a grammar."""

Widen = Callable[[str, str], None]
"""Told of what a grammar does not follow of a schema: where it stands, and the keyword."""


def _listed(rules: LarkRules, rule: str, items: Sequence[tuple[str, bool]], sep: str) -> str:
    """A rule for items in this order, each a rule and whether it must be there, with sep between those that are."""
    if len(items) > _MAX_PROPERTIES:
        raise ConfigError(f"an object has {len(items)} properties; at most {_MAX_PROPERTIES} can be followed here")
    rest = ""
    begins = [""]
    for number, (name, is_required) in reversed(list(enumerate(items))):
        begins = [f"{name} {rest}".strip(), *([] if is_required else begins)]
        follows = f"{literal(sep)} {name}"
        rest = rules.add(f"{rule}_rest_{number}", follows if is_required else f"({follows})?", rest)
    return rules.add(rule, " | ".join(begin or literal("") for begin in begins))


def python_arguments(rules: LarkRules, rule: str, schema: Mapping[str, Any], root: Any, widen: Widen) -> str:
    """Add the rule of what stands between the parentheses of a Python call; return its name.

    Values are literals that are JSON, but for Python's words.
    """
    items = []
    for number, member in enumerate(members(schema)):
        if not _KEYWORD.fullmatch(member.key):
            if member.is_required:
                raise ConfigError(f"the parameter {member.key[:64]!r} has a name that is no keyword")
            widen(f"#/properties/{member.key}", "properties")
            continue
        value = f"{rule}_{number}"
        rules.add(value, rules.spelled(f"{member.key}="), _python_value(rules, f"{value}_value", member.schema, root))
        items.append((value, member.is_required))
    return _listed(rules, rule, items, ", ")


_PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def _python_value(rules: LarkRules, rule: str, schema: Any, root: Any) -> str:
    leaves = alternatives(schema, root)
    words = [leaf for leaf in leaves if leaf.kind in _PYTHON_WORDS and leaf.values is None]
    others = [leaf.schema for leaf in leaves if leaf not in words]
    options = [literal(word) for leaf in words for word in _PYTHON_WORDS[leaf.kind]]
    if others:
        options.append(rules.json(f"{rule}_json", {"anyOf": others} if words else schema, root))
    return rules.add(rule, " | ".join(options))


class GemmaValues:
    """Writes the rules of one tool's arguments: `{key:<|"|>text<|"|>,other:[1,true]}`. root: its core schema."""

    def __init__(self, rules: LarkRules, prefix: str, root: Mapping[str, Any], widen: Widen):
        self._rules, self._prefix, self._root, self._widen = rules, prefix, root, widen
        self._at = "#"
        self._known: dict[int, str] = {}  # rules by parts of the root, which may refer to those they are in
        self._anything_rule = ""
        self._count = 0

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for the whole object of arguments, of one of the root's alternatives."""
        return self._properties(self._named(), schema)

    def _named(self) -> str:
        self._count += 1
        return f"{self._prefix}_{self._count}"

    def _value(self, schema: Any) -> str:
        """The rule of a value."""
        if schema is True:
            return self._anything()
        if id(schema) not in self._known:
            self._known[id(schema)] = rule = self._named()
            options = [self._leaf(leaf) for leaf in alternatives(schema, self._root)]
            self._rules.add(rule, " | ".join(options))
        return self._known[id(schema)]

    def _leaf(self, leaf: Leaf) -> str:
        if leaf.values is not None:
            return f"({' | '.join(self._rules.spelled(_spelled(value)) for value in leaf.values)})"
        match leaf.kind:
            case "string":
                return self._string(text_of(leaf, lambda keyword: self._widen(self._at, keyword)))
            case "integer" | "number":
                return self._rules.json(self._named(), leaf.schema, {})
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._array(leaf.schema)
            case "object":
                return self._object(self._named(), leaf.schema)
            case "":
                return self._anything()
        raise ConfigError(f"there is no type {leaf.kind[:64]!r}")

    def _string(self, content: str) -> str:
        rule = self._named()
        text = self._rules.text(f"{rule}_string", f"{rule.upper()}_STRING", content, stop=_QUOTE)
        return f"{self._rules.spelled(_QUOTE)} {text}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems", -1)
        prefix = [self._value(one) for one in schema.get("prefixItems", ())]
        others = schema.get("items", True)
        if others is False:
            most = len(prefix) if most < 0 else min(most, len(prefix))
        if most == 0:
            return '"[]"'
        rest = ""
        if most < 0 or most > len(prefix):
            item = self._value(others)
            counts = max(least - len(prefix), 0), most - len(prefix) if most > 0 else -1
            rest = _repeated(item, *counts, is_behind=bool(prefix))
        for place in reversed(range(len(prefix))):
            rest = " ".join(filter(None, ('","' if place else "", prefix[place], rest)))
            rest = f"({rest})" if place < least else f"({rest})?"
        return f'("[" {rest} "]")'

    def _object(self, rule: str, schema: Mapping[str, Any]) -> str:
        if not members(schema) and schema.get("additionalProperties", True) is not False:
            return self._map(rule, [schema.get("additionalProperties", True)])
        patterns = schema.get("patternProperties", {})
        if not members(schema) and patterns:
            self._widen(self._at, "patternProperties")
            return self._map(rule, [one for one in patterns.values() if one is not False])
        return self._properties(rule, schema)

    def _properties(self, rule: str, schema: Mapping[str, Any]) -> str:
        """An object of the properties that its schema names."""
        for keyword in ("minProperties", "maxProperties"):
            if keyword in schema:
                self._widen(self._at, keyword)
        items = [(self._member(member), member.is_required) for member in members(schema)]
        return f'"{{" {_listed(self._rules, rule, items, ",")} "}}"'

    def _member(self, member: Member) -> str:
        key = member.key if _BARE_KEY.fullmatch(member.key) else _spelled(member.key)
        around, self._at = self._at, f"{self._at}/properties/{member.key}"
        value = self._value(member.schema)
        self._at = around
        return self._rules.add(self._named(), self._rules.spelled(f"{key}:"), value)

    def _map(self, rule: str, values: Sequence[Any]) -> str:
        """An object of any keys, and one of these values behind each."""
        value = f"({' | '.join(self._value(one) for one in values)})"
        pair = self._rules.add(rule, "/[A-Za-z_][A-Za-z0-9_]{0,63}/", '":"', value)
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _anything(self) -> str:
        """The rule of a value of any kind, which is the same for all of the tool's."""
        if not self._anything_rule:
            self._anything_rule = rule = self._named()
            kinds = ("string", "number", "boolean", "null", "array", "object")
            self._rules.add(rule, " | ".join(self._leaf(Leaf(kind, {"type": kind})) for kind in kinds))
        return self._anything_rule


def _repeated(item: str, least: int, most: int, *, is_behind: bool) -> str:
    """So many items, most -1: any number, with a comma before each, but for the first where nothing is in front."""
    if is_behind:
        return f'("," {item}){{{least},{most if most >= 0 else ""}}}'
    more = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{most - 1 if most > 0 else ""}}}'
    return f"({item} {more})" if least else f"({item} {more})?"


def _spelled(value: Any) -> str:
    """A value in Gemma's spelling. Raises ConfigError for a string that holds its quotes."""
    match value:
        case str():
            if _QUOTE in value:
                raise ConfigError(f"the value {value[:64]!r} holds quotes of this format")
            return f"{_QUOTE}{value}{_QUOTE}"
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case list():
            return f"[{','.join(map(_spelled, value))}]"
        case dict():
            return f"{{{','.join(f'{_spelled(key)}:{_spelled(one)}' for key, one in value.items())}}}"
    return str(value)
