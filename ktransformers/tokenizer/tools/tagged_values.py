"""Grammars of arguments that stand between tags, one by one: strings as they are, other values as JSON.

What a text means there, parsers take from the schema (values.py), so a string that they would read as another kind of
value must not be written. A string within a list or an object may still hold the closing tag, which then ends the value
early: no grammar of JSON can forbid that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.lark import ANY_TEXT, LarkRules, regex, text_of, union
from ktransformers.tokenizer.tools.schema_parts import Leaf, Member, alternatives
from ktransformers.tokenizer.tools.shapes import CallShape
from ktransformers.tokenizer.tools.spelled_values import Widen
from ktransformers.tokenizer.tools.values import as_json, kinds_of

__all__ = ["TaggedValues"]

_BLANK = "[\\s\\x1c-\\x1f]*"
_NUMBER = "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?"
_READ_AS: dict[str, str] = {
    "integer": f"{_BLANK}{_NUMBER}{_BLANK}",
    "number": f"{_BLANK}{_NUMBER}{_BLANK}",
    "boolean": f"{_BLANK}(true|false|True|False){_BLANK}",
    "null": f"{_BLANK}(null|None){_BLANK}",
    "object": f"{_BLANK}\\{{(.|\\n)*",
    "array": f"{_BLANK}\\[(.|\\n)*",
}
"""Texts that are values of a kind, if the schema allows it, or may be: brackets are not counted here."""
_PLAIN: dict[str, str] = {
    "integer": "-?(0|[1-9][0-9]{0,30})",
    "number": "-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?([eE][-+]?[0-9]{1,2})?",
    "boolean": "true|false",
    "null": "null",
}
_KEY = re.compile(r"[^\s<>\"'](?:[^<>\"'\r\n]*[^\s<>\"'])?")
_PARTS = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)


class TaggedValues:
    """Writes the rules of parameters between tags, as the shape spells them."""

    def __init__(self, rules: LarkRules, tools: ToolSchemas, shape: CallShape, widen: Widen):
        self._rules, self._tools, self._kinds, self._widen = rules, tools, shape.kinds, widen
        self._head, self._after = shape.parameter
        self._says_kind = "KIND" in self._head
        self._set_key("")

    def _set_key(self, key: str) -> None:
        """From here on rules are about this parameter."""
        found = _PARTS.fullmatch(self._after.replace("KEY", key))
        assert found is not None
        self._before, self._stop, self._rest = found.groups()

    def write(self, rule: str, tool: str, member: Member, root: Any) -> str:
        """Add the rule of one parameter, head and closing tag included; return its name. Raises ConfigError."""
        if not _KEY.fullmatch(member.key):
            raise ConfigError(f"the parameter {member.key[:64]!r} of {tool[:64]!r} has a name that tags cannot hold")
        self._set_key(member.key)
        try:
            options = self._options(rule, tool, member, root)
        except ConfigError as error:
            raise ConfigError(f"the parameter {member.key[:64]!r} of {tool[:64]!r}: {error}") from error
        return self._rules.add(rule, " | ".join(options))

    def _options(self, rule: str, tool: str, member: Member, root: Any) -> list[str]:
        kinds = kinds_of(self._tools, tool, member.key)
        only = self._word(kinds)
        if kinds and "string" not in kinds and only:  # llguidance follows more than we do
            return [self._as_json(rule, member, member.schema, root, only)]
        leaves = alternatives(member.schema, root)
        if any(not leaf.kind for leaf in leaves):
            return [self._as_text(rule, member, ANY_TEXT)]
        texts, others = [leaf for leaf in leaves if leaf.kind == "string"], _Others(leaves)
        if self._says_kind:
            content, rest = union([self._text_of(leaf, member) for leaf in texts]), others.all
        else:
            content, rest = self._beside(member, texts, others, kinds), others.spelled_apart
        options = [self._as_text(rule, member, content)] if content else []
        groups: dict[str, list[Leaf]] = {}
        for leaf in rest:
            groups.setdefault(self._word({leaf.kind}), []).append(leaf)
        for number, (word, some) in enumerate(groups.items()):
            name = f"{rule}_{number}" if number else rule
            options.append(self._as_json(name, member, {"anyOf": [leaf.schema for leaf in some]}, root, word))
        return options

    def _word(self, kinds: Collection[str]) -> str:
        """What stands for KIND where values have one of these types, none a string; "" when there is no such word."""
        words = {self._kinds.get(kind, "false") for kind in kinds}
        return words.pop() if len(words) == 1 else ""

    def _beside(self, member: Member, texts: list[Leaf], others: _Others, kinds: frozenset[str]) -> str:
        """What may be written without quotes: strings that are read as such, and values of one word."""
        # Of a parameter that its schema tells no types of, parsers read whatever JSON there is.
        barred = {_READ_AS[kind] for kind in kinds or _READ_AS if kind in _READ_AS}
        if any(leaf.kind in ("integer", "number") for leaf in others.spelled_apart):
            barred.add(f"{_BLANK}[-0-9](.|\\n)*")  # the first character tells which of the two it is
        found = []
        for leaf in texts:
            if leaf.values is not None:
                leaf = Leaf("string", leaf.schema, _readable(leaf.values, kinds))
            found.append(" & ".join([f"({self._text_of(leaf, member)})", *(f"~/{one}/" for one in sorted(barred))]))
        for leaf in others.words:
            words = leaf.values
            spelled = _PLAIN[leaf.kind] if words is None else "|".join(regex(json.dumps(word)) for word in words)
            found.append(f"/({spelled})/")
        return union(found)

    def _text_of(self, leaf: Leaf, member: Member) -> str:
        return text_of(leaf, lambda keyword: self._widen(f"#/properties/{member.key}", keyword))

    def _as_text(self, rule: str, member: Member, content: str) -> str:
        text = self._rules.text(
            f"{rule}_string", f"{rule.upper()}_STRING", content, before=self._before, stop=self._stop
        )
        return " ".join(
            filter(
                None,
                (
                    self._spelled_head(member.key, self._kinds.get("string", "true")),
                    text,
                    self._rules.spelled(self._rest),
                ),
            )
        )

    def _as_json(self, rule: str, member: Member, schema: Any, root: Any, word: str) -> str:
        value = self._rules.json(f"{rule}_value", schema, root)
        after = self._rules.spelled(self._before + self._stop + self._rest)
        return f"{self._spelled_head(member.key, word)} {value} {after}"

    def _spelled_head(self, key: str, word: str) -> str:
        return self._rules.spelled(self._head.replace("KIND", word).replace("KEY", key))


class _Others:
    """Leaves that are no strings. words: those that are one word each. spelled_apart: those that need a grammar."""

    def __init__(self, leaves: list[Leaf]):
        self.all = [leaf for leaf in leaves if leaf.kind != "string"]
        self.words = [leaf for leaf in self.all if leaf.kind in _PLAIN and not leaf.has_bounds]
        self.spelled_apart = [leaf for leaf in self.all if leaf.kind not in _PLAIN or leaf.has_bounds]


def _readable(values: tuple[Any, ...], kinds: frozenset[str]) -> tuple[Any, ...]:
    """Strings that parsers do not take for another value."""
    read = tuple(value for value in values if kinds == {"string"} or json.loads(as_json(value, kinds)) == value)
    if not read:
        raise ConfigError("its strings look like other values that it may have")
    return read
