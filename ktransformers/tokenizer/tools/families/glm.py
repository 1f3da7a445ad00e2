"""GLM-4.5 to 5: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.

Source: the chat templates of zai-org/GLM-4.5, 4.6 (a line for each tag), 4.7 and 5 (no line breaks).
"""

from __future__ import annotations

import re

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.parameters import ParameterParser, ParameterWriter, ValueTags

__all__ = ["GlmParser"]

_NAME = re.compile(r"[^\s<>{}\"]*")
_KEY = re.compile(r"[^<>\r\n]*")
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY_TAG, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_TAGS = ValueTags(_VALUE_END, _KEY_TAG, (_CALL_END,), (_CALL,))


class GlmParser(ParameterParser):
    """A parser of GLM's calls: strings stand as they are, other values as JSON; the schema tells which is which."""

    opening = (_CALL,)
    closing = (_CALL_END,)

    @override
    def calls(self, tag: str) -> Steps[None]:
        yield from self.cursor.blanks()
        name = yield from self.cursor.word(_NAME, NAME_LEN)
        if not name or (yield from self.cursor.blanks()) != "<":
            return
        if (yield from self.cursor.match(_CALL_END)):
            self.start_call(name)
            ParameterWriter(self, name).close(is_whole=True)
            self.end_call(is_whole=True)
        elif (yield from self.cursor.match(_KEY_TAG)):
            self.cursor.kept = None
            self.start_call(name)
            self.cursor.put_back(_KEY_TAG)
            writer = ParameterWriter(self, name)
            is_closed = yield from self._parameters(writer)
            is_whole = is_closed or not self.cursor.is_cut_here
            writer.close(is_whole)
            self.end_call(is_whole)

    def _parameters(self, writer: ParameterWriter) -> Steps[bool]:
        """Whether the call's closing tag follows. Tags may be doubled, and those around a value missing."""
        cursor = self.cursor
        while True:
            yield from cursor.blanks()
            if (yield from cursor.match(_VALUE_END)) or (yield from cursor.match(_KEY_END)):
                continue
            if not (yield from cursor.match(_KEY_TAG)):
                is_closed = yield from cursor.match(_CALL_END)
                cursor.put_back(_CALL_END if is_closed else "")
                return is_closed
            key = (yield from cursor.word(_KEY, NAME_LEN)).strip()
            yield from self._to_value()
            is_cut = cursor.is_cut_here  # before there was a value
            if key and not is_cut and not (yield from writer.read(key, _TAGS)):
                return False

    def _to_value(self) -> Steps[None]:
        """Past the tags in front of a value."""
        while True:
            read: list[str] = []
            yield from self.cursor.blanks(read.append)
            if not (yield from self.cursor.match(_VALUE)) and not (yield from self.cursor.match(_KEY_END)):
                if not self.cursor.is_cut_here:
                    self.cursor.put_back("".join(read))
                return

    @override
    def next_key(self, tag: str) -> Steps[str]:
        read: list[str] = []
        yield from self.cursor.run_of(_KEY, read.append, NAME_LEN)
        key = "".join(read).strip()
        is_closed = yield from self.cursor.match(_KEY_END)
        self.cursor.put_back("".join(read) + (_KEY_END if is_closed else ""))
        return key if is_closed else ""

    @override
    def begins_call(self, tag: str) -> Steps[bool]:
        read: list[str] = []
        yield from self.cursor.blanks(read.append)
        num_chars = yield from self.cursor.run_of(_NAME, read.append, NAME_LEN)
        char = yield from self.cursor.blanks(read.append)
        self.cursor.put_back("".join(read))
        return bool(num_chars) and char == "<"
