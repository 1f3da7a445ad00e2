"""Turns the backend's events of an answer into those that dialects write. Splits reasoning and tool calls from text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from ktransformers.core import FinishReason, TokenEvent
from ktransformers.server.answers.events import (
    AnswerEvent,
    AnswerFinished,
    AnswerReason,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    TokenAdded,
    ToolArgumentsDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from ktransformers.server.answers.requests import derived_id, new_id
from ktransformers.tokenizer.answer_parser import AnswerParser
from ktransformers.tokenizer.tools import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    ParsedEvent,
    ReasoningPiece,
    TextPiece,
)

__all__ = ["ChatChoice", "Choice", "PromptChoice", "TextChoice"]

_REASONS = {
    FinishReason.STOP: AnswerReason.STOP,
    FinishReason.LENGTH: AnswerReason.LENGTH,
    FinishReason.ABORT: AnswerReason.ABORT,
}


class Choice(ABC):
    """Turns the backend's events of one answer, fed in their order, into events for the client."""

    _has_started = False

    def feed(self, event: TokenEvent) -> tuple[AnswerEvent, ...]:
        """Return the events for the client that this event of the backend becomes."""
        return tuple(self._events(event))

    def _events(self, event: TokenEvent) -> Iterator[AnswerEvent]:
        if not self._has_started:
            self._has_started = True
            yield self._started(event)
        if event.token_id is not None:
            yield TokenAdded(event.token_id, event.logprobs, is_end=isinstance(event.stop, int))
        yield from self._split(event.text, event.finish_reason is not None, _is_cut(event))
        if event.finish_reason is not None:
            stop = event.stop if isinstance(event.stop, str) else None
            yield AnswerFinished(self._reason(event.finish_reason), stop, event.stats)

    def _started(self, event: TokenEvent) -> AnswerStarted:
        return AnswerStarted(event.stats)

    def _reason(self, reason: FinishReason) -> AnswerReason:
        return _REASONS[reason]

    @abstractmethod
    def _split(self, text: str, is_last: bool, is_cut: bool) -> Iterator[AnswerEvent]:
        """The events of the answer's next piece of text, which may be empty. is_cut: the model was not done."""


def _is_cut(event: TokenEvent) -> bool:
    """Whether the answer ends here though the model would have gone on."""
    reason = event.finish_reason
    return reason is not None and (reason is not FinishReason.STOP or isinstance(event.stop, str))


class ChatChoice(Choice):
    """Splits a chat answer's text into reasoning, text and tool calls, as `parser` finds them.

    id: of the answer, which the ids of its calls are made of, so that a replayed answer has the same ones. is_single:
    the answer ends where its first call does, and what the engine computes after that is not shown.
    """

    def __init__(self, parser: AnswerParser, id: str = "", *, is_single: bool = False):
        self._parser, self._id, self._is_cut = parser, id or new_id("answer"), False
        self._is_single, self._is_over = is_single, False
        self._num_calls, self._is_inside = 0, False  # calls so far; whether the answer was cut inside of the last one

    def _split(self, text: str, is_last: bool, is_cut: bool) -> Iterator[AnswerEvent]:
        yield from map(self._named, self._parser.feed(text))
        self._is_cut = is_cut
        if is_last:
            yield from map(self._named, self._parser.flush(is_cut))

    def _events(self, event: TokenEvent) -> Iterator[AnswerEvent]:
        for one in () if self._is_over else super()._events(event):
            yield one
            # One that is cut is no end of its own: what cut it ends the answer.
            if self._is_single and isinstance(one, ToolCallEnded) and (one.is_whole or event.finish_reason is None):
                self._is_over = True
                yield AnswerFinished(AnswerReason.TOOL_CALLS, None, event.stats)
                return

    def _named(self, event: ParsedEvent) -> AnswerEvent:
        index = self._num_calls - 1
        match event:
            case TextPiece(text):
                return TextDelta(text)
            case ReasoningPiece(text):
                return ReasoningDelta(text)
            case CallStarted(name):
                self._num_calls, self._is_inside = index + 2, True
                return ToolCallStarted(index + 1, derived_id("call", self._id, index + 1), name)
            case ArgumentsPiece(text):
                return ToolArgumentsDelta(index, text)
            case CallEnded(is_whole):
                self._is_inside = self._is_cut and not is_whole
                return ToolCallEnded(index, is_whole)

    def _reason(self, reason: FinishReason) -> AnswerReason:
        """Calls are no reason to run tools when a stop string cut the last of them."""
        has_calls = reason is FinishReason.STOP and self._num_calls > 0 and not self._is_inside
        return AnswerReason.TOOL_CALLS if has_calls else _REASONS[reason]


class TextChoice(Choice):
    """A choice whose text is the answer as it is. prompt_text: what AnswerStarted shows."""

    def __init__(self, prompt_text: str = ""):
        self._prompt_text = prompt_text

    def _started(self, event: TokenEvent) -> AnswerStarted:
        return AnswerStarted(event.stats, self._prompt_text, event.prompt_logprobs)

    def _split(self, text: str, is_last: bool, is_cut: bool) -> Iterator[AnswerEvent]:
        if text:
            yield TextDelta(text)


class PromptChoice(TextChoice):
    """A choice of which only the prompt is wanted: the token that was computed to see it is dropped."""

    def _events(self, event: TokenEvent) -> Iterator[AnswerEvent]:
        for one in super()._events(event):
            if isinstance(one, AnswerStarted | AnswerFinished):
                yield one

    def _reason(self, reason: FinishReason) -> AnswerReason:
        return AnswerReason.LENGTH
