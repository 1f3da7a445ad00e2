"""Requests that go on in another process: what the journal records of them, and how they are replayed from that.

A request is read and prepared anew from its body, with the id, the prompt and the parameters that it had; its tokens
so far are then replayed, so that parsers and writers are where they were and every event has the bytes that it had.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ktransformers.core import PastToken, TokenEvent
from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.media.picture import ReadPicture
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.resumable import KEEP_HEADER
from ktransformers.server.http.api_paths import SCOPE_KEY
from ktransformers.server.journal.journal import MAX_TRIES, Journal
from ktransformers.server.journal.records import GenerationRecord, Kept, Opened
from ktransformers.server.ongoing import Ongoing
from ktransformers.server.service import Service
from ktransformers.server.telemetry.request_log import note_id, without_quotes
from ktransformers.weights.digests.files import exact_fingerprint

__all__ = ["REPLAY_KEY", "Replay", "RequestBody", "resume_requests", "without_reader", "write_down"]

logger = logging.getLogger("ktransformers.server")

REPLAY_KEY = "ktransformers.replay"
"""Where a request that is asked again has its Replay."""

_LEAST_SECONDS = 0.001
_GOES_ON = 204


@dataclass(frozen=True, slots=True)
class Replay:
    """A request from the journal, to be answered from where the previous server left it."""

    kept: Kept

    def restore(self, prepared: PreparedRequest) -> None:
        """Restore prompts, parameters and past tokens of the request from the journal. Raises ConfigError when it makes
        another number of answers now.
        """
        opened = self.kept.opened
        if len(prepared.requests) != len(opened.generations):
            raise ConfigError(f"it had {len(opened.generations)} answers, and has {len(prepared.requests)} now")
        digests = {item.digest for request in prepared.requests for item in request.media}
        if not digests.issuperset(item.digest for item in opened.media):
            raise ConfigError("its pictures are gone, and are not the same when they are read again")
        timeout = None if opened.deadline is None else max(opened.deadline - time.time(), _LEAST_SECONDS)
        prepared.requests = [
            replace(
                request,
                prompt_ids=opened.prompts[generation.prompt],
                media=opened.media,
                params=replace(generation.params, stop=request.params.stop),
                priority=generation.priority,
                cache_salt=generation.cache_salt,
                timeout=timeout,
                past=[token for token in self.kept.tokens if token.index == index],
            )
            for index, (request, generation) in enumerate(zip(prepared.requests, opened.generations, strict=True))
        ]
        prepared.order = [token.index for token in self.kept.tokens]
        prepared.request_metrics.requests, prepared.created = prepared.requests, opened.created


class _Recorder:
    """Writes the tokens of one request down, but for those that were written down before."""

    def __init__(self, journal: Journal, id: str, num_past: int):
        self._journal, self._id, self._num_past, self._num_sent = journal, id, num_past, 0

    def __call__(self, index: int, event: TokenEvent) -> None:
        token = PastToken.of(index, event)
        if token is None:
            return
        if self._num_sent >= self._num_past:
            self._journal.note(self._id, self._num_sent, token)
        self._num_sent += 1


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A request's path and body, as the journal's Opened keeps them. beside: called where it is written down.
    pictures: see Opened.
    """

    path: str
    body: bytes
    beside: Callable[[], bytes] = bytes
    pictures: tuple[ReadPicture | str, ...] = ()


def write_down(
    journal: Journal, asked: RequestBody, prepared: PreparedRequest, one: Ongoing, replay: Replay | None
) -> None:
    """Record this request in the journal, and its tokens from now on."""
    one.is_journaled, num_past = True, 0
    if replay is None:
        journal.opened(_opened(journal, asked, prepared, one))
    else:
        kept, num_past = replay.kept, len(replay.kept.tokens)
        one.is_replayed, one.is_suspended, one.created = True, kept.is_suspended, kept.opened.created
        num_tries = kept.num_tries + (not kept.is_suspended)  # nothing of it runs, so it ends no server
        journal.suspended(one.answer_id, kept.is_suspended, num_tries)
    prepared.on_event = _Recorder(journal, prepared.id, num_past)


def _opened(journal: Journal, asked: RequestBody, prepared: PreparedRequest, one: Ongoing) -> Opened:
    prompts = tuple({id(request.prompt_ids): request.prompt_ids for request in prepared.requests}.values())
    places = {id(prompt): place for place, prompt in enumerate(prompts)}
    timeout, stream = prepared.requests[0].timeout, one.stream
    assert stream is not None
    return Opened(
        id=prepared.id,
        request_id=one.id,
        key=journal.digest_of(_api_key(prepared.service, one.key)),
        path=asked.path,
        body=asked.body,
        beside=asked.beside(),
        keep_seconds=stream.seconds,
        created=prepared.created,
        deadline=None if timeout is None else time.time() + timeout,
        prompts=prompts,
        media=prepared.requests[0].media,  # only conversations have pictures, and one prompt
        pictures=asked.pictures,
        generations=tuple(
            GenerationRecord(
                places[id(request.prompt_ids)], replace(request.params, stop=()), request.priority, request.cache_salt
            )
            for request in prepared.requests
        ),
    )


def _api_key(service: Service, key: str) -> str:
    """The key that a request came with. key: as ApiKeys names it, its place among them."""
    return service.config.api_keys[int(key)] if key else ""


def without_reader(service: Service, one: Ongoing) -> Response:
    """Return the response to a replayed request without a client; the time for which its stream is kept begins."""
    service.ongoing.attach(one)
    service.ongoing.detach(one)
    return Response(status_code=_GOES_ON)


async def resume_requests(app: FastAPI, service: Service, journal: Journal) -> None:
    """Resume the requests that the previous server had in its journal. One that cannot go on is forgotten, with a line
    in the log.

    The model is loaded; nothing else has been asked yet.
    """
    model = service.model
    kept = journal.begin(await asyncio.to_thread(exact_fingerprint, model.digest, model.weights, journal.folder))
    keys = {journal.digest_of(key): str(place) for place, key in enumerate(service.config.api_keys)}
    keys.setdefault("", "")
    num_taken = 0
    for one in kept:
        try:
            await _replay(app, one, keys)
            num_taken += 1
        except (KTransformersError, HTTPException, RequestValidationError) as error:
            reason = without_quotes(str(error)) if isinstance(error, KTransformersError) else type(error).__name__
            logger.warning("%s cannot go on after the restart: %s", one.opened.id, reason)
            journal.closed(one.opened.id)
    service.ongoing.is_restoring = False
    if kept:
        logger.info("%d requests go on where they were before the restart, %d do not", num_taken, len(kept) - num_taken)


async def _replay(app: FastAPI, kept: Kept, keys: MutableMapping[str, str]) -> None:
    opened = kept.opened
    if kept.num_tries >= MAX_TRIES:
        raise ConfigError(f"{MAX_TRIES} starts of the server ended before it had another token")
    if opened.key not in keys:
        raise ConfigError("the API key that it came with is not one any more, or there were none")
    headers = {"content-type": "application/json", KEEP_HEADER: f"{opened.keep_seconds:g}"}
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": opened.path,
        "raw_path": opened.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "app": app,
        SCOPE_KEY: keys[opened.key],
        REPLAY_KEY: Replay(kept),
    }
    note_id(scope, opened.request_id)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": opened.body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != _GOES_ON:
            raise ConfigError(f"{opened.path} answers with {message['status']} now")

    route = AsyncExitStackMiddleware(app.router)  # what else is in front of routes let it in before
    await route(scope, receive, send)
