"""Writes answers as Ollama does: lines of JSON, or one object; counts and durations (nanoseconds) in the last."""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from ktransformers.errors import KTransformersError
from ktransformers.server.answers.events import (
    AnswerFinished,
    AnswerReason,
    AnswerStep,
    ReasoningDelta,
    TextDelta,
    TokenAdded,
    ToolArgumentsDelta,
    ToolCallEnded,
    ToolCallStarted,
    WholeCall,
)
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.respond import Writer
from ktransformers.server.api.openai.logprobs import chat_logprobs
from ktransformers.server.http.json_limits import MAX_DEPTH, json_size
from ktransformers.server.responses import json_bytes

__all__ = ["ChatWriter", "Fields", "GenerateWriter", "OllamaWriter", "error_fields", "nanoseconds", "timestamp"]

logger = logging.getLogger(__name__)

Fields = dict[str, Any]
"""A part of the JSON that is sent."""

_REASONS = {AnswerReason.LENGTH: "length", AnswerReason.ABORT: "abort"}  # "stop" for the others, tool calls too


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def error_fields(status: int, message: str, code: str | None, param: str | None) -> Fields:
    """Return the body of an error, which in Ollama's API is the message alone."""
    return {"error": message}


def nanoseconds(seconds: float) -> int:
    """Return seconds as whole nanoseconds, at least 1: clients divide by it."""
    return max(1, round(seconds * 1e9))


@dataclass(slots=True)
class _Piece:
    """What became of the answer since the last piece. Calls are whole."""

    text: str = ""
    thinking: str = ""
    calls: list[Fields] = field(default_factory=list)
    logprobs: list[Fields] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.thinking or self.calls or self.logprobs)


class OllamaWriter(Writer):
    """Writes answers as Ollama does; a subclass says where an answer's text goes. model: the name for the answer.
    began: of the request, on time.perf_counter's clock.
    """

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, prepared: PreparedRequest, model: str, began: float):
        self._prepared, self._model, self._began = prepared, model, began
        self._piece = _Piece()
        self._open: dict[int, WholeCall] = {}
        self._finished: AnswerFinished | None = None

    @abstractmethod
    def _content(self, piece: _Piece) -> Fields:
        """The fields that carry a piece."""

    def write(self, step: AnswerStep) -> Iterator[bytes]:
        """Yield the lines of the stream for this step."""
        self.keep(step)
        if not self._piece.is_empty:
            yield self._line(self._shown() | {"done": False})
            self._piece = _Piece()
        if self._finished is not None:
            yield self._line(self._shown() | self._end())

    def end(self, error: KTransformersError | None) -> Iterator[bytes]:
        """Yield the line that says why a stream ended early."""
        if error is not None:
            yield self._line({"error": str(error)})

    def keep(self, step: AnswerStep) -> None:
        """Add a step of an answer to what is written next."""
        piece = self._piece
        for event in step.events:
            match event:
                case TextDelta(text):
                    piece.text += text
                case ReasoningDelta(text):
                    piece.thinking += text
                case TokenAdded(token_id, logprobs, is_end) if logprobs is not None and not is_end:
                    piece.logprobs.append(chat_logprobs(self._prepared.tokenizer, token_id, logprobs))
                case ToolCallStarted(index, id, name):
                    self._open[index] = WholeCall(id, name)
                case ToolArgumentsDelta(index, text):
                    self._open[index].arguments += text
                case ToolCallEnded(index):
                    self._close(index)
                case AnswerFinished():
                    self._finished = event

    def body(self) -> Fields:
        """Return the whole answer as one object."""
        return self._shown() | self._end()

    def _close(self, index: int) -> None:
        """Arguments are an object here, so a call whose arguments are none has no form; `done_reason` says if it was
        cut off.
        """
        call = self._open.pop(index)
        arguments = _object(call.arguments)
        if arguments is None:
            logger.info("a tool call is left out of an answer: its arguments are no whole JSON object")
            return
        function = {"index": index, "name": call.name, "arguments": arguments}
        self._piece.calls.append({"id": call.id, "function": function})

    def _shown(self) -> Fields:
        logprobs = {"logprobs": self._piece.logprobs} if self._piece.logprobs else {}
        head = {"model": self._model, "created_at": timestamp(time.time())}
        return head | self._content(self._piece) | logprobs

    def _end(self) -> Fields:
        assert self._finished is not None
        stats, total = self._prepared.usage(), time.perf_counter() - self._began
        # The first token comes with the prompt's computing: one alone took no time of its own.
        decoding = stats.decode_seconds or total - stats.prefill_seconds
        return {
            "done": True,
            "done_reason": _REASONS.get(self._finished.reason, "stop"),
            "total_duration": nanoseconds(total),
            "load_duration": 0,  # the model is always there
            "prompt_eval_count": stats.prompt_len,
            "prompt_eval_duration": nanoseconds(stats.prefill_seconds),
            "eval_count": stats.completion_len,
            "eval_duration": nanoseconds(decoding),
        }

    def _line(self, content: Fields) -> bytes:
        return json_bytes(content) + b"\n"


class ChatWriter(OllamaWriter):
    """Writes answers of /api/chat."""

    def _content(self, piece: _Piece) -> Fields:
        message: Fields = {"role": "assistant", "content": piece.text}
        if piece.thinking:
            message["thinking"] = piece.thinking
        if piece.calls:
            message["tool_calls"] = piece.calls
        return {"message": message}


class GenerateWriter(OllamaWriter):
    """Writes answers of /api/generate."""

    def _content(self, piece: _Piece) -> Fields:
        return {"response": piece.text} | ({"thinking": piece.thinking} if piece.thinking else {})


def _object(text: str) -> Fields | None:
    """The JSON object that the text is; None when it is none, or deeper than clients' parsers go."""
    if json_size(text.encode("utf-8", "surrogatepass")).depth > MAX_DEPTH:
        return None
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
