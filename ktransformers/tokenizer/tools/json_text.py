"""Reads JSON as it is being written, and two spellings that are nearly JSON. Nothing is recursive: depth costs a byte.

Source: RFC 8259. Does not know tools.
"""

from __future__ import annotations

import json
import re

from typing_extensions import override

from ktransformers.tokenizer.tools.cursor import Cursor, Sink, Steps

__all__ = ["PYTHON_WORDS", "GemmaReader", "JsonReader", "PythonReader", "escaped", "is_json"]

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""What JSON has for Python's words."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?\Z")
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
_MAX_SCALAR = 4096
"""Most characters of a number: Python reads no integers with more digits than this either."""


def escaped(text: str) -> str:
    """Return `text` escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str, kinds: tuple[type, ...]) -> bool:
    """Whether `text` is JSON (RFC 8259: no NaN) whose value has one of these types, and is not nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return type(value) in kinds


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class JsonReader:
    """Reads one value after the other from a cursor and hands it on, as valid JSON, in pieces as it comes.

    What is JSON is handed on as it is written; line breaks and other control characters inside strings, which JSON does
    not allow and models write, are escaped.
    """

    words: dict[str, str] = {one: one for one in ("true", "false", "null")}  # noqa: RUF012

    def __init__(self, cursor: Cursor):
        self._cursor = cursor

    def value(self, sink: Sink) -> Steps[bool]:
        """Read a value, blanks in front of it left out. False: it is not JSON, or the text ends inside of it."""
        stack = bytearray()  # the brackets that have to close
        wants = "value"  # or "first value", "key", "first key", "next"
        while True:
            char = yield from self._cursor.blanks(sink if stack and self._keeps_blanks else None)
            if char == "":
                return False
            if stack and wants[0] in "fn" and ord(char) == stack[-1]:
                sink(self._cursor.skip())
                stack.pop()
                wants = "next"
            elif wants == "next":
                if char != ",":
                    return False
                self._punctuation(sink)
                wants = "key" if stack[-1:] == b"}" else "value"
            elif wants.endswith("key"):
                if not (yield from self._key(sink)) or (yield from self._before_colon(sink)) != ":":
                    return False
                self._punctuation(sink)
                wants = "value"
            else:
                wants = yield from self._begin(char, stack, sink)
                if not wants:
                    return False
            if not stack:
                return True

    def _begin(self, char: str, stack: bytearray, sink: Sink) -> Steps[str]:
        """A whole scalar, or an opening bracket; what has to follow, or "" when it is neither."""
        if char not in "{[":
            return "next" if (yield from self.scalar(sink)) else ""
        sink(self._cursor.skip())
        stack.append(ord("}" if char == "{" else "]"))
        return "first key" if char == "{" else "first value"

    _keeps_blanks = True

    def _before_colon(self, sink: Sink) -> Steps[str]:
        return (yield from self._cursor.blanks(sink if self._keeps_blanks else None))

    def _punctuation(self, sink: Sink) -> None:
        char = self._cursor.skip()
        sink(char if self._keeps_blanks else char + " ")

    def _key(self, sink: Sink) -> Steps[bool]:
        char = yield from self._cursor.peek()
        return char == '"' and (yield from self.string(sink))

    def scalar(self, sink: Sink) -> Steps[bool]:
        """Read a string, number, true, false or null."""
        if (yield from self._cursor.peek()) == '"':
            return (yield from self.string(sink))
        return (yield from self._word(sink))

    def _word(self, sink: Sink) -> Steps[bool]:
        word = yield from self._cursor.word(_SCALAR, _MAX_SCALAR)
        if word not in self.words and not _NUMBER.match(word):
            return False
        sink(self.words.get(word, word))
        return True

    def string(self, sink: Sink) -> Steps[bool]:
        """Read a string, quotes included."""
        sink(self._cursor.skip())
        while True:
            yield from self._cursor.run_of(_PLAIN, sink)
            char = yield from self._cursor.peek()
            if char == "":
                return False
            if char == '"':
                sink(self._cursor.skip())
                return True
            if char != "\\":
                sink(escaped(self._cursor.skip()))
            elif not (yield from self._escape(sink)):
                return False

    def _escape(self, sink: Sink) -> Steps[bool]:
        self._cursor.skip()
        char = yield from self._cursor.peek()
        if char == "" or char not in '"\\/bfnrtu':
            return False
        digits = [self._cursor.skip()]
        if char == "u" and (yield from self._cursor.run_of(_HEX, digits.append, 4)) != 4:
            return False
        sink("\\" + "".join(digits))
        return True

    def text(self) -> Steps[str | None]:
        """Return the string that follows, decoded; None when it is none."""
        parts: list[str] = []
        if (yield from self._cursor.peek()) != '"' or not (yield from self.string(parts.append)):
            return None
        decoded = json.loads("".join(parts))
        return str(decoded).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class PythonReader(JsonReader):
    """A reader of Python's literals: None, True and False, strings in either quotes. Handed on as JSON."""

    words = JsonReader.words | PYTHON_WORDS
    _keeps_blanks = False
    _single = re.compile(r"[^'\\\x00-\x1f]*")
    _escapes = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}  # noqa: RUF012
    _sizes = {"x": 2, "u": 4, "U": 8}  # noqa: RUF012

    def _key(self, sink: Sink) -> Steps[bool]:
        char = yield from self._cursor.peek()
        return char in ("'", '"') and (yield from self.string(sink))

    @override
    def scalar(self, sink: Sink) -> Steps[bool]:
        if (yield from self._cursor.peek()) in ("'", '"'):
            return (yield from self.string(sink))
        return (yield from self._word(sink))

    @override
    def string(self, sink: Sink) -> Steps[bool]:
        quote = self._cursor.skip()
        plain = _PLAIN if quote == '"' else self._single
        sink('"')
        while True:
            yield from self._cursor.run_of(plain, lambda piece: sink(escaped(piece)))
            char = yield from self._cursor.peek()
            if char == "":
                return False
            self._cursor.skip()
            if char == quote and (yield from self._ends_string()):
                sink('"')
                return True
            if char != "\\":
                sink(escaped(char))
            elif not (yield from self._python_escape(sink)):
                return False

    def _ends_string(self) -> Steps[bool]:
        """Whether a quote that was read ends its string; always, of Python as it should be."""
        yield from ()
        return True

    def _python_escape(self, sink: Sink) -> Steps[bool]:
        char = yield from self._cursor.peek()
        if char == "":
            return False
        self._cursor.skip()
        if char not in self._sizes:
            sink(escaped(self._escapes.get(char, "\\" + char)))
            return True
        digits: list[str] = []
        if (yield from self._cursor.run_of(_HEX, digits.append, self._sizes[char])) != self._sizes[char]:
            return False
        code = int("".join(digits), 16)
        if code > 0x10FFFF:
            return False
        sink(f"\\u{code:04x}" if code < 0x10000 else escaped(chr(code)))
        return True


class GemmaReader(JsonReader):
    """A reader of Gemma 4's spelling: bare keys, strings between `<|"|>`. Handed on as JSON."""

    words = JsonReader.words | PYTHON_WORDS
    _keeps_blanks = False
    _quote = '<|"|>'
    _bare = re.compile(r"[^:{}\[\],<>\"\r\n]*")

    def _key(self, sink: Sink) -> Steps[bool]:
        if (yield from self._cursor.peek()) == "<":
            return (yield from self.string(sink))
        key = (yield from self._cursor.word(self._bare, 256)).strip()
        if self._cursor.is_cut_here:
            sink(f'"{escaped(key)}')
            return False
        sink(f'"{escaped(key)}"')
        return bool(key)

    @override
    def scalar(self, sink: Sink) -> Steps[bool]:
        char = yield from self._cursor.peek()
        if char == '"':
            return (yield from super().string(sink))
        if char == "<":
            return (yield from self.string(sink))
        return (yield from self._word(sink))

    @override
    def string(self, sink: Sink) -> Steps[bool]:
        if not (yield from self._cursor.match(self._quote)):
            return False
        sink('"')
        quotes = (self._quote,)
        if (yield from self._cursor.find(quotes, lambda piece: sink(escaped(piece)), drops_begun=1)) is None:
            return False
        sink('"')
        return True
