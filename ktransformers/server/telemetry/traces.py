"""Makes the spans of a request for answers, named by the GenAI semantic conventions. Knows no OpenTelemetry: see
otlp.py.

    chat demo ─┬─ prepare   from its arrival until its prompt is ready to be computed
               ├─ queue     until a step is planned for it                       each of its answers has
               ├─ prefill   until its first token ─── prefill chunk, ...         these three of its own
               └─ decode    until its last token ─── prefill chunk, ... (computed again after a preemption);
                            embeddings have none

Names and numbers only: no text of a user or of an answer, no names of tools, no header. Names that the conventions do
not have begin with `ktransformers.`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Protocol

from ktransformers.core import FinishReason, GenerationStats, SamplingParams
from ktransformers.server.backend.timeline import Chunk, Timeline
from ktransformers.server.telemetry.request_metrics import RequestMetrics

__all__ = ["MAX_CHUNK_SPANS", "Answering", "Operation", "Outcome", "Span", "TraceSink", "operation_of", "span_of"]

MAX_CHUNK_SPANS = 256
"""Of one request, all its answers together; `ktransformers.prefill.chunks` counts the others too."""

ABORTED = "aborted"
"""error.type of an answer that nobody waited for, or that the end of the service cut off."""

_Value = str | bool | int | float | Sequence[str]


class Operation(StrEnum):
    """Operation of a request, as the span attribute gen_ai.operation.name has it."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"


_OPERATIONS = {
    "/v1/chat/completions": Operation.CHAT,
    "/v1/messages": Operation.CHAT,
    "/v1/responses": Operation.CHAT,
    "/api/chat": Operation.CHAT,
    "/v1/completions": Operation.TEXT_COMPLETION,
    "/api/generate": Operation.TEXT_COMPLETION,
    "/v1/embeddings": Operation.EMBEDDINGS,
    "/api/embed": Operation.EMBEDDINGS,
    "/api/embeddings": Operation.EMBEDDINGS,
}


def operation_of(path: str) -> Operation | None:
    """Return the operation of requests for this path, refused ones too. None: requests for it have no spans."""
    return _OPERATIONS.get(path)


@dataclass(frozen=True, slots=True)
class Answering:
    """Facts about the answer to a request, for the log and traces. id: of the answer. model: the served name that it
    goes by.

    is_prompt_only: see PreparedRequest.
    """

    id: str
    request_metrics: RequestMetrics
    operation: Operation
    model: str
    is_streamed: bool = False
    is_prompt_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A request for answers that is over. path: a route's. status 0: there was no response. seconds: from its arrival.

    answering: None for one that was refused. error: the name of our error's class, if there was one, else "".
    server: address and port that it came to.
    """

    path: str
    status: int
    seconds: float
    answering: Answering | None = None
    error: str = ""
    server: tuple[str, int | None] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a trace. began, ended: nanoseconds since 1970. Children lie inside, in the order of their
    beginnings.
    """

    name: str
    began: int
    ended: int
    attributes: Mapping[str, _Value] = field(default_factory=dict)
    children: Sequence[Span] = ()
    error: str = ""


class TraceSink(Protocol):
    """Receiver of the spans of requests."""

    def write(self, span: Span, headers: Mapping[str, Sequence[str]]) -> None:
        """Take in a request's spans, without waiting for anybody. headers: of the request, names in lower case."""
        ...

    def close(self) -> None:
        """Send what is left, and take in no more."""
        ...


def span_of(outcome: Outcome) -> Span | None:
    """Return the request's span, which ends now, with all that belongs to it. None: its path has none."""
    answering = outcome.answering
    operation = operation_of(outcome.path) if answering is None else answering.operation
    if operation is None:
        return None
    now = time.time_ns()
    clock = _Clock(now - round(outcome.seconds * 1e9), now, now - time.monotonic_ns())
    error = _error(outcome)
    name = operation.value if answering is None else f"{operation} {answering.model}"
    children = [] if answering is None else list(_children(answering, clock))
    return Span(name, clock.first, clock.last, _attributes(outcome, operation, error), children, error)


def _error(outcome: Outcome) -> str:
    """error.type: a class of ours, else a status, else that somebody gave up. "": none of these."""
    error = outcome.error or (outcome.answering.request_metrics.error if outcome.answering is not None else "")
    if error or outcome.answering is None:
        return error or str(outcome.status or ABORTED)
    reasons = outcome.answering.request_metrics.finish_reasons
    if outcome.status == 0 or any(reason in (None, FinishReason.ABORT) for reason in reasons):
        return ABORTED
    return str(outcome.status) if outcome.status >= 400 else ""


def _attributes(outcome: Outcome, operation: Operation, error: str) -> dict[str, _Value]:
    made: dict[str, _Value] = {
        "gen_ai.operation.name": operation.value,
        "gen_ai.provider.name": "ktransformers",
        "http.route": outcome.path,
    }
    if outcome.server is not None:
        made["server.address"] = outcome.server[0]
        if outcome.server[1] is not None:
            made["server.port"] = outcome.server[1]
    if outcome.status:
        made["http.response.status_code"] = outcome.status
    if error:
        made["error.type"] = error
    if outcome.answering is not None:
        made |= _of_answers(outcome.answering)
    return made


def _of_answers(answering: Answering) -> dict[str, _Value]:
    request_metrics, total = answering.request_metrics, answering.request_metrics.total
    made: dict[str, _Value] = {
        "gen_ai.request.model": answering.model,
        "gen_ai.response.model": answering.model,
        "gen_ai.response.id": answering.id,
        "gen_ai.usage.input_tokens": total.prompt_len,
        "gen_ai.usage.cache_read.input_tokens": total.cached_len,
    }
    if answering.operation is Operation.EMBEDDINGS:
        return made
    made["gen_ai.usage.output_tokens"] = 0 if answering.is_prompt_only else total.completion_len
    reasons = [str(reason) for reason in request_metrics.finish_reasons if reason is not None]
    if reasons:
        made["gen_ai.response.finish_reasons"] = reasons
    if answering.is_streamed:
        made["gen_ai.request.stream"] = True
    if request_metrics.num_answers > 1:
        made["gen_ai.request.choice.count"] = request_metrics.num_answers
    return made | _of_params(request_metrics.requests[0].params)


def _of_params(params: SamplingParams) -> dict[str, _Value]:
    """As they took effect. Of stop strings, which are text, the count."""
    made: dict[str, _Value] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "ktransformers.request.stop_sequences": len(params.stop),
    }
    if params.top_k > 0:
        made["gen_ai.request.top_k"] = float(params.top_k)
    if params.max_tokens is not None:
        made["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:  # attributes are signed; -1 and 2**64 - 1 are the same seed
        made["gen_ai.request.seed"] = (params.seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return made


@dataclass(frozen=True, slots=True)
class _Clock:
    """From the monotonic clock to nanoseconds since 1970, no earlier and no later than the request's own span."""

    first: int
    last: int
    offset: int

    def at(self, seconds: float | None) -> int:
        """Return seconds on the monotonic clock as nanoseconds since 1970. None: never, so that what would have ended
        then ended with the request.
        """
        if seconds is None:
            return self.last
        return min(max(round(seconds * 1e9) + self.offset, self.first), self.last)


def _children(answering: Answering, clock: _Clock) -> Iterator[Span]:
    request_metrics = answering.request_metrics
    timelines = [(index, request.timeline) for index, request in enumerate(request_metrics.requests)]
    room = MAX_CHUNK_SPANS
    for index, timeline in timelines:
        if timeline is None:
            continue
        if index == 0:
            yield Span("prepare", clock.first, clock.at(timeline.created))
        which: dict[str, _Value] = {"ktransformers.answer": index} if len(timelines) > 1 else {}
        chunks = timeline.chunks[:room]
        room -= len(chunks)
        phases = _phases(timeline, request_metrics.stats(index), chunks, which, clock)
        yield from phases if answering.operation is not Operation.EMBEDDINGS else islice(phases, 2)


def _phases(
    timeline: Timeline,
    stats: GenerationStats | None,
    chunks: Sequence[Chunk],
    which: Mapping[str, _Value],
    clock: _Clock,
) -> Iterator[Span]:
    """queue, prefill and decode of one answer, as far as it got. Each begins where the one before it ends."""
    created, first_token, ended = clock.at(timeline.created), clock.at(timeline.first_token), clock.at(timeline.ended)
    has_begun = timeline.began is not None or timeline.first_token is not None
    began = clock.at(timeline.began) if timeline.began is not None else created if has_begun else ended
    yield Span("queue", created, began, which)
    if not has_begun:
        return
    made = [_chunk(chunk, clock) for chunk in chunks]
    is_first = [timeline.first_token is None or one.ended <= first_token for one in made]
    prefill = {**which, "ktransformers.prefill.chunks": timeline.num_chunks}
    if stats is not None:
        prefill["ktransformers.prefill.tokens"] = stats.prompt_len - stats.cached_len
        prefill["ktransformers.prefill.cached_tokens"] = stats.cached_len
    end = ended if timeline.first_token is None else first_token
    yield Span("prefill", began, end, prefill, [one for one, first in zip(made, is_first, strict=True) if first])
    if timeline.first_token is None or stats is None:
        return
    decode = {**which, "ktransformers.decode.tokens": stats.completion_len}
    if stats.num_drafted:
        decode["ktransformers.decode.draft_tokens"] = stats.num_drafted
        decode["ktransformers.decode.accepted_tokens"] = stats.num_accepted
    if stats.completion_len > 1 and ended > first_token:
        decode["ktransformers.decode.tokens_per_second"] = (stats.completion_len - 1) * 1e9 / (ended - first_token)
    again = [one for one, first in zip(made, is_first, strict=True) if not first]
    yield Span("decode", first_token, ended, decode, again)


def _chunk(chunk: Chunk, clock: _Clock) -> Span:
    attributes: dict[str, _Value] = {
        "ktransformers.chunk.tokens": chunk.num_tokens,
        "ktransformers.chunk.position": chunk.position,
        "ktransformers.step.rows": chunk.num_rows,
    }
    return Span("prefill chunk", clock.at(chunk.began), clock.at(chunk.ended), attributes)
