"""Rules of a grammar in llguidance's Lark, while they are collected; and texts up to the tag behind them.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md: `%json` is a JSON schema, `<[id]>` a special
token, which no text can match; names of terminals, which are regular expressions, are upper case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.grammars import JSON_OPTIONS, check_schema
from ktransformers.tokenizer.tools.schema_parts import Leaf, count_of

__all__ = ["ANY_TEXT", "Rules", "literal", "regex", "text_of", "union"]

ANY_TEXT = "/(.|\\n)*/"
_MAX_RULES = 20_000
_SHARED = ("$defs", "definitions")
"""Where a schema keeps what its parts refer to."""


def literal(text: str) -> str:
    """`text` as it is."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """`text` inside of a regular expression between slashes."""
    return re.sub(r"[\\/.*+?()\[\]{}|^$#&~-]", lambda found: "\\" + found[0], text).replace("\n", "\\n")


class Rules:
    """The rules so far. ids: of the tags that are special tokens; other tags are text."""

    def __init__(self, ids: Mapping[str, int]):
        self.ids, self.lines = ids, list[str]()

    def add(self, name: str, *parts: str, option: str = "") -> str:
        """One more rule, of what is not empty of these parts. Its name."""
        if len(self.lines) >= _MAX_RULES:
            raise ConfigError("the tools have too many parameters to force a call of one")
        self.lines.append(f"{name}{option}: {' '.join(filter(None, parts)) or literal('')}")
        return name

    def json(self, name: str, schema: Any, root: Any) -> str:
        """A rule for a value of this part of `root`, written as JSON."""
        shared = {key: root[key] for key in _SHARED if isinstance(root, Mapping) and key in root}
        whole = {**(schema if isinstance(schema, Mapping) else {}), **shared}
        check_schema(whole)
        return self.add(name, f"%json {json.dumps({**whole, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}")

    def spelled(self, text: str) -> str:
        """A fixed text, which may hold tags."""
        return " ".join(f"<[{self.ids[part]}]>" if part in self.ids else literal(part) for part in self._parts(text))

    def _parts(self, text: str) -> list[str]:
        """The special tokens in a text and what stands between them."""
        if not self.ids:
            return [text] if text else []
        marks = "|".join(re.escape(tag) for tag in sorted(self.ids, key=len, reverse=True))
        return [part for part in re.split(f"({marks})", text) if part]

    def text(self, name: str, terminal: str, content: str, *, before: str = "", stop: str) -> str:
        """A rule for a text that `content` (an expression of terminals) matches, `before`, and the tag `stop`.

        The tag does not come earlier, spelled out neither, because parsers would take it for the end.
        """
        parts = self._parts(stop)
        at = next((at for at, part in enumerate(parts) if part in self.ids), len(parts))
        end, rest = before + "".join(parts[:at]), "".join(parts[at:])
        within = f"({content}) & ~/(.|\\n)*{regex(stop)}(.|\\n)*/"
        self.add(f"{terminal}_WITHIN", within)
        self.add(terminal, f"{terminal}_WITHIN", literal(end) if end else "")
        # A special token ends any text by itself; text that ends it has to be looked for.
        self.add(f"{name}_text", terminal, option="" if rest else "[lazy]")
        return self.add(name, f"{name}_text", self.spelled(rest))


def text_of(leaf: Leaf) -> str:
    """An expression of terminals for a leaf's strings. Raises ConfigError for a pattern that cannot be followed."""
    if leaf.values is not None:
        return f"/({'|'.join(regex(str(value)) for value in leaf.values)})/"
    schema, terms = leaf.schema, list[str]()
    least, most = count_of(schema, "minLength", 0), count_of(schema, "maxLength", -1)
    if least > 0 or most >= 0:
        terms.append(f"/(.|\\n){{{max(least, 0)},{most if most >= 0 else ''}}}/")
    if "pattern" in schema:
        terms.append(f"/{_searched(str(schema['pattern']))}/")
    return " & ".join(terms or [ANY_TEXT])


def _searched(pattern: str) -> str:
    """A regular expression for all texts in which `pattern` is found."""
    from llguidance import regex_to_lark

    body = pattern.removeprefix("^")
    is_ended = re.search(r"(?<!\\)(\\\\)*\$\Z", body) is not None
    body = body[:-1] if is_ended else body
    is_begun = body != pattern and pattern.startswith("^")
    if (is_begun or is_ended) and _has_choice(body):
        raise ConfigError(f"the pattern {pattern[:100]!r}: put what is between ^ and $ in parentheses")
    try:
        inner = regex_to_lark(body, "dw")  # both are of ASCII, as in ECMAScript
    except ValueError as error:
        raise ConfigError(f"the pattern {pattern[:100]!r} cannot be followed: {error}") from error
    anything = "(.|\\n)*"
    return f"{'' if is_begun else anything}({inner}){'' if is_ended else anything}"


def _has_choice(pattern: str) -> bool:
    """Whether a regular expression has a bar outside of all parentheses."""
    bare = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    depth = 0
    for letter in bare:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and not depth:
            return True
    return False


def union(expressions: Sequence[str]) -> str:
    """An expression for what any of these matches."""
    return " | ".join(f"({one})" for one in expressions)
