"""Hands each request to the app of the model that it names, once that model runs.

    body ── read_routing_fields ──> name ──> model ── manager.enter: waits while it loads ──> its app ── leave

Requests without a body that names a model go to an app without waiting: the routes there know all models
(Service.beside), and find what is asked for by its id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import parse_qs

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from ktransformers.errors import DeadlineError, KTransformersError, NotReadyError
from ktransformers.server.answers.resumable import KEEP_HEADER
from ktransformers.server.api.ollama.names import plain_name
from ktransformers.server.api.openai.responses.store import ResponseStore
from ktransformers.server.app import put_in_front
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.api_paths import USE_KEY
from ktransformers.server.http.json_limits import JsonLimits
from ktransformers.server.http.keys import KeyUse
from ktransformers.server.http.workers import TextWorkers
from ktransformers.server.multi_model.early_stream import EarlyStream
from ktransformers.server.multi_model.model_manager import ModelManager
from ktransformers.server.multi_model.pool import ModelState
from ktransformers.server.multi_model.routing import ANSWERING, STREAMING, RoutingFields, read_routing_fields
from ktransformers.server.multi_model.served import ServedModel
from ktransformers.server.responses import ApiResponse, install_error_handlers
from ktransformers.server.telemetry.request_log import note_reason, without_quotes
from ktransformers.server.telemetry.status_window import RecentRequests
from ktransformers.server.telemetry.traces import TraceSink

__all__ = ["Gateway", "gateway_app"]

logger = logging.getLogger(__name__)

_SHORT = 16 << 10
"""Bytes that are parsed in less time than a hand-over to another thread takes to pay."""


def gateway_app(gateway: Gateway, config: ServerConfig, traces: TraceSink | None = None) -> FastAPI:
    """Return the app of all models, whose middleware in front of routes is there once."""
    app = FastAPI(title="ktransformers", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.default = gateway
    install_error_handlers(app)
    put_in_front(app, config, gateway.share(), traces)
    return app


class Gateway:
    """ASGI app that hands each request to the app of its model. models: in the order of their file; the first answers
    requests that name none, or one that nobody knows. is_started: whether those that are wanted from the start are
    loaded.
    """

    def __init__(self, models: Sequence[ServedModel], manager: ModelManager, config: ServerConfig):
        self._models, self._manager, self._config = models, manager, config
        self._workers = TextWorkers()
        self.is_started = False
        for model in models:
            model.service.admission.watch = self._watcher(model.name)

    def _watcher(self, name: str) -> Callable[[bool], None]:
        """Requests that are in keep their model, though their connection may be gone: streams may be kept."""

        def watch(is_busy: bool) -> None:
            if is_busy:
                self._manager.use(name)
            else:
                self._manager.leave(name)

        return watch

    def share(self) -> RecentRequests:
        """Let all models share the store of kept answers and the last requests, which are returned."""
        store, recent = ResponseStore(self._config.responses_store), RecentRequests()
        for model in self._models:
            model.app.state.responses = store
            model.service.recent = recent
        return recent

    def close(self) -> None:
        """End the threads for texts."""
        self._workers.close()
        for model in self._models:
            model.service.workers.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises KTransformersError before a response has begun."""
        inner = {name: value for name, value in scope.items() if name != "router"}
        if scope["type"] != "http":
            await self._models[0].app(inner, receive, send)
        elif scope["method"] == "POST" and scope["path"] in ANSWERING and _may_be_json(scope):
            await self._answer(inner, receive, send)
        elif scope["path"] == "/ready":
            await self._ready(inner, receive, send)
        else:
            await self._picked(scope).app(inner, receive, send)

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while requests are taken: models that are stopped are loaded for them."""
        if self._manager.is_draining:
            raise NotReadyError("the server is shutting down")
        if not self.is_started:
            raise NotReadyError("the models are being loaded")
        await ApiResponse({"status": "ready"})(scope, receive, send)

    def _picked(self, scope: Scope) -> ServedModel:
        """By ?model=NAME, else the first that runs, else the first. Raises ModelNotFoundError."""
        names = parse_qs(scope["query_string"].decode("latin-1")).get("model", [])
        if names:
            model = self._known(scope["path"], names[-1])
            if model is None:
                raise self._models[0].service.not_served(names[-1])
            return model
        return next((model for model in self._models if model.backend.is_ready), self._models[0])

    def _known(self, path: str, asked: str | None) -> ServedModel | None:
        if asked is None:
            return None
        found = next((model for model in self._models if asked in model.names), None)
        if found is None and path.startswith("/api/"):
            found = next((one for one in self._models if plain_name(one.service, asked) in one.names), None)
        return found

    # Requests that need a model.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole(receive)
        if body is None:
            return
        path, replayed = scope["path"], _Replayed(body, receive)
        asked = await self._read(path, body)
        if asked is None:
            await self._models[0].app(scope, replayed, send)
            return
        known = self._known(path, asked.model)
        if known is None:
            self._models[0].service.check_model(asked.model)  # raises with --strict_model_name
        model = known or self._models[0]
        if asked.is_only_unload and self._manager.pool.state(model.name) is not ModelState.RUNNING:
            await model.app(scope, replayed, send)  # which says that it is not loaded, and loads nothing
            return
        early = EarlyStream(send, path) if self._may_begin_early(scope, asked) else None
        if not self._manager.try_enter(model.name) and not await self._wait(scope, receive, model.name, asked, early):
            return
        try:
            if asked.keep_alive is not None and known is not None:
                self._manager.keep_for(model.name, asked.keep_alive)
            await model.app(scope, replayed, send if early is None else early.send)
        finally:
            self._manager.leave(model.name)

    async def _read(self, path: str, body: bytes) -> RoutingFields | None:
        each = [model.service.json_limits for model in self._models]
        limits = JsonLimits(
            *(max(getattr(one, name) for one in each) for name in ("max_bytes", "max_values", "max_nodes"))
        )
        if len(body) < _SHORT:
            return read_routing_fields(path, body, limits)
        return await self._workers.run(len(body), read_routing_fields, path, body, limits)

    def _may_begin_early(self, scope: Scope, asked: RoutingFields) -> bool:
        """Not those whose heads say what becomes known later."""
        is_kept = any(name == KEEP_HEADER.encode() for name, _ in scope["headers"])
        return asked.is_streamed and scope["path"] in STREAMING and self._config.ping_seconds > 0 and not is_kept

    async def _wait(
        self, scope: Scope, receive: Receive, name: str, asked: RoutingFields, early: EarlyStream | None
    ) -> bool:
        """Wait for the model. False: the client has left, or has been sent in a stream why there is no answer.

        Raises KTransformersError where no stream has begun.
        """
        key: KeyUse | None = scope.get(USE_KEY)
        if key is not None:  # counted as in Admission, which the request has not come to
            key.check(1)
            key.num_answers += 1
        try:
            return await self._entered(receive, name, asked.timeout or self._config.request_timeout, early)
        except KTransformersError as error:
            if early is None or not early.has_begun:
                raise
            note_reason(scope, without_quotes(str(error)), error)
            await early.fail(error)
            return False
        finally:
            if key is not None:
                key.num_answers -= 1

    async def _entered(self, receive: Receive, name: str, timeout: float | None, early: EarlyStream | None) -> bool:
        """Whether it is a user of the model now; False: the client has left."""
        entering = asyncio.create_task(self._manager.enter(name))
        leaving = asyncio.create_task(_left(receive))
        is_in = False
        try:
            async with asyncio.timeout(timeout):
                while not entering.done() and not leaving.done():
                    pause = None if early is None else self._config.ping_seconds
                    await asyncio.wait((entering, leaving), timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                    if early is not None and not entering.done() and not leaving.done():
                        await early.ping()
            if entering.done():
                entering.result()  # raises why it cannot be had
                is_in = True
            return is_in
        except TimeoutError:
            raise DeadlineError(f"the model {name} was not loaded within the {timeout:g} s of the request") from None
        finally:
            await self._end(entering, leaving)
            if not is_in and entering.done() and not entering.cancelled() and entering.exception() is None:
                self._manager.leave(name)

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _may_be_json(scope: Scope) -> bool:
    """By its content type, which Ollama's routes do not look at. No model is loaded for what routes refuse at once."""
    given = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return b"json" in given.lower() or scope["path"].startswith("/api/")


async def _whole(receive: Receive) -> bytes | None:
    """The body; None when the client has left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    with suppress(KTransformersError):
        while (await receive())["type"] != "http.disconnect":
            pass


class _Replayed:
    """A body that has been read, then whatever comes behind it."""

    def __init__(self, body: bytes, receive: Receive):
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        """The next message (ASGI)."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
