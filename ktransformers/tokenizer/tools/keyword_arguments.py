"""Arguments as keywords of a Python call, which Llama 4 and LFM2 write: `a=1, b="x")`. Knows no tags.

Small models write quotes inside of strings as they are: `text="He said "hi" to me"`. A quote that nothing follows that
may stand behind a value is then part of the string; where something does, it ends the string, as Python has it.
"""

from __future__ import annotations

import re

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN, ToolParser
from ktransformers.tokenizer.tools.cursor import Cursor, Sink, Steps
from ktransformers.tokenizer.tools.json_text import PythonReader, escaped

__all__ = ["KEYWORD", "read_keywords"]

KEYWORD = re.compile(r"[\w.\-]*")
"""What the name of a tool or of a parameter consists of."""


class _ValueReader(PythonReader):
    """One argument's value."""

    def __init__(self, cursor: Cursor):
        super().__init__(cursor)
        self._is_nested = False

    @override
    def _begin(self, char: str, stack: bytearray, sink: Sink) -> Steps[str]:
        self._is_nested = self._is_nested or char in "{["
        return (yield from super()._begin(char, stack, sink))

    @override
    def _ends_string(self) -> Steps[bool]:
        read: list[str] = []
        char = yield from self._cursor.blanks(read.append)
        if self._is_nested:
            is_end = char == "" or char in ",]}:"
        else:
            is_end = yield from self._ends_argument(char, read)
        self._cursor.put_back("".join(read))
        return is_end

    def _ends_argument(self, char: str, read: list[str]) -> Steps[bool]:
        """Whether the next argument follows, or the end of the call. read: takes what was looked at."""
        if char == "":
            return True
        if char not in ",)":
            # Blanks and a keyword: a comma was forgotten, which no string makes up for.
            return bool(read) and (yield from self._is_keyword(read))
        read.append(self._cursor.skip())
        follows = yield from self._cursor.blanks(read.append)
        if char == ")":
            return follows in ("", ",", "]", "<", ";")
        return follows in ("", ")") or (yield from self._is_keyword(read))

    def _is_keyword(self, read: list[str]) -> Steps[bool]:
        num_chars = yield from self._cursor.run_of(KEYWORD, read.append, NAME_LEN)
        follows = yield from self._cursor.blanks(read.append)
        return follows == "" or (num_chars > 0 and follows == "=")


def read_keywords(parser: ToolParser) -> Steps[bool]:
    """Read the arguments up to the closing bracket, and emit them as a JSON object.

    False: they are none, or the text ends.
    """
    cursor, before = parser.cursor, ""
    parser.argue("{")
    while (yield from cursor.blanks()) != ")":
        key = yield from cursor.word(KEYWORD, NAME_LEN)
        if not key or (yield from cursor.blanks()) != "=":
            return False
        cursor.skip()
        parser.argue(f'{before}"{escaped(key)}": ')
        before = ", "
        if not (yield from _ValueReader(cursor).value(parser.argue)):
            return False
        char = yield from cursor.blanks()
        if char == ",":
            cursor.skip()
        elif char != ")":
            return False
    cursor.skip()
    parser.argue("}")
    return True
