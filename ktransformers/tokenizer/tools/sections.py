"""Parses calls of JSON arguments between tags, several in a section: what DeepSeek V3, R1, V3.1 and Kimi K2 share."""

from __future__ import annotations

import re
from abc import abstractmethod

from typing_extensions import override

from ktransformers.tokenizer.tools.base import TaggedParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.json_text import JsonReader

__all__ = ["SectionParser"]

NAME = re.compile(r"[^\s<>{}\"|｜]*")
"""What a name can consist of in front of a tag."""


class SectionParser(TaggedParser):
    """A parser of calls in sections.

    opening: the tags of a section and of a call, which counts without its section as well.
    call_open, call_close: around each call.
    """

    call_open: str
    call_close: str

    @override
    def calls(self, tag: str) -> Steps[None]:
        if tag != self.call_open:
            yield from self.cursor.blanks()
            if not (yield from self.cursor.match(self.call_open)):
                return
        while True:
            name = yield from self.head()
            if not name or (yield from self.cursor.blanks()) != "{":
                return
            self.start_call(name)
            is_whole = yield from JsonReader(self.cursor).value(self.argue)
            self.end_call(is_whole)
            if not is_whole or not (yield from self.foot()):
                return
            self.keep("")
            yield from self.cursor.blanks()
            if not (yield from self.cursor.match(self.call_open)):
                return

    @abstractmethod
    def head(self) -> Steps[str]:
        """Read up to the arguments; return the call's name, or ""."""

    def foot(self) -> Steps[bool]:
        """Read what follows the arguments."""
        yield from self.cursor.blanks()
        return (yield from self.cursor.match(self.call_close))
