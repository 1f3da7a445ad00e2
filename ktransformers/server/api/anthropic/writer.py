"""Writes answers as Anthropic's API has them: blocks of thinking, text and tool calls, streamed or as one message.

    message_start ping (content_block_start content_block_delta* content_block_stop)* message_delta message_stop

Blocks are numbered from 0 and never overlap. An error in the middle is a last event `error`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic_core import from_json

from ktransformers.core import GenerationStats
from ktransformers.errors import KTransformersError, NotReadyError
from ktransformers.server.answers.events import (
    AnswerFinished,
    AnswerReason,
    AnswerStarted,
    AnswerStep,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.respond import Writer
from ktransformers.server.api.anthropic.errors import PATH
from ktransformers.server.responses import error_body, json_bytes

__all__ = ["MessageWriter"]

Fields = dict[str, Any]
"""A part of the JSON that is sent."""

_SIGNATURE = "ktransformers"
"""Of thinking. Nothing here asks for it, but clients leave blocks without one out of the history that they send."""

_STOP_REASONS = {
    AnswerReason.STOP: "end_turn",
    AnswerReason.LENGTH: "max_tokens",
    AnswerReason.TOOL_CALLS: "tool_use",
}


def _sse(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + json_bytes({"type": type, **fields}) + b"\n\n"


class MessageWriter(Writer):
    """Writes an answer as Anthropic's API has it. hides_thinking: blocks of thinking are empty. applied_edits: what
    context_management did, None without one. ping: the event that says that the server lives.
    """

    ping: ClassVar[bytes] = _sse("ping")

    def __init__(
        self, prepared: PreparedRequest, *, hides_thinking: bool = False, applied_edits: Sequence[Fields] | None = None
    ):
        self._prepared = prepared
        self._edits: Fields = {}
        if applied_edits is not None:
            self._edits = {"context_management": {"applied_edits": list(applied_edits)}}
        self._hides_thinking = hides_thinking
        self._blocks: list[Fields] = []
        self._is_open = False  # the last of the blocks
        self._arguments = ""  # of the last block, when it is a call
        self._finished: AnswerFinished | None = None

    # Both ways follow the events and keep the blocks; the events that a stream shows come out on the way.

    def write(self, step: AnswerStep) -> Iterator[bytes]:
        """Yield the stream's events for this step."""
        for event in step.events:
            match event:
                case AnswerStarted(stats):
                    yield _sse("message_start", message=self._message([], None, None, stats, 0))
                    yield self.ping
                case AnswerFinished():
                    self._finished = event
                    yield from self._close()
                case _:
                    yield from self._add(event)

    def end(self, error: KTransformersError | None) -> Iterator[bytes]:
        """Yield the events that end the stream."""
        error = error or self._aborted()
        if error is not None:
            body = error_body(error, PATH)
            body.pop("type")
            yield _sse("error", **body)
            return
        assert self._finished is not None
        reason, stop = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield _sse("message_delta", delta=delta, usage=self._usage(self._finished.stats), **self._edits)
        yield _sse("message_stop")

    def keep(self, step: AnswerStep) -> None:
        """Add a step of an answer that is sent as one message."""
        for _ in self.write(step):
            pass

    def body(self) -> Fields:
        """Return the whole answer as one message. Raises NotReadyError for an answer that the server's end cut off."""
        error = self._aborted()
        if error is not None:
            raise error
        assert self._finished is not None
        return self._message(self._blocks, *self._stop(), self._finished.stats) | self._edits

    def _add(self, event: object) -> Iterator[bytes]:
        match event:
            case ReasoningDelta(text):
                yield from self._say("thinking", "" if self._hides_thinking else text)
            case TextDelta(text):
                yield from self._say("text", text)
            case ToolCallStarted(_, id, name):
                yield from self._open(
                    {"type": "tool_use", "id": id.replace("call-", "toolu_", 1), "name": name, "input": {}}
                )
            case ToolArgumentsDelta(_, text):
                self._arguments += text
                yield self._delta("input_json_delta", partial_json=text)
            case ToolCallEnded():
                yield from self._close()

    def _say(self, kind: str, text: str) -> Iterator[bytes]:
        """More of a block of thinking or of text, which is begun when the last one is of another kind."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        if text:
            self._blocks[-1][kind] += text
            yield self._delta(f"{kind}_delta", **{kind: text})

    def _open(self, block: Fields) -> Iterator[bytes]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        yield _sse("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta("signature_delta", signature=_SIGNATURE)
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        self._is_open = False
        yield _sse("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, type: str, **fields: str) -> bytes:
        return _sse("content_block_delta", index=len(self._blocks) - 1, delta={"type": type, **fields})

    # The end.

    def _aborted(self) -> NotReadyError | None:
        if self._finished is not None and self._finished.reason is not AnswerReason.ABORT:
            return None
        return NotReadyError("the server stopped in the middle of the answer")

    def _stop(self) -> tuple[str, str | None]:
        assert self._finished is not None
        if self._prepared.is_prompt_only:
            return "max_tokens", None
        if self._finished.stop is not None and self._finished.reason is AnswerReason.STOP:
            return "stop_sequence", self._finished.stop
        most = self._prepared.requests[0].params.max_tokens
        is_cut = self._finished.reason is AnswerReason.LENGTH
        if is_cut and most is not None and self._finished.stats.completion_len < most:
            return "model_context_window_exceeded", None
        return _STOP_REASONS[self._finished.reason], None

    def _usage(self, stats: GenerationStats, completion_len: int | None = None) -> Fields:
        if completion_len is None:
            completion_len = 0 if self._prepared.is_prompt_only else stats.completion_len
        return {
            "input_tokens": stats.prompt_len - stats.cached_len,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stats.cached_len,
            "output_tokens": completion_len,
        }

    def _message(
        self,
        content: list[Fields],
        reason: str | None,
        stop: str | None,
        stats: GenerationStats,
        completion_len: int | None = None,
    ) -> Fields:
        return {
            "id": self._prepared.id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(stats, completion_len),
        }


def _object(arguments: str) -> Fields:
    """The arguments of a call; of one that was cut off the members that are whole, as official clients read streams."""
    try:
        made = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return made if isinstance(made, dict) else {}
