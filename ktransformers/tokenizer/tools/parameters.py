"""Writes parameters that stand between tags as members of a JSON object, and finds where their values end.

A value ends at its own closing tag. Models forget that one, or write it twice, so a value also ends

    at the opening tag of a parameter that the tool has and that was not written yet;
    at a tag that ends the call or begins another one, if no closing tag of the value comes before the next call;
    where the model ends its turn.

Source of what models forget, and of what to make of it: the parsers of vLLM and SGLang for Qwen3-Coder.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from ktransformers.tokenizer.tools.base import TaggedParser
from ktransformers.tokenizer.tools.cursor import Cursor, Sink, Steps
from ktransformers.tokenizer.tools.json_text import JsonReader, escaped
from ktransformers.tokenizer.tools.values import as_json, kinds_of

__all__ = ["ParameterParser", "ParameterWriter", "ValueTags"]

_STRING = frozenset({"string"})
_BRACKETS = {"object": "{", "array": "["}


@dataclass(frozen=True, slots=True)
class ValueTags:
    """The tags at which a value ends. close: its own. parameter: begins the next one. after: end the call.

    calls: begin another. quotes: see CallShape; within them no tag ends a value.
    Of formats that nothing is known of but their shape there is `close` alone.
    """

    close: str
    parameter: str = ""
    after: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    quotes: tuple[str, str] | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """All of the tags at which a value ends."""
        return tuple(filter(None, (self.close, self.parameter, *self.after, *self.calls)))


class ParameterParser(TaggedParser):
    """A parser of calls whose parameters stand between tags. Both questions put back what they read."""

    @abstractmethod
    def next_key(self, tag: str) -> Steps[str]:
        """Return the name of the parameter whose opening tag was read; "" when there is none."""

    @abstractmethod
    def begins_call(self, tag: str) -> Steps[bool]:
        """Whether the tag that was read begins a call."""


class ParameterWriter:
    """Writes parameters as members of a JSON object: strings as they come, other values when they are complete."""

    def __init__(self, parser: ParameterParser, name: str):
        self._parser, self._name = parser, name
        self._keys: set[str] = set()
        schema = parser.tools.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._known = properties if isinstance(properties, Mapping) else None

    def read(self, key: str, tags: ValueTags, *, trims: bool = False, is_string: bool | None = None) -> Steps[bool]:
        """Read the value up to its end. is_string: None when the schema has to say it.

        False: the answer was cut inside.
        trims: one line break at its beginning and one at its end do not belong to it.
        """
        parser = self._parser
        kinds = _STRING if is_string else kinds_of(parser.tools, self._name, key)
        if is_string is False:
            kinds -= _STRING
        parser.argue(f'{", " if self._keys else "{"}"{escaped(key)}": ')
        self._keys.add(key)
        if trims and not (yield from parser.cursor.match("\r\n")):
            yield from parser.cursor.match("\n")
        if tags.quotes and (yield from parser.cursor.match(tags.quotes[0])):
            return (yield from self._quoted(tags.close, tags.quotes[1], kinds))
        if kinds == _STRING:
            parser.argue('"')
            has_end = yield from self._value(tags, trims, lambda piece: parser.argue(escaped(piece)))
            if has_end:
                parser.argue('"')
            return has_end
        parts: list[str] = []
        has_end = yield from self._value(tags, trims, parts.append)
        text = "".join(parts)
        if has_end:
            parser.argue(as_json(text, kinds))
        else:
            self._tell_begun(text, kinds)
        return has_end

    def close(self, is_whole: bool) -> None:
        """Close the object: there are no more parameters. An object that the model did not end stays open."""
        if is_whole:
            self._parser.argue("}" if self._keys else "{}")
        elif not self._keys:
            self._parser.argue("{")

    def _value(self, tags: ValueTags, trims: bool, into: Sink) -> Steps[bool]:
        cursor = self._parser.cursor
        sink = _Trimmed(into) if trims else _Sink(into)
        watched = tags.all + tuple(f"\n{tag}" for tag in tags.all if trims)
        while True:
            found = yield from cursor.find(watched, sink, drops_begun=1)
            if found is None:
                return not cursor.is_cut
            sink.release()
            tag = found.removeprefix("\n")
            if tag == tags.close or (yield from self._ends_before(tag, tags)):
                return True
            sink(found)

    def _quoted(self, close: str, quote: str, kinds: frozenset[str]) -> Steps[bool]:
        """Read what the opening quote began: a string, unless the schema has only others. False: it was cut off."""
        parser, cursor = self._parser, self._parser.cursor
        is_string, parts = not kinds or "string" in kinds, list[str]()
        sink: Sink = (lambda piece: parser.argue(escaped(piece))) if is_string else parts.append
        if is_string:
            parser.argue('"')
        while (yield from cursor.find((quote,), sink, drops_begun=1)) is not None:
            blanks = list[str]()
            if not (yield from cursor.blanks(blanks.append)) or (yield from cursor.match(close)):
                break
            sink("".join((quote, *blanks)))  # the closing quote is one behind which the value's tag stands
        if cursor.is_cut_here:
            return False
        parser.argue('"' if is_string else as_json("".join(parts), kinds))
        return True

    def _ends_before(self, tag: str, tags: ValueTags) -> Steps[bool]:
        """Whether a value ends where this tag, which was read, begins; the tag is put back then."""
        parser = self._parser
        if tag == tags.parameter:
            is_end = self._may_follow((yield from parser.next_key(tag)))
        elif tag in tags.calls and not (yield from parser.begins_call(tag)):
            is_end = False
        else:
            is_end = not (yield from self._goes_on(tags))
        if is_end:
            parser.cursor.put_back(tag)
        return is_end

    def _may_follow(self, key: str) -> bool:
        return bool(key) and key not in self._keys and (self._known is None or key in self._known)

    def _goes_on(self, tags: ValueTags) -> Steps[bool]:
        """Whether the value's closing tag comes before the next call. Puts back what it reads."""
        parser, ahead = self._parser, list[str]()
        while True:
            found = yield from parser.cursor.find((tags.close, *tags.calls), ahead.append)
            ahead.append(found or "")
            if found is None or found == tags.close or (yield from parser.begins_call(found)):
                parser.cursor.put_back("".join(ahead))
                return found == tags.close

    def _tell_begun(self, text: str, kinds: frozenset[str]) -> None:
        """What there is of a value that was cut off, as JSON that goes no further."""
        if (not kinds or "string" in kinds) and as_json(text, kinds).startswith('"'):
            brackets = "".join(bracket for kind, bracket in _BRACKETS.items() if not kinds or kind in kinds)
            if text.strip() and text.lstrip()[0] not in brackets:
                self._parser.argue(f'"{escaped(text)}')
                return
        cursor = Cursor()
        cursor.add(text)
        cursor.end()
        for _ in JsonReader(cursor).value(self._parser.argue):
            raise AssertionError("a reader waits for more than the end")


class _Sink:
    """Takes pieces of a value."""

    def __init__(self, sink: Sink):
        self._sink = sink

    def __call__(self, piece: str) -> None:
        self._sink(piece)

    def release(self) -> None:
        """A tag was found."""


class _Trimmed(_Sink):
    """Holds a line break at the end back, until a tag shows that it is not the value's last character."""

    def __init__(self, sink: Sink):
        super().__init__(sink)
        self._held = ""

    @override
    def __call__(self, piece: str) -> None:
        text = self._held + piece
        self._held = "\n" if text.endswith("\n") else ""
        self._sink(text.removesuffix("\n"))

    @override
    def release(self) -> None:
        held, self._held = self._held, ""
        self._sink(held)
