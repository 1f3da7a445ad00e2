"""GLM-4.5 to 5: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.

Source: the chat templates of zai-org/GLM-4.5, 4.6 (a line for each tag), 4.7 and 5 (no line breaks).
"""

from __future__ import annotations

import re

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN, TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.xml_text import ParameterWriter

__all__ = ["GlmParser"]

_NAME = re.compile(r"[^\s<>{}\"]*")
_KEY = re.compile(r"[^<>\r\n]*")


class GlmParser(TaggedParser):
    """Strings stand there as they are, other values as JSON; the schema tells which is which."""

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)

    @override
    def calls(self, tag: str) -> Steps[None]:
        yield from self.cursor.blanks()
        name = yield from self.cursor.word(_NAME, NAME_LEN)
        if not name or (yield from self.cursor.blanks()) != "<":
            return
        if (yield from self.cursor.match("</tool_call>")):
            self.start_call(name)
            ParameterWriter(self, name).close()
            self.end_call()
        elif (yield from self.cursor.match("<arg_key>")):
            self.start_call(name)
            yield from self._parameters(ParameterWriter(self, name))
            self.end_call()

    def _parameters(self, writer: ParameterWriter) -> Steps[None]:
        cursor = self.cursor
        while True:
            key = (yield from cursor.word(_KEY, NAME_LEN)).strip()
            if not key or not (yield from cursor.match("</arg_key>")):
                break
            yield from cursor.blanks()
            if not (yield from cursor.match("<arg_value>")):
                break
            if not (yield from writer.read(key, "</arg_value>")):
                return
            yield from cursor.blanks()
            if not (yield from cursor.match("<arg_key>")):
                break
        writer.close()
