"""The way from a route to a response, which all dialects share: counted in, prepared, then one body or a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import Request
from starlette.responses import Response

from ktransformers.errors import KTransformersError
from ktransformers.server.answers.events import AnswerStep
from ktransformers.server.answers.pictures import RequestPictures
from ktransformers.server.answers.prepared_request import PreparedRequest, prepare
from ktransformers.server.answers.replay import REPLAY_KEY, Replay, RequestBody, without_reader, write_down
from ktransformers.server.answers.requests import ChatRequest, TextRequest
from ktransformers.server.answers.resumable import attached, check_media_type, keep_seconds, keep_writing
from ktransformers.server.bodies import body_size
from ktransformers.server.http.api_paths import SCOPE_KEY, USE_KEY
from ktransformers.server.http.fields import note_dropped, note_ignored
from ktransformers.server.http.keys import KeyUse
from ktransformers.server.ongoing import Ongoing
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of
from ktransformers.server.streaming import EventStream, unless_disconnected
from ktransformers.server.telemetry.request_log import note_request, request_id_of

__all__ = ["Writer", "respond"]

_CheckedRequest = ChatRequest | TextRequest


class Writer(ABC):
    """Writes the answers to one request as a dialect does: as a stream (begin, write, end) or as one body (keep, body).

    Called on the event loop, between two tokens: nothing here may take long. media_type: of the stream.
    ping: what may stand between two parts of it to say that the server lives; b"" where the dialect has no such thing.
    """

    media_type: ClassVar[str] = "text/event-stream"
    ping: ClassVar[bytes] = b": keep-alive\n\n"

    def begin(self) -> Iterator[bytes]:
        """Yield the parts that a stream begins with, before anything is computed."""
        yield from ()

    @abstractmethod
    def write(self, step: AnswerStep) -> Iterator[bytes]:
        """Yield the parts of a stream for this step. Each is sent by itself."""

    @abstractmethod
    def end(self, error: KTransformersError | None) -> Iterator[bytes]:
        """Yield the parts that a stream ends with. error: why it ends before its answers are complete."""

    @abstractmethod
    def keep(self, step: AnswerStep) -> None:
        """Add a step of answers that are sent as one body. Errors become a response of their own."""

    @abstractmethod
    def body(self) -> Any:
        """Return the body of answers that are not streamed, to be written as JSON, when all steps are in."""


async def respond(
    request: Request,
    num_answers: int,
    is_streamed: bool,
    read: Callable[[], ChatRequest | TextRequest],
    writer_of: Callable[[PreparedRequest], Writer],
    more_bytes: int = 0,
    beside: Callable[[], bytes] = bytes,
    edited: Callable[[ChatRequest], ChatRequest] | None = None,
) -> Response:
    """Count the request in, before any work is done for it; then return one JSON object or a stream of events.

    num_answers: that it wants. read: from the dialect's body to the request; runs on a thread, where texts may take
    long. more_bytes: that it goes through beside the body's. beside: what the body says of other requests; the journal
    has it for the server that asks again (Opened). edited: changes a conversation whose pictures are read; on a thread.
    Raises KTransformersError for whatever is wrong before the response begins.
    """
    service, key = service_of(request), request.scope.get(USE_KEY)
    seconds = keep_seconds(request, service.config, is_streamed)
    size = await body_size(request) + more_bytes
    service.admission.enter(service.backend.max_running, num_answers, key)
    replay: Replay | None = request.scope.get(REPLAY_KEY)
    pictures = RequestPictures(service, () if replay is None else replay.kept.opened.pictures)

    def leave() -> None:
        service.admission.leave(num_answers, key)
        pictures.release()

    is_streaming = False
    try:
        asked = _prioritized(await service.workers.run(size, read), service, key)
        if isinstance(asked, ChatRequest):
            asked = replace(asked, conversation=await pictures.read(asked.conversation))
        prepared = await service.workers.run(size, lambda: _prepared(service, asked, edited, replay))
        note_request(request, prepared.answering(is_streamed))
        note_ignored(request.scope, prepared.ignored)
        note_dropped(request.scope, prepared.num_dropped)
        writer = writer_of(prepared)
        if seconds is not None:
            check_media_type(writer.media_type)
        one = _ongoing(request, prepared)
        if not is_streamed:
            return await unless_disconnected(request, _whole(prepared, writer, one))
        is_streaming = True
        if seconds is None:
            return _streamed(prepared, writer, one, leave)
        service.ongoing.add(one)
        log = service.ongoing.keep(one, seconds, writer.media_type, writer.ping)
        if service.ongoing.journal is not None:
            sent = RequestBody(request.scope["path"], await request.body(), beside, pictures.shown)
            write_down(service.ongoing.journal, sent, prepared, one, replay)
        keep_writing(service.ongoing, one, _stream(prepared, writer), log, leave)
        if replay is not None:
            return without_reader(service, one)
        return attached(service, one, 0)
    finally:
        if not is_streaming:
            leave()


def _prepared(
    service: Service,
    asked: _CheckedRequest,
    edited: Callable[[ChatRequest], ChatRequest] | None,
    replay: Replay | None,
) -> PreparedRequest:
    if edited is not None and isinstance(asked, ChatRequest):
        asked = edited(asked)
    if replay is None:
        return prepare(service, asked)
    prepared = prepare(service, replace(asked, id=replay.kept.opened.id))
    replay.restore(prepared)
    return prepared


def _ongoing(request: Request, prepared: PreparedRequest) -> Ongoing:
    one = Ongoing(
        id=request_id_of(request),
        answer_id=prepared.id,
        key=str(request.scope.get(SCOPE_KEY, "")),
        generation_ids=[generation.request_id for generation in prepared.requests],
        request_metrics=prepared.request_metrics,
    )

    def is_suspended() -> bool:  # perhaps before its answers have begun
        return one.is_suspended

    prepared.requests = [replace(generation, is_suspended=is_suspended) for generation in prepared.requests]
    return one


def _streamed(prepared: PreparedRequest, writer: Writer, one: Ongoing, leave: Callable[[], None]) -> Response:
    """A stream that ends with its connection."""
    service, config = prepared.service, prepared.service.config
    service.ongoing.add(one)

    def end() -> None:
        service.ongoing.ended(one)
        leave()

    parts = _stream(prepared, writer)
    return EventStream(parts, writer.media_type, config.send_timeout, end, writer.ping, config.ping_seconds)


def _prioritized(asked: _CheckedRequest, service: Service, key: KeyUse | None) -> _CheckedRequest:
    """With the priority that its key has, where there are priorities."""
    if key is None or not service.backend.has_priorities:
        return asked
    return replace(asked, priority=key.priority(asked.priority))


async def _whole(prepared: PreparedRequest, writer: Writer, one: Ongoing) -> Response:
    ongoing = prepared.service.ongoing
    ongoing.add(one)
    try:
        async with aclosing(prepared.steps()) as steps:
            async for step in steps:
                writer.keep(step)
    finally:
        ongoing.ended(one)
    return ApiResponse(writer.body())


async def _stream(prepared: PreparedRequest, writer: Writer) -> AsyncGenerator[bytes, None]:
    failed = None
    try:
        for part in writer.begin():
            yield part
        async with aclosing(prepared.steps()) as steps:
            async for step in steps:
                for part in writer.write(step):
                    yield part
    except KTransformersError as error:
        failed = error
    for part in writer.end(failed):
        yield part
