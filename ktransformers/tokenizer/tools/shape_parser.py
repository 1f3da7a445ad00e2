"""The parser of formats that are nothing but a shape: what families have in common who write calls with other tags.

A shape says how calls are spelled exactly; models are not that exact, so blanks count for nothing here, sections and
closing tags may be missing, and members of JSON objects come in any order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from typing_extensions import override

from ktransformers.tokenizer.tools.base import NAME_LEN, JsonCalls
from ktransformers.tokenizer.tools.cursor import Steps
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.json_text import JsonReader
from ktransformers.tokenizer.tools.keyword_arguments import read_keywords
from ktransformers.tokenizer.tools.parameters import ParameterParser, ParameterWriter, ValueTags
from ktransformers.tokenizer.tools.shapes import CallShape, Spelling

__all__ = ["ShapeParser", "tags_of"]

_BRACKETS = "[]{}(), \t\r\n"
_HOLES = re.compile("(NAME|KEY|KIND|#)")
_ID = "#"
_ANYTHING = re.compile(r"(?s).*")


@dataclass(frozen=True, slots=True)
class _Tags:
    """section: the tag in front of all calls; call: the one in front of each; "" for none. end: behind all calls."""

    section: str
    call: str
    end: str


def tags_of(shape: CallShape) -> tuple[str, ...]:
    """Return the tags that show that calls begin; none for a shape whose calls begin with a bracket or a name."""
    tags = _tags(shape)
    return tuple(dict.fromkeys(tag for tag in (tags.section, tags.call) if tag))


def _tags(shape: CallShape) -> _Tags:
    before = _HOLES.split(shape.head)[0]
    if shape.json_keys or "{" in before:
        before = before.partition("{")[0]
    # A line of its own is a tag of its own: what follows is looked for when the tag was found.
    call = before.strip().partition("\n")[0].strip()
    return _Tags(shape.open.rstrip(_BRACKETS).strip(), call, shape.close.lstrip(_BRACKETS).strip())


class ShapeParser(ParameterParser):
    """A parser of one answer whose calls have this shape. tools: see ToolSchemas."""

    def __init__(self, shape: CallShape, tools: ToolSchemas | None = None):
        self._shape, self._tags = shape, _tags(shape)
        self._is_list = shape.open.rstrip().endswith("[") or shape.head.lstrip().startswith("[")
        self._foot = shape.foot.strip()
        if shape.json_keys:
            self._foot = self._foot.lstrip(_BRACKETS)
        self.opening = tags_of(shape)
        ends = (self._tags.end, (shape.around or ("", ""))[1])
        self.closing = tuple(dict.fromkeys(tag for tag in ends if tag and tag not in self.opening))
        self._parts = [part for part in _HOLES.split(shape.head) if part]
        super().__init__(tools)

    @override
    def _run(self) -> Steps[None]:
        if self.opening:
            yield from super()._run()
            return
        self._hides_begun = False
        self.keep("")  # without a tag only the beginning of an answer can be a call
        yield from self.cursor.blanks()
        yield from self.calls("")
        self.give_back()
        yield from self.cursor.run_of(_ANYTHING, self.say)

    @override
    def calls(self, tag: str) -> Steps[None]:
        tags, num_calls = self._tags, self._num_calls
        if tag == tags.section and self._is_list:
            yield from self.cursor.blanks()
            yield from self.cursor.match("[")
        has_tag = bool(tag) and tag == tags.call
        while (yield from self._begins(has_tag)):
            if not (yield from self._call()):
                return
            self.keep("")
            yield from self._literal(self._shape.sep or "")
            has_tag = False
        if self._num_calls > num_calls:
            yield from self._end()

    def _begins(self, has_tag: bool) -> Steps[bool]:
        """Whether a call may follow; takes its tag."""
        char = yield from self.cursor.blanks()
        if has_tag:
            return True
        if self._tags.call:
            return (yield from self.cursor.match(self._tags.call))
        return char in ("{", "[") if self._shape.json_keys else char not in ("", "]", "<")

    def _end(self) -> Steps[None]:
        """Takes what closes the section, if it is there."""
        yield from self.cursor.blanks()
        if self._is_list and (yield from self.cursor.match("]")):
            self.keep("")
            yield from self.cursor.blanks()
        if self._tags.end and (yield from self.cursor.match(self._tags.end)):
            self.cursor.kept = None

    def _literal(self, text: str) -> Steps[bool]:
        """Takes a fixed text, blanks aside. False: something else follows, or goes on otherwise."""
        for piece in text.replace('{"', '{ "').replace('":', '" :').split():
            yield from self.cursor.blanks()
            if not (yield from self.cursor.match(piece)):
                return False
        return True

    def _call(self) -> Steps[bool]:
        """The call behind its tag. False: it is none, or broke off."""
        shape = self._shape
        if shape.json_keys:
            if not (yield from self._literal(self._rest(shape.head.partition("{")[0]))):
                return False
            yield from self.cursor.blanks()
            calls = JsonCalls(self, keys=shape.json_keys, is_known=not self.opening, needs_arguments=not self.opening)
            is_list = (yield from self.cursor.peek()) == "["
            if not (yield from (calls.array() if is_list else calls.call())):
                return False
            self.keep("")
            yield from self._literal(self._foot)
            return True
        name = yield from self._head()
        if not name:
            return False
        match shape.spelling:
            case Spelling.TAGS:
                return (yield from self._tagged(name))
            case Spelling.PYTHON:
                return (yield from self._keywords(name))
        if (yield from self.cursor.blanks()) != "{":
            return False
        self.start_call(name)
        is_whole = yield from JsonReader(self.cursor).value(self.argue)
        self.end_call(is_whole)
        self.keep("")
        if is_whole:
            yield from self._literal(self._foot)
        return is_whole

    def _rest(self, text: str) -> str:
        """The text without the call's tag, which was taken."""
        return text.strip().removeprefix(self._tags.call)

    def _head(self) -> Steps[str]:
        """Everything up to the arguments; the name, or "" when it is not this format."""
        name, parts = "", list(self._parts)
        if self._tags.call:
            parts[0] = self._rest(parts[0])
        for part, following in zip(parts, [*parts[1:], "{"], strict=True):
            if part not in ("NAME", _ID):
                if not (yield from self._literal(part)):
                    return ""
                continue
            yield from self.cursor.blanks()
            word = yield from self.cursor.word(_word_before(following.strip()[:1]), NAME_LEN)
            if part == "NAME":
                if not word or (name and word != name):
                    return ""
                name = word
        return name

    def _tagged(self, name: str) -> Steps[bool]:
        """Parameters, each between tags, and what closes the call."""
        before = [part for part in _HOLES.split(self._shape.parameter[0]) if part]
        has_begun = False
        writer = ParameterWriter(self, name)
        while True:
            yield from self.cursor.blanks()
            if not (yield from self._literal(before[0])):
                break
            if not has_begun:
                self.start_call(name)
                has_begun = True
            if not (yield from self._parameter(writer, before[1:])):
                self.end_call(is_whole=False)
                return False
        is_closed = yield from self._closes()
        if not has_begun:
            if not is_closed:
                return False
            self.start_call(name)
        is_whole = is_closed or not self.cursor.is_cut_here
        writer.close(is_whole)
        self.end_call(is_whole)
        return is_closed

    def _closes(self) -> Steps[bool]:
        pieces = self._foot.split()
        for at, piece in enumerate(pieces):
            yield from self.cursor.blanks()
            if not (yield from self.cursor.match(piece)):
                return at > 0  # a call that is closed is whole without its section's end
        return True

    def _parameter(self, writer: ParameterWriter, parts: list[str]) -> Steps[bool]:
        """One parameter from its name on. False: the text ends inside, or it is none."""
        key, kind = "", None
        before, after = self._shape.parameter
        for part, following in zip(parts, [*parts[1:], ""], strict=True):
            if part in ("KEY", "KIND"):
                word = yield from self.cursor.word(_word_before(following.strip()[:1], blanks=True), NAME_LEN)
                key, kind = (word.strip(), kind) if part == "KEY" else (key, word.strip())
            elif not (yield from self._inner(part)):
                return False
        if not key:
            return False
        is_string = None if kind is None else kind == self._shape.kinds.get("string", "true")
        tags = ValueTags(after.replace("KEY", key).strip(), quotes=self._shape.quotes)
        trims = before.endswith("\n") and after.startswith("\n")
        return (yield from writer.read(key, tags, trims=trims, is_string=is_string))

    @override
    def next_key(self, tag: str) -> Steps[str]:
        yield from ()
        return ""  # see ValueTags: there is nothing to recover by

    @override
    def begins_call(self, tag: str) -> Steps[bool]:
        yield from ()
        return False

    def _inner(self, part: str) -> Steps[bool]:
        """A fixed text within a parameter's head; blanks behind the last one belong to the value."""
        for at, piece in enumerate(part.split()):
            if at or part[:1].isspace():
                yield from self.cursor.blanks()
            if not (yield from self.cursor.match(piece)):
                return False
        return True

    def _keywords(self, name: str) -> Steps[bool]:
        """`a=1, b="x")`; the bracket that opens them is the end of the head."""
        if self.opening == () and name not in self.tools:
            return False
        self.start_call(name)
        is_whole = yield from read_keywords(self)
        self.end_call(is_whole)
        self.keep("")
        if is_whole:
            yield from self._literal(self._foot.removeprefix(")"))
        return is_whole


def _word_before(char: str, *, blanks: bool = False) -> re.Pattern[str]:
    """One class of characters: what a name, a key or an id can consist of in front of this character."""
    barred = re.escape(char) if char and char not in '"<>{}' else ""
    return re.compile(rf"[^{'' if blanks else ' '}\t\r\n<>{{}}\"|｜{barred}]*")
