"""The way from a route to a response, which chat and text completions share. Knows no fields but `stream`'s."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from ktransformers.server.api_paths import SCOPE_KEY
from ktransformers.server.generations import Tally
from ktransformers.server.request_log import note_request
from ktransformers.server.schemas import GenerationFields
from ktransformers.server.service import Service
from ktransformers.server.streaming import EventStream, unless_disconnected

__all__ = ["Job", "UsageShape", "respond"]


class Job(Protocol):
    """A checked request, ready to run."""

    id: str
    tally: Tally


AnyJob = TypeVar("AnyJob", bound=Job)


async def respond(
    service: Service,
    request: Request,
    body: GenerationFields,
    num_answers: int,
    prepare: Callable[[], Awaitable[AnyJob]],
    answer: Callable[[AnyJob], Coroutine[Any, Any, Response]],
    stream: Callable[[AnyJob], AsyncGenerator[bytes, None]],
) -> Response:
    """Count the request in, before any work is done for it; then one JSON object, or a stream of events.

    num_answers: that it wants. prepare: tokenizes and checks; raises what is wrong with the request.
    """
    key = request.scope.get(SCOPE_KEY, "")
    service.admission.enter(service.backend.max_running, num_answers, key)
    leave = partial(service.admission.leave, num_answers, key)
    is_streaming = False
    try:
        job = await prepare()
        note_request(request, job.id, job.tally)
        if body.stream:
            response = EventStream(stream(job), service.config.send_timeout, on_end=leave)
            is_streaming = True
            return response
        return await unless_disconnected(request, answer(job))
    finally:
        if not is_streaming:
            leave()


@dataclass(frozen=True, slots=True)
class UsageShape:
    """Where a stream carries its usage.

    is_last_chunk: in a chunk of its own, and every other chunk says `usage: null`: OpenAI's include_usage.
    is_in_finish: in the chunk that finishes the last choice, which is what scripts of upstream's users read.
    Neither: nowhere.
    """

    is_last_chunk: bool
    is_in_finish: bool

    @classmethod
    def of(cls, body: GenerationFields) -> UsageShape:
        wanted = None if body.stream_options is None else body.stream_options.include_usage
        return cls(is_last_chunk=bool(wanted), is_in_finish=wanted is None)

    @property
    def filler(self) -> dict[str, Any]:
        """What chunks without usage carry."""
        return {"usage": None} if self.is_last_chunk else {}
