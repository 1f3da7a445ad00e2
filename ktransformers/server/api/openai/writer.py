"""Parts that OpenAI's two ways to write answers share: chunks as server-sent events, and where they carry the usage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

from ktransformers.core import GenerationStats
from ktransformers.errors import KTransformersError
from ktransformers.server.answers.events import AnswerStep, TokenAdded
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.respond import Writer
from ktransformers.server.api.openai.schemas import GenerationFields
from ktransformers.server.responses import error_body, json_bytes

__all__ = ["OpenAIWriter", "drafts_of", "image_tokens_of"]

Fields = dict[str, Any]
"""A part of the JSON that is sent."""

_DONE = b"data: [DONE]\n\n"


def _sse(content: Fields) -> bytes:
    """One event whose data is JSON."""
    return b"data: " + json_bytes(content) + b"\n\n"


class OpenAIWriter(Writer):
    """Base of OpenAI's writers; a subclass writes the elements of `choices`. kind, chunk_kind: what `object` says, of a
    body and of a chunk.

    A stream's usage comes in a chunk of its own, and every other chunk says `usage: null`, with OpenAI's include_usage;
    without stream_options in the chunk that finishes the last choice, which is what scripts of upstream's users read;
    else nowhere. With ignore_eos, which measuring asks for, a token without text has a chunk too: they are counted.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, prepared: PreparedRequest, body: GenerationFields):
        self.prepared = prepared
        self._shows_tokens = bool(body.ignore_eos)
        self._num_open, self._with_speed = len(prepared.requests), bool(body.return_speed)
        wanted = None if body.stream_options is None else body.stream_options.include_usage
        self._has_last_chunk, self._is_in_finish = bool(wanted), wanted is None
        self._is_in_all = bool(body.stream_options is not None and body.stream_options.continuous_usage_stats)
        self._num_sent = 0  # tokens of all answers so far; the engine is ahead of what is sent
        self._fingerprint = prepared.service.fingerprint

    @abstractmethod
    def _chunk_choices(self, step: AnswerStep) -> Iterable[Fields]:
        """The choices that a stream shows of this step, each in a chunk of its own."""

    @abstractmethod
    def _choices(self) -> list[Fields]:
        """The choices of a body."""

    def write(self, step: AnswerStep) -> Iterator[bytes]:
        """Yield the stream's chunks for this step."""
        self._num_sent += sum(isinstance(event, TokenAdded) for event in step.events)
        for choice in self._chunk_choices(step):
            self._num_open -= choice["finish_reason"] is not None
            yield self._chunk(choice, has_usage=self._is_in_finish and not self._num_open)

    def end(self, error: KTransformersError | None) -> Iterator[bytes]:
        """Yield the chunks that end the stream."""
        if error is not None:
            yield _sse(error_body(error))
        elif self._has_last_chunk:
            yield _sse(self._head(self.chunk_kind) | {"choices": [], "usage": self._usage()})
        yield _DONE

    def body(self) -> Fields:
        """Return the whole answer as one object."""
        return self._head(self.kind) | {"choices": self._choices(), "usage": self._usage()}

    def _head(self, kind: str) -> Fields:
        return {
            "id": self.prepared.id,
            "object": kind,
            "created": self.prepared.created,
            "model": self.prepared.model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, choice: Fields, *, has_usage: bool = False) -> bytes:
        usage: Fields = {"usage": None} if self._has_last_chunk else {}
        if has_usage:
            usage = {"usage": self._usage()}
        elif self._is_in_all:
            usage = {"usage": self._usage(self._num_sent)}
        return _sse(self._head(self.chunk_kind) | {"choices": [choice]} | usage)

    def _usage(self, num_sent: int | None = None) -> Fields:
        """num_sent: tokens of the answers; None: as many as were computed."""
        stats = self.prepared.usage()
        usage = _usage(stats if num_sent is None else replace(stats, completion_len=num_sent), self._with_speed)
        usage["prompt_tokens_details"] |= image_tokens_of(self.prepared)
        return usage


def image_tokens_of(prepared: PreparedRequest) -> Fields:
    """Return the count of the prompt's positions that show pictures, where there are some."""
    return {"image_tokens": prepared.num_image_tokens} if prepared.num_image_tokens else {}


def drafts_of(stats: GenerationStats) -> Fields:
    """Return OpenAI's two counts of draft tokens. Unlike there, those that were rejected are in no other count."""
    return {"accepted_prediction_tokens": stats.num_accepted, "rejected_prediction_tokens": stats.num_rejected}


def _usage(stats: GenerationStats, with_speed: bool) -> Fields:
    """with_speed adds prefill_time and decode_time in seconds."""
    usage: Fields = {
        "prompt_tokens": stats.prompt_len,
        "completion_tokens": stats.completion_len,
        "total_tokens": stats.prompt_len + stats.completion_len,
        "prompt_tokens_details": {"cached_tokens": stats.cached_len},
        "completion_tokens_details": drafts_of(stats),
    }
    if with_speed:
        usage |= {"prefill_time": stats.prefill_seconds, "decode_time": stats.decode_seconds}
    return usage
