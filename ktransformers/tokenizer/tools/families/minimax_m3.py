"""MiniMax-M3: XML whose tags stand behind a token of their own, and are named as the parameters are.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<key>value]<]minimax[>[</key>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Objects are tags within tags, lists are `<item>`s. Source: the chat template of MiniMaxAI/MiniMax-M3. Where a closing
tag was forgotten, values end as those of other families do (parameters.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
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
_NESTED = frozenset({"object", "array"})
_CALL, _CALL_END, _SECTION, _SECTION_END = '<invoke name="', "</invoke>", "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class _Node:
    """What stands between two tags: text, or elements."""

    key: str
    text: list[str] = field(default_factory=list)
    inner: list[_Node] = field(default_factory=list)


class MiniMaxM3Parser(TaggedParser):
    """A parser of MiniMax-M3's calls: strings are passed on as they come, other values when they are complete."""

    opening = (f"{_MARK}{_SECTION}", f"{_MARK}{_CALL}")
    closing = (f"{_MARK}{_SECTION_END}",)

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
        root, keys = self.tools.get(name), set[str]()
        while True:
            yield from self.cursor.blanks()
            if not (yield from self.cursor.match(_MARK)):
                break
            if (yield from self.cursor.match(_CALL_END)):
                self.argue("}" if keys else "{}")
                return True
            if (yield from self._call_ends()):
                self.cursor.put_back(_MARK)
                break
            key = yield from self._tag()
            if not key:
                break
            self.argue(f'{", " if keys else "{"}"{escaped(key)}": ')
            keys.add(key)
            schema = _member(root, root, key)
            if not (yield from self._parameter(key, schema, root, keys)):
                return False
        is_whole = not self.cursor.is_cut_here  # the closing tag was forgotten
        if is_whole:
            self.argue("}" if keys else "{}")
        elif not keys:
            self.argue("{")
        return is_whole

    def _follows(self, tag: str) -> Steps[bool]:
        """Whether the text goes on with this tag, which stays."""
        found = yield from self.cursor.match(tag)
        self.cursor.put_back(tag if found else "")
        return found

    def _tag(self) -> Steps[str]:
        """The name in an opening tag behind its mark; "" when there is none."""
        if not (yield from self.cursor.match("<")):
            return ""
        key = yield from self.cursor.word(_KEY, NAME_LEN)
        return key if (yield from self.cursor.match(">")) and not key.startswith("/") else ""

    def _parameter(self, key: str, schema: Any, root: Any, keys: Set[str]) -> Steps[bool]:
        """The value behind its opening tag, with the closing one. keys: of the parameters so far."""
        kinds = kinds_in(schema, root)
        if kinds == _STRING:
            self.argue('"')
            is_whole = yield from self._string(key, root, keys)
            if is_whole:
                self.argue('"')
            return is_whole
        node = _Node(key)
        may_end = (lambda: self._next_begins(root, keys)) if kinds and not kinds & _NESTED else self._never
        if not (yield from self._elements(node, may_end)):
            return False
        self.argue(_as_json(node, schema, root))
        return True

    def _string(self, key: str, root: Any, keys: Set[str]) -> Steps[bool]:
        """A text up to its end. False: the answer was cut inside."""
        cursor, end = self.cursor, f"</{key}>"
        while True:
            if (yield from cursor.find((_MARK,), lambda text: self.argue(escaped(text)), drops_begun=1)) is None:
                return not cursor.is_cut
            if (yield from cursor.match(end)):
                return True
            ends_call = yield from self._call_ends()
            if (ends_call and not (yield from self._goes_on(end))) or (yield from self._next_begins(root, keys)):
                cursor.put_back(_MARK)
                return True
            if cursor.is_cut_here:  # inside of a tag
                return False
            self.argue(escaped(_MARK))

    def _call_ends(self) -> Steps[bool]:
        """Whether a tag follows, behind its mark, that ends the call or begins another one. It stays."""
        for tag in (_CALL_END, _SECTION_END, _CALL):
            if (yield from self._follows(tag)):
                return True
        if not (yield from self.cursor.match(_SECTION)):
            return False
        read = [_SECTION]  # a parameter may have this name
        yield from self.cursor.blanks(read.append)
        has_call = yield from self.cursor.match(f"{_MARK}{_CALL}")
        if has_call or not self.cursor.is_cut_here:
            self.cursor.put_back("".join(read) + (f"{_MARK}{_CALL}" if has_call else ""))
        return has_call

    def _goes_on(self, end: str) -> Steps[bool]:
        """Whether the value's closing tag comes before the next call. Puts back what it reads."""
        read: list[str] = []
        found = yield from self.cursor.find((f"{_MARK}{end}", f"{_MARK}{_CALL}"), read.append)
        self.cursor.put_back("".join(read) + (found or ""))
        return found == f"{_MARK}{end}"

    def _next_begins(self, root: Any, keys: Set[str]) -> Steps[bool]:
        """Whether the opening tag of a parameter follows that the tool has and that was not written. It stays."""
        if not (yield from self.cursor.match("<")):
            return False
        read = ["<"]
        yield from self.cursor.run_of(_KEY, read.append, NAME_LEN)
        key = "".join(read[1:])
        is_closed = yield from self.cursor.match(">")
        if not is_closed and self.cursor.is_cut_here:
            return False
        self.cursor.put_back("".join(read) + (">" if is_closed else ""))
        return is_closed and key not in keys and any(key in one.get("properties", {}) for one in _options(root, root))

    def _never(self) -> Steps[bool]:
        yield from ()
        return False

    def _elements(self, outer: _Node, may_end: Callable[[], Steps[bool]]) -> Steps[bool]:
        """Everything up to the closing tag of `outer`. False: the text is cut, or nested too deeply.

        may_end: whether the value ends in front of what follows.
        """
        stack, cursor = [outer], self.cursor
        while stack:
            node = stack[-1]
            if (yield from cursor.find((_MARK,), node.text.append)) is None:
                return not cursor.is_cut
            if (yield from cursor.match(f"</{node.key}>")):
                stack.pop()
                continue
            if cursor.is_cut_here:
                return False
            if (yield from self._call_ends()) or (yield from may_end()):
                cursor.put_back(_MARK)
                return True
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
