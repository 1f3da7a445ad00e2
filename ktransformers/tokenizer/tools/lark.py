"""Collects the rules of a grammar in llguidance's Lark; and texts up to the tag behind them.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md: `%json` is a JSON schema, `<[id]>` a special
token, which no text can match; names of terminals, which are regular expressions, are upper case.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.schemas import JSON_OPTIONS
from ktransformers.tokenizer.tools.schema_parts import Leaf

__all__ = ["ANY_TEXT", "LarkRules", "literal", "regex", "text_of", "union"]

ANY_TEXT = "/(.|\\n)*/"
_MAX_RULES = 20_000


def literal(text: str) -> str:
    """Return `text` as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """Return `text` escaped for a regular expression between slashes."""
    return re.sub(r"[\\/.*+?()\[\]{}|^$#&~-]", lambda found: "\\" + found[0], text).replace("\n", "\\n")


class LarkRules:
    """The rules of a grammar so far. ids: of the tags that are special tokens; other tags are text."""

    def __init__(self, ids: Mapping[str, int]):
        self.ids, self.lines = ids, list[str]()

    def add(self, name: str, *parts: str, option: str = "") -> str:
        """Add a rule of those parts that are not empty. Returns its name."""
        if len(self.lines) >= _MAX_RULES:
            raise ConfigError("the tools have too many parameters to force a call of one")
        self.lines.append(f"{name}{option}: {' '.join(filter(None, parts)) or literal('')}")
        return name

    def json(self, name: str, schema: Any, root: Any) -> str:
        """Add a rule for a value of this part of the core schema `root`, written as JSON. Returns its name."""
        shared = _shared(schema, root)
        whole = {**(schema if isinstance(schema, Mapping) else {}), **({"$defs": shared} if shared else {})}
        return self.add(name, f"%json {json.dumps({**whole, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}")

    def spelled(self, text: str) -> str:
        """Return an expression for a fixed text, which may hold tags."""
        return " ".join(f"<[{self.ids[part]}]>" if part in self.ids else literal(part) for part in self._parts(text))

    def _parts(self, text: str) -> list[str]:
        """The special tokens in a text and what stands between them."""
        if not self.ids:
            return [text] if text else []
        marks = "|".join(re.escape(tag) for tag in sorted(self.ids, key=len, reverse=True))
        return [part for part in re.split(f"({marks})", text) if part]

    def text(self, name: str, terminal: str, content: str, *, before: str = "", stop: str) -> str:
        """Add a rule for a text that `content` (an expression of terminals) matches, `before`, and the tag `stop`.

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


def _shared(schema: Any, root: Any) -> dict[str, Any]:
    """What of the root's $defs a part of it leads to."""
    defs = root.get("$defs", {}) if isinstance(root, Mapping) else {}
    found: dict[str, Any] = {}
    waiting = [schema] if defs else []
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            name = str(one.get("$ref", "")).removeprefix("#/$defs/")
            if name in defs and name not in found:
                found[name] = defs[name]
                waiting.append(defs[name])
            waiting += [inner for key, inner in one.items() if key != "$defs"]
        elif isinstance(one, list):
            waiting += one
    return found


def text_of(leaf: Leaf, widen: Callable[[str], None]) -> str:
    """Return an expression of terminals for a leaf's strings. widen: told of a keyword that cannot be followed."""
    if leaf.values is not None:
        return f"/({'|'.join(regex(str(value)) for value in leaf.values)})/"
    schema, terms = leaf.schema, list[str]()
    least, most = schema.get("minLength", 0), schema.get("maxLength", -1)
    if least > 0 or most >= 0:
        terms.append(f"/(.|\\n){{{max(least, 0)},{most if most >= 0 else ''}}}/")
    for pattern in (schema.get("pattern"), *(one["pattern"] for one in schema.get("allOf", ()))):
        term = None if pattern is None else _followed(pattern)
        if term is not None:
            terms.append(term)
        elif pattern is not None:
            widen("pattern")
    return " & ".join(terms or [ANY_TEXT])


@functools.lru_cache(maxsize=1024)
def _followed(pattern: str) -> str | None:
    """A terminal for all texts in which `pattern` is found; None: there is none."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        term = "/" + "|".join(_searched(branch) for branch in _branches(pattern)) + "/"
        grammar = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {term}")
        said = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(verbose_errors=False))
    except ValueError:
        return None
    return None if said else term


def _searched(branch: str) -> str:
    """A regular expression for all texts in which `branch` is found, which has no bar outside of parentheses."""
    from llguidance import regex_to_lark

    body = branch.removeprefix("^")
    is_begun = body != branch
    is_ended = re.search(r"(?<!\\)(\\\\)*\$\Z", body) is not None
    body = body[:-1] if is_ended else body
    inner = regex_to_lark(body, "dw")  # both are of ASCII, as in ECMAScript
    anything = "(.|\\n)*"
    return f"{'' if is_begun else anything}({inner}){'' if is_ended else anything}"


def _branches(pattern: str) -> list[str]:
    """The alternatives of a regular expression: what stands between bars outside of parentheses."""
    found, start, depth, opened = list[str](), 0, 0, 0
    is_whole = pattern.startswith("(")  # one pair of parentheses around all
    for token in _TOKENS.finditer(pattern):
        if token[0] == "|" and not depth:
            found.append(pattern[start : token.start()])
            start = token.end()
        depth += (token[0] == "(") - (token[0] == ")")
        opened += not depth
        is_whole = is_whole and (depth > 0 or token.end() == len(pattern))
    found.append(pattern[start:])
    if is_whole and opened == 1 and (inner := _GROUP.match(pattern)):
        return _branches(pattern[inner.end() : -1])
    return [one for branch in found for one in _branches(branch)] if len(found) > 1 else found


_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_GROUP = re.compile(r"\((?:\?:|\?<\w+>|(?!\?))")


def union(expressions: Sequence[str]) -> str:
    """Return an expression for what any of these expressions matches."""
    return " | ".join(f"({one})" for one in expressions)
