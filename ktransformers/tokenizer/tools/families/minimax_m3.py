"""MiniMax-M3: XML whose tags stand behind a token of their own, and are named as the parameters are.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<key>value]<]minimax[>[</key>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Objects are tags within tags, lists are `<item>`s. Source: the chat template of MiniMaxAI/MiniMax-M3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tools.base import NAME_LEN, TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.json_text import escaped
from ktransformers.tokenizer.tools.schema_parts import resolved
from ktransformers.tokenizer.tools.values import as_json, kinds_in

__all__ = ["MiniMaxM3Parser"]

_MARK = "]<]minimax[>["
_NAME = re.compile(r"[^<>\"\r\n]*")
_KEY = re.compile(r"[^<>\r\n]*")
_MAX_DEPTH = 64
_STRING = frozenset({"string"})


@dataclass(slots=True)
class _Node:
    """What stands between two tags: text, or elements."""

    key: str
    text: list[str] = field(default_factory=list)
    inner: list[_Node] = field(default_factory=list)


class MiniMaxM3Parser(TaggedParser):
    """Strings are told as they come; whatever else a parameter may be, when it is complete."""

    opening = (f"{_MARK}<tool_call>", f'{_MARK}<invoke name="')
    closing = (f"{_MARK}</tool_call>",)

    @override
    def calls(self, tag: str) -> Steps[None]:
        is_open = tag == self.opening[1]
        while True:
            if not is_open:
                yield from self.cursor.blanks()
                if not (yield from self.cursor.match(self.opening[1])):
                    return
            is_open = False
            name = yield from self.cursor.word(_NAME, NAME_LEN)
            if not name or not (yield from self.cursor.match('">')):
                return
            self.start_call(name)
            is_whole = yield from self._parameters(name)
            self.end_call(is_whole)
            if not is_whole:
                return
            self.keep("")

    def _parameters(self, name: str) -> Steps[bool]:
        """All of a call's, and its closing tag."""
        root, before = self.tools.get(name), "{"
        while True:
            yield from self.cursor.blanks()
            if not (yield from self.cursor.match(_MARK)):
                break
            if (yield from self.cursor.match("</invoke>")):
                self.argue("{}" if before == "{" else "}")
                return True
            key = yield from self._tag()
            if not key:
                break
            self.argue(f'{before}"{escaped(key)}": ')
            before = ", "
            schema = _member(root, root, key)
            if not (yield from self._parameter(key, schema, root)):
                return False
        is_whole = not self.cursor.is_cut_here  # the closing tag was forgotten
        if is_whole:
            self.argue("{}" if before == "{" else "}")
        elif before == "{":
            self.argue("{")
        return is_whole

    def _tag(self) -> Steps[str]:
        """The name in an opening tag behind its mark; "" when there is none."""
        if not (yield from self.cursor.match("<")):
            return ""
        key = yield from self.cursor.word(_KEY, NAME_LEN)
        return key if (yield from self.cursor.match(">")) and not key.startswith("/") else ""

    def _parameter(self, key: str, schema: Any, root: Any) -> Steps[bool]:
        """The value behind its opening tag, with the closing one."""
        if kinds_in(schema, root) == _STRING:
            self.argue('"')
            end = f"{_MARK}</{key}>"
            found = yield from self.cursor.find((end,), lambda text: self.argue(escaped(text)), drops_begun=1)
            if found is not None:
                self.argue('"')
            return found is not None
        node = _Node(key)
        if not (yield from self._elements(node)):
            return False
        self.argue(_as_json(node, schema, root))
        return True

    def _elements(self, outer: _Node) -> Steps[bool]:
        """Everything up to the closing tag of `outer`. False: the text breaks off, or is nested too deeply."""
        stack = [outer]
        while stack:
            node = stack[-1]
            if (yield from self.cursor.find((_MARK,), node.text.append)) is None:
                return False
            if (yield from self.cursor.match(f"</{node.key}>")):
                stack.pop()
                continue
            key = yield from self._tag()
            if not key or len(stack) > _MAX_DEPTH:
                return False
            node.inner.append(_Node(key))
            stack.append(node.inner[-1])
        return True


def _member(schema: Any, root: Any, key: str) -> Any:
    """The schema of one property of an object, {} when nobody says."""
    for one in _options(schema, root):
        for found in (one.get("properties", {}), {key: one.get("additionalProperties")}):
            if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
                return found[key]
    return {}


def _items(schema: Any, root: Any) -> Any:
    return next((one["items"] for one in _options(schema, root) if isinstance(one.get("items"), Mapping)), {})


def _options(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """What a schema may stand for, one level of alternatives deep."""
    try:
        found = resolved(schema or {}, root)
        others = [one for name in ("anyOf", "oneOf") for one in found.get(name) or ()]
        return [found, *(resolved(one, root) for one in others)]
    except ConfigError:  # a schema that leads nowhere says nothing
        return []


def _as_json(node: _Node, schema: Any, root: Any) -> str:
    kinds, text = kinds_in(schema, root), "".join(node.text)
    if not node.inner:
        if not text.strip() and "string" not in kinds:  # the template writes nothing for these
            for kind, empty in (("array", "[]"), ("object", "{}"), ("null", "null")):
                if kind in kinds:
                    return empty
        return as_json(text, kinds)
    is_list = "array" in kinds or ("object" not in kinds and all(one.key == "item" for one in node.inner))
    if is_list:
        items = _items(schema, root)
        return f"[{', '.join(_as_json(one, items, root) for one in node.inner)}]"
    members = {one.key: _as_json(one, _member(schema, root, one.key), root) for one in node.inner}
    return f"{{{', '.join(f'{json.dumps(key, ensure_ascii=False)}: {value}' for key, value in members.items())}}}"
