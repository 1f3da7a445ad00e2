"""Routes /v1/requests: the ongoing requests, and what a client may do with its own: suspend, resume, re-attach, end."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ConfigError, ConflictError, NotReadyError
from ktransformers.server.answers.resumable import KEEP_HEADER, attached
from ktransformers.server.http.api_paths import SCOPE_KEY
from ktransformers.server.ongoing import Ongoing
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["router"]

router = APIRouter()

_EVENT_ID = re.compile(r"[0-9]{1,18}", re.ASCII)
_UNCACHED = {"Cache-Control": "no-store"}


def _key_of(request: Request) -> str:
    return str(request.scope.get(SCOPE_KEY, ""))


def _found(request: Request, id: str) -> tuple[Service, Ongoing]:
    asked, key = service_of(request), _key_of(request)
    knowing = [one for one in asked.beside if one.ongoing.knows(key, id)]
    if len(knowing) > 1:
        raise ConflictError(f"requests to {len(knowing)} models are called {id[:100]!r}: use the id of the answer")
    service = knowing[0] if knowing else asked
    return service, service.ongoing.get(key, id)


@router.get("/v1/requests")
async def list_requests(request: Request) -> Response:
    """Answer with this API key's requests that are ongoing or have kept streams, the oldest first. No texts."""
    key = _key_of(request)
    found = [one for service in service_of(request).beside for one in service.ongoing.of_key(key)]
    found.sort(key=lambda one: one.created)
    return ApiResponse({"object": "list", "data": [one.described() for one in found]}, headers=_UNCACHED)


@router.post("/v1/requests/{id:path}/suspend")
async def suspend_request(id: str, request: Request) -> Response:
    """Suspend a request, at whatever step it is: it takes nothing of the cache until it is resumed."""
    service, one = _found(request, id)
    if service.admission.is_draining:
        raise NotReadyError("the server is shutting down: nothing is suspended any more")
    service.ongoing.suspend(one)
    await service.ongoing.written_down(one)
    return ApiResponse(one.described())


@router.post("/v1/requests/{id:path}/resume")
async def resume_request(id: str, request: Request) -> Response:
    """Resume a suspended request, with the tokens that it would have had."""
    service, one = _found(request, id)
    service.ongoing.resume(one)
    await service.ongoing.written_down(one)
    return ApiResponse(one.described())


@router.get("/v1/requests/{id:path}/stream")
async def attach_to_request(id: str, request: Request) -> Response:
    """Answer with the stream of a request sent with x-kt-keep, from the event after Last-Event-ID on, or from the
    first.
    """
    service, one = _found(request, id)
    if one.stream is None:
        raise ConflictError(f"the stream of this request is not kept: send {KEEP_HEADER}: SECONDS with the request")
    last_seen = _last_seen(request)
    one.stream.log.check(last_seen, one.is_replayed)
    return attached(service, one, last_seen)


@router.delete("/v1/requests/{id:path}")
async def end_request(id: str, request: Request) -> Response:
    """End a request, and forget its stream. Whoever reads that receives ABORT."""
    service, one = _found(request, id)
    service.ongoing.end(one)
    return ApiResponse({"id": id, "object": "request", "deleted": True})


def _last_seen(request: Request) -> int:
    given = request.headers.getlist("last-event-id")
    if not given:
        return 0
    if len(given) > 1 or not _EVENT_ID.fullmatch(given[0]):
        raise ConfigError("Last-Event-ID must be the id of an event of this stream, a whole number")
    return int(given[0])
