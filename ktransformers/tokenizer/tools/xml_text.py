"""Calls whose parameters stand between tags of their own: what Qwen3-Coder, MiniMax-M2 and DeepSeek's DSML share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN, TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.json_text import escaped
from ktransformers.tokenizer.tools.values import as_json, kinds_of

__all__ = ["ParameterWriter", "XmlForm", "XmlParser"]

_STRING = frozenset({"string"})
_HEAD = re.compile(r"[^<>\r\n]*")
_NAME = re.compile(r"""\sname\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
_IS_STRING = re.compile(r"""\sstring\s*=\s*["']?(true|false)""")


@dataclass(frozen=True, slots=True)
class XmlForm:
    """Tags: of the section, of each call, of each parameter; the latter's opening ones without what names them.

    They end in "=" where the name follows as it is (`<function=f>`), else it is an attribute (`<invoke name="f">`).
    trims: one line break after a value's opening tag and one before its closing tag belong to the tags.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    call: tuple[str, str]
    parameter: tuple[str, str]
    trims: bool = False


class ParameterWriter:
    """Writes parameters as members of a JSON object: strings as they come, other values when they are complete."""

    def __init__(self, parser: TaggedParser, name: str):
        self._parser, self._name = parser, name
        self._before = "{"

    def read(self, key: str, tag: str, *, trims: bool = False, is_string: bool | None = None) -> Steps[bool]:
        """The value up to `tag`. is_string: None when the schema has to say it. False: the text ends inside."""
        parser, cursor = self._parser, self._parser.cursor
        kinds = _STRING if is_string else kinds_of(parser.tools, self._name, key)
        if is_string is False:
            kinds -= _STRING
        parser.argue(f'{self._before}"{escaped(key)}": ')
        self._before = ", "
        if trims and not (yield from cursor.match("\r\n")):
            yield from cursor.match("\n")
        tags = (f"\n{tag}", tag) if trims else (tag,)
        if kinds == _STRING:
            parser.argue('"')
            found = yield from cursor.find(tags, lambda piece: parser.argue(escaped(piece)))
            if found is not None:
                parser.argue('"')
            return found is not None
        parts: list[str] = []
        found = yield from cursor.find(tags, parts.append)
        if found is not None:
            parser.argue(as_json("".join(parts), kinds))
        return found is not None

    def close(self) -> None:
        """There are no more."""
        self._parser.argue("{}" if self._before == "{" else "}")


class XmlParser(TaggedParser):
    """forms: of one family's versions; they differ in the tags that open them."""

    forms: tuple[XmlForm, ...]

    def __init_subclass__(cls) -> None:
        cls.opening = tuple(tag for form in cls.forms for tag in form.opening)
        cls.closing = tuple(tag for form in cls.forms for tag in form.closing)

    @override
    def calls(self, tag: str) -> Steps[None]:
        form = next(form for form in self.forms if tag in form.opening)
        is_open = tag == form.call[0]
        while True:
            if not is_open:
                yield from self.cursor.blanks()
                if not (yield from self.cursor.match(form.call[0])):
                    return
            is_open = False
            name, _ = yield from self._head(form.call[0])
            if not name or not (yield from self._call(form, name)):
                return
            self.keep("")

    def _head(self, tag: str) -> Steps[tuple[str, bool | None]]:
        """The rest of an opening tag: the name in it, and whether it says that a value is a string."""
        head = yield from self.cursor.word(_HEAD, 2 * NAME_LEN)
        if not (yield from self.cursor.match(">")):
            return "", None
        if tag.endswith("="):
            return head.strip().strip("\"'"), None
        name, kind = _NAME.search(head), _IS_STRING.search(head)
        return next(filter(None, name.groups()), "") if name else "", kind and kind[1] == "true"

    def _call(self, form: XmlForm, name: str) -> Steps[bool]:
        """The parameters and the closing tag. False: it broke off."""
        self.start_call(name)
        writer, parameter = ParameterWriter(self, name), form.parameter
        is_whole = False
        while True:
            yield from self.cursor.blanks()
            if not (yield from self.cursor.match(parameter[0])):
                is_whole = yield from self.cursor.match(form.call[1])
                break
            key, is_string = yield from self._head(parameter[0])
            if not key:
                break
            if not (yield from writer.read(key, parameter[1], trims=form.trims, is_string=is_string)):
                self.end_call()
                return False
        writer.close()
        self.end_call()
        return is_whole
