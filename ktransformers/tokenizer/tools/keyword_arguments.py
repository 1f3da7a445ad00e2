"""Arguments as keywords of a Python call, which Llama 4 and LFM2 write: `a=1, b="x")`. Knows no tags."""

from __future__ import annotations

import re

from ktransformers.tokenizer.tools.base import NAME_LEN, ToolParser
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.json_text import PythonReader, escaped

__all__ = ["KEYWORD", "read_keywords"]

KEYWORD = re.compile(r"[\w.\-]*")
"""What the name of a tool or of a parameter consists of."""


def read_keywords(parser: ToolParser) -> Steps[bool]:
    """Tells the arguments up to the closing bracket, as a JSON object. False: they are none, or the text ends."""
    cursor, before = parser.cursor, ""
    parser.argue("{")
    while (yield from cursor.blanks()) != ")":
        key = yield from cursor.word(KEYWORD, NAME_LEN)
        if not key or (yield from cursor.blanks()) != "=":
            return False
        cursor.skip()
        parser.argue(f'{before}"{escaped(key)}": ')
        before = ", "
        if not (yield from PythonReader(cursor).value(parser.argue)):
            return False
        char = yield from cursor.blanks()
        if char == ",":
            cursor.skip()
        elif char != ")":
            return False
    cursor.skip()
    parser.argue("}")
    return True
