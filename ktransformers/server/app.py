"""Puts the service together: routes, error shapes, and the middleware in front of them. Does not start anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ktransformers import __version__
from ktransformers.server.admission import Admission
from ktransformers.server.api import front, health, helpers, profile, requests, status, tokens, web
from ktransformers.server.api.anthropic import errors as anthropic_errors
from ktransformers.server.api.anthropic import messages
from ktransformers.server.api.ollama import answers as ollama_answers
from ktransformers.server.api.ollama import embed as ollama_embed
from ktransformers.server.api.ollama import models as ollama_models
from ktransformers.server.api.ollama import refused as ollama_refused
from ktransformers.server.api.ollama.writer import error_fields as ollama_error
from ktransformers.server.api.openai import chat, completions, embeddings, models
from ktransformers.server.api.openai.responses.route import add_responses
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.api_paths import PAGE_PREFIX
from ktransformers.server.http.hosts import HostRule
from ktransformers.server.middleware import ApiKeys, BodyLimits, PlainPaths, SameSite
from ktransformers.server.responses import ERROR_SHAPES, ApiResponse, install_error_handlers
from ktransformers.server.service import Service
from ktransformers.server.telemetry.metrics import Metrics, Refusals
from ktransformers.server.telemetry.request_log import RequestLog
from ktransformers.server.telemetry.status_window import RecentRequests
from ktransformers.server.telemetry.traces import TraceSink

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

__all__ = ["create_app", "model_app", "put_in_front"]

ERROR_SHAPES.append((anthropic_errors.PATH, anthropic_errors.error_shape))

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI's own spans and logs hold what clients sent. Ours are in traces.py."""


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}


_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: _error("The request is wrong"),
    401: _error("The API key is missing or wrong"),
    403: _error("A web page of another site asks"),
    404: _error("There is no such model"),
    408: _error("Too slow"),
    409: _error("It is so already"),
    413: _error("The body is too large"),
    429: _error("This API key has used up what it may"),
    421: _error("The request names a host that this server is not"),
    503: _error("Not now: loading, draining, or too many requests wait"),
}


ERROR_SHAPES.append(("/api/", ollama_error))


def create_app(backend: BackendInterfaceBase, config: ServerConfig, traces: TraceSink | None = None) -> FastAPI:
    """Return the app of the service over a backend; whoever calls this starts and closes the backend and `traces`."""
    app = model_app(backend, config, traces)
    put_in_front(app, config, app.state.service.recent, traces)
    return app


def model_app(backend: BackendInterfaceBase, config: ServerConfig, traces: TraceSink | None = None) -> FastAPI:
    """Return the app with the routes alone, without the middleware of put_in_front."""
    app = FastAPI(
        title="ktransformers",
        version=__version__,
        default_response_class=ApiResponse,
        responses=_RESPONSES,
        docs_url=None,  # FastAPI's own pages load scripts from the internet; see api/front.py
        redoc_url=None,
        telemetry=_NO_TELEMETRY,
        redirect_slashes=False,  # see PlainPaths
    )
    metrics = Metrics(backend, config.model_names[0])
    service = Service(backend, config, Admission(config.max_queue, config.max_queue_per_key), metrics, traces)
    app.state.service = service
    app.state.paths = [route.split()[1] for route, _ in front.ROUTES]
    for module in (chat, completions, embeddings, models, tokens, requests, status, profile, health, helpers, front):
        app.include_router(module.router)
    for router in (
        messages.router,
        ollama_answers.router,
        ollama_answers.generate_router,
        ollama_embed.router,
        ollama_embed.one_router,
        ollama_models.router,
        ollama_refused.router,
        tokens.detokenize_router,
    ):
        app.include_router(router)
    add_responses(app, config)
    if config.has_web:
        app.mount(PAGE_PREFIX, web.page_files())
    install_error_handlers(app)
    app.add_middleware(BodyLimits, max_body=lambda: service.json_limits.max_bytes, body_timeout=config.body_timeout)
    _drop_422(app)
    return app


def put_in_front(app: FastAPI, config: ServerConfig, recent: RecentRequests, traces: TraceSink | None) -> None:
    """Add the middleware that requests pass before they reach routes, and which logs them. The last one added is the
    outermost.
    """
    if config.api_keys:
        local = HostRule((), bound=config.host) if config.is_loopback else None
        app.add_middleware(ApiKeys, keys=config.api_keys, limits=config.key_limits, local=local)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(SameSite, hosts=HostRule(config.host_names, bound=config.host), cors_origins=config.cors_origins)
    app.add_middleware(anthropic_errors.RequestIds)
    app.add_middleware(PlainPaths)
    app.state.refusals = Refusals()
    app.add_middleware(RequestLog, recent=recent, traces=traces, refusals=app.state.refusals)


def _drop_422(app: FastAPI) -> None:
    """FastAPI documents a 422 for wrong bodies; ours are a 400 in OpenAI's shape."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
