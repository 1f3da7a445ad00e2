"""Parses calls whose parameters stand between own tags.

    Qwen3-Coder, Qwen3.5       <function=f><parameter=key>; <tool_call> around it is forgotten now and then
    MiniMax-M2                 <invoke name="f"><parameter name="key">
    DeepSeek-V3.2, V4 (DSML)   the same of special tokens; string="true" marks strings

The tags are those of the formats' shapes. Sources: the chat templates of Qwen/Qwen3-Coder, Qwen/Qwen3.5 and
MiniMaxAI/MiniMax-M2, the guide to tool calls of the latter, and the encoding that comes with DeepSeek-V3.2 and V4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.parameters import ParameterParser, ParameterWriter, ValueTags
from ktransformers.tokenizer.tools.shapes import CallShape

__all__ = ["XmlParser"]

_HEAD = re.compile(r"[^<>\r\n]*")
_NAME = re.compile(r"""\sname\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
_IS_STRING = re.compile(r"""\sstring\s*=\s*["']?(true|false)""")


@dataclass(frozen=True, slots=True)
class _XmlForm:
    """The tags of a section, of each call and of each parameter; the latter's opening ones without what names them.

    They end in "=" where the name follows as it is (`<function=f>`), else it is an attribute (`<invoke name="f">`).
    trims: one line break after a value's opening tag and one before its closing tag belong to the tags.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    call: tuple[str, str]
    parameter: tuple[str, str]
    trims: bool

    @classmethod
    def of(cls, shape: CallShape) -> _XmlForm:
        """The tags of a shape. Of one without a section each call's tags open it, the inner one alone, too."""
        head, _, _ = shape.head.partition("NAME")
        parameter, _, _ = shape.parameter[0].partition("KEY")
        call = head.split("\n")[-1].removesuffix(' name="')
        foot = shape.foot.split()
        return cls(
            opening=(shape.open.strip(),) if shape.open else tuple(head.split()),
            closing=(shape.close or foot[-1],),
            call=(call, foot[0]),
            parameter=(parameter.removesuffix(' name="'), shape.parameter[1].strip()),
            trims=shape.parameter[0].endswith("\n"),
        )

    @property
    def value_tags(self) -> ValueTags:
        """The tags at which values end."""
        calls = tuple(dict.fromkeys((*self.opening, self.call[0])))
        return ValueTags(self.parameter[1], self.parameter[0], (self.call[1], *self.closing), calls)


class XmlParser(ParameterParser):
    """A parser of XML calls. shapes: of one family's versions; they differ in the tags that open them."""

    def __init__(self, shapes: tuple[CallShape, ...], tools: ToolSchemas | None = None):
        self._forms = [_XmlForm.of(shape) for shape in shapes]
        self.opening = tuple(tag for form in self._forms for tag in form.opening)
        self.closing = tuple(tag for form in self._forms for tag in form.closing)
        super().__init__(tools)

    @override
    def calls(self, tag: str) -> Steps[None]:
        form = self._form_of(tag)
        is_open, is_closed = tag == form.call[0], False
        while True:
            if not is_open:
                yield from self.cursor.blanks()
                while is_closed and (yield from self.cursor.match(form.call[1])):  # once more
                    self.keep("")
                    yield from self.cursor.blanks()
                if not (yield from self.cursor.match(form.call[0])):
                    return
            is_open = False
            name, _ = yield from self._head(form.call[0])
            if not name:
                return
            is_closed = yield from self._call(form, name)
            self.keep("")

    def _form_of(self, tag: str) -> _XmlForm:
        return next(form for form in self._forms if tag in (*form.opening, form.call[0]))

    def _head(self, tag: str) -> Steps[tuple[str, bool | None]]:
        """The rest of an opening tag: the name in it, and whether it says that a value is a string."""
        head = yield from self.cursor.word(_HEAD, 2 * NAME_LEN)
        if (yield from self.cursor.match(">")):
            return _named(tag, head)
        char = yield from self.cursor.peek()
        name, _ = _named(tag, head) if tag.endswith("=") and char in ("\r", "\n") else ("", None)
        return (name, None) if name in self.tools or not self._is_call(tag) else ("", None)  # the bracket was forgotten

    def _is_call(self, tag: str) -> bool:
        return any(tag == form.call[0] for form in self._forms)

    @override
    def next_key(self, tag: str) -> Steps[str]:
        read: list[str] = []
        yield from self.cursor.run_of(_HEAD, read.append, 2 * NAME_LEN)
        key, _ = _named(tag, "".join(read))
        if (yield from self.cursor.match(">")):
            read.append(">")
        else:
            key = ""
        self.cursor.put_back("".join(read))
        return key

    @override
    def begins_call(self, tag: str) -> Steps[bool]:
        form, read = self._form_of(tag), list[str]()
        if tag != form.call[0]:
            yield from self.cursor.blanks(read.append)
            if not (yield from self.cursor.match(form.call[0])):
                self.cursor.put_back("".join(read))
                return False
            read.append(form.call[0])
        name = yield from self.next_key(form.call[0])
        self.cursor.put_back("".join(read))
        return bool(name)

    def _call(self, form: _XmlForm, name: str) -> Steps[bool]:
        """The parameters and the closing tag. False: there was none."""
        self.start_call(name)
        writer = ParameterWriter(self, name)
        is_closed, rest = yield from self._parameters(form, writer)
        is_whole = is_closed or not self.cursor.is_cut_here
        writer.close(is_whole)
        self.end_call(is_whole)
        self.say(rest)
        return is_closed

    def _parameters(self, form: _XmlForm, writer: ParameterWriter) -> Steps[tuple[bool, str]]:
        """All of them. Whether the call's closing tag followed; and what is no part of the call. Tags may be doubled.

        What stands between parameters and is none is left out.
        """
        cursor, tags = self.cursor, form.value_tags
        outside = (*form.closing, *tags.calls)
        while True:
            yield from cursor.blanks()
            if (yield from cursor.match(tags.close)):
                continue
            if (yield from cursor.match(form.call[1])):
                return True, ""
            if (yield from cursor.match(tags.parameter)):
                key, is_string = yield from self._head(tags.parameter)
                while key and (yield from self._is_doubled(tags.parameter, key)):
                    pass
                if key and not (yield from writer.read(key, tags, trims=form.trims, is_string=is_string)):
                    return False, ""
                continue
            read: list[str] = []
            found = yield from cursor.find((*tags.all, *form.closing), read.append)
            if found is None or found in outside:
                cursor.put_back(found or "")
                return False, "".join(read)
            cursor.put_back(found)

    def _is_doubled(self, tag: str, key: str) -> Steps[bool]:
        """Whether the opening tag of this parameter follows once more, which is read then."""
        read: list[str] = []
        yield from self.cursor.blanks(read.append)
        if (yield from self.cursor.match(tag)):
            if (yield from self.next_key(tag)) == key:
                yield from self._head(tag)
                return True
            read.append(tag)
        self.cursor.put_back("".join(read))
        return False


def _named(tag: str, head: str) -> tuple[str, bool | None]:
    """What the text between an opening tag's beginning and its bracket says."""
    if tag.endswith("="):
        return head.strip().strip("\"'"), None
    name, kind = _NAME.search(head), _IS_STRING.search(head)
    return next(filter(None, name.groups()), "") if name else "", kind and kind[1] == "true"
