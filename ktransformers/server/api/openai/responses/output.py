"""Builds the items of a response as they grow, and their events. Knows no request and no transport.

A message, a piece of reasoning and a call are each one item, begun by the first neutral event that belongs to it and
done when another begins or the answer ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable as Function
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktransformers.server.answers.custom_tools import custom_text
from ktransformers.server.answers.events import (
    AnswerEvent,
    AnswerFinished,
    AnswerReason,
    ReasoningDelta,
    TextDelta,
    TokenAdded,
    ToolArgumentsDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from ktransformers.server.answers.requests import derived_id
from ktransformers.server.api.openai.responses.items import sealed
from ktransformers.server.api.openai.responses.tools import Callable

__all__ = ["Fields", "Output", "OutputOptions"]

Fields = dict[str, Any]
"""A part of the JSON that is sent."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of how an answer is shown as items. callables: the client's tools by the names that the model knows.
    has_summary: reasoning is shown as a summary.

    has_sealed: with encrypted_content. max_calls: None for any number. logprobs: of a token, None when not wanted.
    answer_id: what the ids of items are made of, so that a replayed answer has the same ones.
    """

    answer_id: str

    callables: Mapping[str, Callable] = field(default_factory=dict)
    has_summary: bool = False
    has_sealed: bool = False
    max_calls: int | None = None
    logprobs: Function[[TokenAdded], Fields | None] | None = None


class _Item(ABC):
    """index: of the item in the output. id: set when it begins."""

    def __init__(self, index: int, prefix: str):
        self.index, self.prefix, self.id = index, prefix, ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text that has come so far."""
        return "".join(self._pieces)

    @abstractmethod
    def item(self, status: str) -> Fields:
        """Return the item as it is now."""

    def begin(self) -> Iterator[Fields]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.item("in_progress")}

    @abstractmethod
    def more(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]: ...

    def done(self, status: str) -> Iterator[Fields]:
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)}

    def _event(self, type: str, **more: Any) -> Fields:
        return {"type": f"response.{type}", "item_id": self.id, "output_index": self.index} | more


class _Message(_Item):
    def __init__(self, index: int):
        super().__init__(index, "msg")
        self._logprobs: list[Fields] = []

    def _part(self) -> Fields:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def item(self, status: str) -> Fields:
        content = [] if status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begin(self) -> Iterator[Fields]:
        yield from super().begin()
        yield self._event("content_part.added", content_index=0, part=self._part() | {"logprobs": []})

    def more(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._pieces.append(text)
        self._logprobs += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def done(self, status: str) -> Iterator[Fields]:
        yield self._event("output_text.done", content_index=0, text=self.text, logprobs=self._logprobs)
        yield self._event("content_part.done", content_index=0, part=self._part())
        yield from super().done(status)


class _Reasoning(_Item):
    """As a summary, for those who asked for one, it is the reasoning itself: nobody here writes another."""

    def __init__(self, index: int, has_summary: bool, has_sealed: bool):
        super().__init__(index, "rs")
        self._has_summary, self._has_sealed = has_summary, has_sealed

    def _part(self) -> Fields:
        return {"type": "summary_text" if self._has_summary else "reasoning_text", "text": self.text}

    def item(self, status: str) -> Fields:
        made: Fields = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        if status == "in_progress":
            return made
        made["summary" if self._has_summary else "content"] = [self._part()]
        return made | {"encrypted_content": sealed(self.text)} if self._has_sealed else made

    def _of_part(self, type: str, **more: Any) -> Fields:
        if self._has_summary:
            return self._event(f"reasoning_summary_{type}", summary_index=0, **more)
        return self._event(f"content_{type}" if "part" in type else f"reasoning_{type}", content_index=0, **more)

    def begin(self) -> Iterator[Fields]:
        yield from super().begin()
        yield self._of_part("part.added", part=self._part())

    def more(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._pieces.append(text)
        yield self._of_part("text.delta", delta=text)

    def done(self, status: str) -> Iterator[Fields]:
        yield self._of_part("text.done", text=self.text)
        yield self._of_part("part.done", part=self._part())
        yield from super().done(status)


class _Call(_Item):
    def __init__(self, index: int, call_id: str, called: Callable):
        super().__init__(index, "fc")
        self._call_id, self._called = call_id, called

    def item(self, status: str) -> Fields:
        made: Fields = {"id": self.id, "type": "function_call", "status": status, "call_id": self._call_id}
        if self._called.namespace is not None:
            made["namespace"] = self._called.namespace
        return made | {"name": self._called.name, "arguments": self.text}

    def more(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._pieces.append(text)
        yield self._event("function_call_arguments.delta", delta=text)

    def done(self, status: str) -> Iterator[Fields]:
        yield self._event("function_call_arguments.done", name=self._called.name, arguments=self.text)
        yield from super().done(status)


class _CustomCall(_Item):
    """Its text comes at once: it is taken out of the arguments when they are whole."""

    def __init__(self, index: int, call_id: str, called: Callable):
        super().__init__(index, "ctc")
        self._call_id, self._called = call_id, called

    def item(self, status: str) -> Fields:
        made: Fields = {"id": self.id, "type": "custom_tool_call", "status": status, "call_id": self._call_id}
        if self._called.namespace is not None:
            made["namespace"] = self._called.namespace
        return made | {"name": self._called.name, "input": custom_text(self.text, status == "completed")}

    def more(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._pieces.append(text)
        yield from ()

    def done(self, status: str) -> Iterator[Fields]:
        text = custom_text(self.text, status == "completed")
        yield self._event("custom_tool_call_input.delta", delta=text)
        yield self._event("custom_tool_call_input.done", input=text)
        yield from super().done(status)


class Output:
    """Builds the items of one answer, fed with its neutral events; `items` are the finished ones."""

    def __init__(self, options: OutputOptions):
        self._options = options
        self._open: _Item | None = None
        self._blank = ""  # text without a visible character, which belongs to nothing if a call follows
        self._logprobs: list[Fields] = []
        self._num_pending = 0  # tokens whose text has not come
        self.items: list[Fields] = []
        self.num_reasoning_tokens = 0
        self.finished: AnswerFinished | None = None

    def feed(self, event: AnswerEvent) -> Iterator[Fields]:
        """Yield the API's events for one neutral event, without their sequence numbers."""
        match event:
            case TokenAdded():
                self._note_token(event)
            case ReasoningDelta(text):
                self.num_reasoning_tokens += self._num_pending
                self._take_logprobs()
                yield from self._more(_Reasoning, text)
            case TextDelta(text):
                yield from self._more_text(text)
            case ToolCallStarted(index, id, name) if self._takes(index):
                self._take_logprobs()
                self._blank = ""
                yield from self._begin(self._call(id, name))
            case ToolArgumentsDelta(index, text) if self._takes(index) and self._open is not None:
                yield from self._open.more(text, [])
            case ToolCallEnded(index, is_whole) if self._takes(index):
                yield from self._end("completed" if is_whole else "incomplete")
            case AnswerFinished():
                yield from self._finish(event)

    def _takes(self, call: int) -> bool:
        return self._options.max_calls is None or call < self._options.max_calls

    def _note_token(self, token: TokenAdded) -> None:
        self._num_pending += 1
        if self._options.logprobs is not None:
            made = self._options.logprobs(token)
            if made is not None:
                self._logprobs.append(made)

    def _take_logprobs(self) -> list[Fields]:
        taken, self._logprobs, self._num_pending = self._logprobs, [], 0
        return taken

    def _more_text(self, text: str) -> Iterator[Fields]:
        if not isinstance(self._open, _Message):
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank, ""
        yield from self._more(_Message, text, self._take_logprobs())

    def _more(
        self, kind: type[_Message] | type[_Reasoning], text: str, logprobs: list[Fields] | None = None
    ) -> Iterator[Fields]:
        if not isinstance(self._open, kind):
            options, index = self._options, self._next_index
            is_message = kind is _Message
            yield from self._begin(
                _Message(index) if is_message else _Reasoning(index, options.has_summary, options.has_sealed)
            )
        assert self._open is not None
        yield from self._open.more(text, logprobs or [])

    @property
    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _call(self, id: str, name: str) -> _Item:
        called = self._options.callables.get(name, Callable(name, None, is_custom=False))
        return (_CustomCall if called.is_custom else _Call)(self._next_index, id, called)

    def _begin(self, item: _Item) -> Iterator[Fields]:
        yield from self._end("completed")
        self._open = item
        item.id = derived_id(item.prefix, self._options.answer_id, item.index, "_")
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Fields]:
        if self._open is not None:
            yield from self._open.done(status)
            self.items.append(self._open.item(status))
            self._open = None

    def _finish(self, event: AnswerFinished) -> Iterator[Fields]:
        self.finished = event
        if self._blank:
            yield from self._more(_Message, self._blank, self._take_logprobs())
        is_whole = event.reason in (AnswerReason.STOP, AnswerReason.TOOL_CALLS)
        yield from self._end("completed" if is_whole else "incomplete")
        if is_whole and not any(item["type"] != "reasoning" for item in self.items):
            yield from self._begin(_Message(self._next_index))  # clients look for a message or a call
            yield from self._end("completed")
