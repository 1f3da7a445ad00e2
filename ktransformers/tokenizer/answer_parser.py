"""Parsers of an answer's text into reasoning, text and tool calls. Knows neither tokens nor dialects."""

from __future__ import annotations

from typing import Protocol

from ktransformers.tokenizer.reasoning import EndTrimmer, ReasoningParser, Unwrapper
from ktransformers.tokenizer.recognition import AnswerFormat
from ktransformers.tokenizer.tools.base import TaggedParser, ToolParser
from ktransformers.tokenizer.tools.events import ParsedEvent, ReasoningPiece, TextPiece, ToolSchemas
from ktransformers.tokenizer.tools.families.harmony import HarmonyParser
from ktransformers.tokenizer.tools.formats import HARMONY

__all__ = ["AnswerParser", "TaggedAnswerParser", "parser_of"]


class AnswerParser(Protocol):
    """A parser of one answer. The events of both calls, in order, tell what the text means; see ParsedEvent."""

    def feed(self, text: str) -> list[ParsedEvent]:
        """Return the events that this piece of the answer makes certain."""

    def flush(self, is_cut: bool = False) -> list[ParsedEvent]:
        """Return the events at the end of the answer. Call once. is_cut: the model was stopped before it was done."""


class TaggedAnswerParser:
    """A parser of answers whose reasoning comes first, between tags; what looks like a tool call inside of it is none.

    tools: None when the request has no tools; calls are text then. end: a text that is dropped where an answer ends
    with it, because it ends the turn.
    """

    def __init__(
        self,
        reasoning: ReasoningParser,
        wrapper: tuple[str, str] | None,
        tools: ToolParser | None,
        *,
        end: str = "",
    ):
        self._reasoning, self._tools = reasoning, tools
        self._unwrapper = Unwrapper(wrapper) if wrapper else None
        self._trimmer = EndTrimmer(end) if end else None

    def feed(self, text: str) -> list[ParsedEvent]:
        """Return the events that this piece of the answer makes certain."""
        part = self._reasoning.feed(text)
        return self._events(part.reasoning, part.content)

    def flush(self, is_cut: bool = False) -> list[ParsedEvent]:
        """Return the events at the end of the answer. Call once. is_cut: the model was stopped before it was done."""
        part = self._reasoning.flush()
        events = self._events(part.reasoning, part.content)
        if self._unwrapper:
            events += self._found(self._unwrapper.flush())
        if self._trimmer:
            events += self._read(self._trimmer.flush())
        return events + (self._tools.flush(is_cut) if self._tools else [])

    def _events(self, reasoning: str, content: str) -> list[ParsedEvent]:
        events: list[ParsedEvent] = [ReasoningPiece(reasoning)] if reasoning else []
        return events + self._found(self._unwrapper.feed(content) if self._unwrapper else content)

    def _found(self, content: str) -> list[ParsedEvent]:
        return self._read(self._trimmer.feed(content) if self._trimmer else content)

    def _read(self, content: str) -> list[ParsedEvent]:
        if self._tools:
            return self._tools.feed(content)
        return [TextPiece(content)] if content else []


def parser_of(
    form: AnswerFormat,
    tools: ToolSchemas | None,
    *,
    thoughts: str | None,
    continues_reasoning: bool,
    is_forced: bool,
    end: str,
) -> AnswerParser:
    """Return a parser for one answer of a model that writes `form`.

    tools: those of the request, None when it has none. thoughts: the reasoning that the prompt ends with, None when it
    does not end inside. continues_reasoning: it ends in the middle of it. is_forced: behind its reasoning the answer
    has to be calls. end: see TaggedAnswerParser.
    """
    starts_inside = continues_reasoning or thoughts is not None
    parser: ToolParser | None = None
    if form.tools is not None and form.tools.name == HARMONY:
        parser = HarmonyParser(tools, has_tools=tools is not None, starts_inside=starts_inside)
    elif form.tools is not None and (tools is not None or form.tools.has_messages):
        parser = form.tools.parser(tools or {})
    if parser is not None and is_forced:
        parser.expect_calls()
    if isinstance(parser, HarmonyParser):
        return parser
    ends_reasoning = form.tools is not None and form.tools.ends_reasoning
    stops = parser.opening if ends_reasoning and isinstance(parser, TaggedParser) else ()
    goes_on = continues_reasoning or bool(thoughts and thoughts.strip())
    reasoning = ReasoningParser(form.marks.reasoning, starts_inside, goes_on, stops)
    return TaggedAnswerParser(reasoning, form.wrapper, parser, end=end)
