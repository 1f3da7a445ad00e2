"""The base of all parsers of tool calls. A family's module says what it looks for; here is how it tells what it found.

A call is announced as soon as its name is certain and it can hardly be anything else; its arguments follow as they
come. Until then nothing is announced, and what turns out to be no call is text, tags included. From then on nothing can
be taken back: when the arguments break off or stop being JSON, the call ends and what follows is text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from ktransformers.tokenizer.tools.cursor import Cursor, Steps
from ktransformers.tokenizer.tools.events import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    ParsedEvent,
    ReasoningPiece,
    TextPiece,
    ToolSchemas,
)
from ktransformers.tokenizer.tools.json_text import JsonReader

__all__ = ["NAME_LEN", "JsonCalls", "TaggedParser", "ToolParser"]

NAME_LEN = 256
"""Most characters of a tool's name."""


class ToolParser(ABC):
    """A parser of one answer for tool calls.

    Feed it pieces of text and `flush` it; both return events, in order, none of them empty.
    Over any cut of the same text the events are the same, but for where pieces of text and arguments are cut. Time and
    memory are in proportion to the text. tools: see ToolSchemas.
    """

    def __init__(self, tools: ToolSchemas | None = None):
        self.tools: ToolSchemas = tools or {}
        self.cursor = Cursor()
        self._events: list[ParsedEvent] = []
        self._blank: list[str] | None = None  # after a call: what may be nothing but blanks between calls
        self._num_calls = 0
        self._hides_begun = True  # calls begin with a tag here, so that what was begun is no text
        self._is_forced = False
        self._running = self._run()

    def feed(self, text: str) -> list[ParsedEvent]:
        """Return the events that this piece of the answer makes certain."""
        if text:
            self.cursor.add(text)
            next(self._running, None)
        return self._taken()

    def expect_calls(self) -> None:
        """Require that the answer is calls (`tool_choice: required`). To be called before the first piece.

        Whatever it had begun where it was cut is then the beginning of a call, and no text, tag or not.
        """
        self._is_forced = True

    def flush(self, is_cut: bool = False) -> list[ParsedEvent]:
        """Return the events at the end of the answer. Call once. is_cut: the model was stopped before it was done.

        A call that it had begun is not whole then, whatever it has written of it; one without a name is not told.
        """
        self.cursor.end(is_cut)
        for _ in self._running:
            raise AssertionError("a parser waits for more than the end")
        return self._taken()

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Reads the whole answer."""

    def _taken(self) -> list[ParsedEvent]:
        """The events so far, neighbouring pieces of a kind joined."""
        taken: list[ParsedEvent] = []
        run: list[str] = []
        for event in self._events:
            if isinstance(event, TextPiece | ReasoningPiece | ArgumentsPiece):
                if run and type(taken[-1]) is type(event):
                    run.append(event.text)
                    continue
                _close_run(taken, run)
                run = [event.text]
            else:
                _close_run(taken, run)
                run = []
            taken.append(event)
        _close_run(taken, run)
        self._events = []
        return taken

    # --- what was found

    def say(self, text: str) -> None:
        """Emit text for the reader. Blanks right after a call are dropped when nothing or another call follows."""
        if self._blank is not None:
            self._blank.append(text)
            if not text.strip():
                return
            text, self._blank = "".join(self._blank), None
        if text:
            self._events.append(TextPiece(text))

    def think(self, text: str) -> None:
        """Emit text of the reasoning."""
        if text:
            self._events.append(ReasoningPiece(text))

    def start_call(self, name: str) -> None:
        """Emit the start of a call; from here on it cannot be taken back."""
        self.cursor.kept = None
        self._blank = None
        self._num_calls += 1
        self._events.append(CallStarted(name))

    def argue(self, text: str) -> None:
        """Emit more of the call's arguments."""
        if text:
            self._events.append(ArgumentsPiece(text))

    def end_call(self, is_whole: bool) -> None:
        """Emit the end of the last call. is_whole: see CallEnded."""
        self._events.append(CallEnded(is_whole))
        self._blank = []

    def keep(self, tag: str) -> None:
        """Keep what is read from here on as text, unless a call starts. tag: what was read already."""
        self.cursor.kept = [tag]

    def give_back(self) -> None:
        """Emit what was kept as text, since no call started, unless the model was stopped while it began one."""
        kept, self.cursor.kept = self.cursor.kept, None
        if kept and not ((self._hides_begun or self._is_forced) and self.cursor.is_cut_here):
            self.say("".join(kept))

    def num_hidden(self, begun_len: int) -> int:
        """Return from how many characters on the beginning of a tag is no text, where an answer was cut; 0: none is."""
        return 1 if self._is_forced else begun_len


def _close_run(events: list[ParsedEvent], run: list[str]) -> None:
    last = events[-1] if len(run) > 1 else None
    if isinstance(last, TextPiece | ReasoningPiece | ArgumentsPiece):
        events[-1] = replace(last, text="".join(run))


class TaggedParser(ToolParser):
    """A parser of text in which tags open calls. `opening`: those tags."""

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    """Tags that may follow calls and are dropped then, once for each opening tag."""
    begun_len: int = 3
    """So much of a tag, where an answer was cut, is no text any more; a lone bracket may be."""

    def _run(self) -> Steps[None]:
        is_open = False
        while True:
            tags = self.opening + (self.closing if is_open else ())
            tag = yield from self.cursor.find(tags, self.say, drops_begun=self.num_hidden(self.begun_len))
            if tag is None:
                return
            if tag in self.closing:
                self._blank = None if self._blank is None else []
                is_open = yield from self._closes_again()
                continue
            self.keep(tag)
            num_calls = self._num_calls
            yield from self.calls(tag)
            is_open = is_open or self._num_calls > num_calls
            self.give_back()

    def _closes_again(self) -> Steps[bool]:
        """Whether another closing tag follows, which models write now and then."""
        read: list[str] = []
        yield from self.cursor.blanks(read.append)
        for tag in self.closing:
            if (yield from self.cursor.match(tag)):
                self.cursor.put_back(tag)
                return True
        self.cursor.put_back("".join(read))
        return False

    @abstractmethod
    def calls(self, tag: str) -> Steps[None]:
        """Read the calls that `tag` opens, as far as they are calls."""


@dataclass(slots=True)
class _Found:
    """What is known of a call: its arguments, as text, unless they were told already."""

    name: str = ""
    arguments: str | None = None
    has_started: bool = False
    is_inner: bool = False


class JsonCalls:
    """A reader of calls spelled `{"name": ..., "arguments": {...}}`, in any order, "parameters" for "arguments".

    needs_arguments: without them it is no call. is_known: only tools of the request can be called; for forms without a
    tag, which look like any JSON. keys: what a format says for "name" and "arguments". A call may stand in an object
    of its own: `{"type": "function", "function": {"name": ...}}`.
    """

    def __init__(
        self,
        parser: ToolParser,
        *,
        needs_arguments: bool = False,
        is_known: bool = False,
        keys: tuple[str, str] = ("name", "arguments"),
    ):
        self._parser, self._needs_arguments, self._is_known = parser, needs_arguments, is_known
        self._name_keys, self._argument_keys = {"name", keys[0]}, {"arguments", "parameters", keys[1]}
        self._json = JsonReader(parser.cursor)

    def call(self) -> Steps[bool]:
        """Read the object that follows. False: it is not a whole call; if it has started, it has ended."""
        found = _Found()
        is_whole = (yield from self._members(found)) and self._is_call(found)
        if found.has_started:
            self._parser.end_call(found.arguments is not None)
        return is_whole

    def array(self) -> Steps[bool]:
        """Read any number of calls in brackets, or a single one without."""
        if (yield from self._parser.cursor.blanks()) != "[":
            return (yield from self.call())
        self._parser.cursor.skip()
        while (yield from self._parser.cursor.blanks()) == "{":
            if not (yield from self.call()):
                return False
            char = yield from self._parser.cursor.blanks()
            if char == ",":
                self._parser.cursor.skip()
        return (yield from self._parser.cursor.match("]"))

    def _members(self, found: _Found) -> Steps[bool]:
        """The whole object. False: it is none, or one that cannot be a call."""
        cursor = self._parser.cursor
        if not (yield from cursor.match("{")):
            return False
        while (yield from cursor.blanks()) != "}":
            key = yield from self._json.text()
            if key is None or (yield from cursor.blanks()) != ":":
                return False
            cursor.skip()
            if not (yield from self._member(key, found)):
                return False
            char = yield from cursor.blanks()
            if char == ",":
                cursor.skip()
            elif char != "}":
                return False
        cursor.skip()
        return True

    def _member(self, key: str, found: _Found) -> Steps[bool]:
        """The value of one member."""
        char = yield from self._parser.cursor.blanks()
        if key == "function" and char == "{" and not found.name and not found.has_started and not found.is_inner:
            found.is_inner = True
            return (yield from self._members(found))
        if key in self._name_keys and not found.name:
            found.name = (yield from self._json.text()) or ""
            return 0 < len(found.name) <= NAME_LEN and (not self._is_known or found.name in self._parser.tools)
        if key in self._argument_keys and found.arguments is None:
            found.arguments = yield from self._arguments(char, found)
            return found.arguments is not None
        return (yield from self._json.value(_forget))

    def _is_call(self, found: _Found) -> bool:
        """Tells a call that is known only now, at the end of its object."""
        if found.has_started:
            return True
        if not found.name or (found.arguments is None and self._needs_arguments):
            return False
        found.has_started = True
        found.arguments = "{}" if found.arguments is None else found.arguments
        self._parser.start_call(found.name)
        self._parser.argue(found.arguments)
        return True

    def _arguments(self, char: str, found: _Found) -> Steps[str | None]:
        """The arguments, as text unless they were told already; None when they are none."""
        if char == '"':  # some models quote the object
            text = yield from self._json.text()
            return text if text is not None and _is_object(text) else None
        if char == "n":
            return "{}" if (yield from self._parser.cursor.match("null")) else None
        if char != "{":
            return None
        if found.name:
            found.has_started = True
            self._parser.start_call(found.name)
            return "" if (yield from self._json.value(self._parser.argue)) else None
        parts: list[str] = []
        return "".join(parts) if (yield from self._json.value(parts.append)) else None


def _forget(text: str) -> None:
    """A sink for what nobody wants."""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
