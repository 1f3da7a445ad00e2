"""GET /, which shows what there is to a person with a browser or to a program; and GET /docs, which needs no internet.

Neither holds a secret: where an API key is needed, `/` says what the program is, and not which models it serves.
"""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from ktransformers import __version__
from ktransformers.server.api import web
from ktransformers.server.api.ollama.front import running
from ktransformers.server.api.status import state_of
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["ROUTES", "router"]

router = APIRouter(include_in_schema=False)

ROUTES: tuple[tuple[str, str], ...] = (
    ("POST /v1/chat/completions", "the next turn of a conversation (OpenAI's API)"),
    ("POST /v1/completions", "the continuation of a text or of token ids"),
    ("POST /v1/embeddings", "vectors of texts or of token ids"),
    ("POST /v1/responses", "the next turn as items (OpenAI's API, for Codex and agents)"),
    ("GET /v1/responses/{id}", "an answer that was kept"),
    ("DELETE /v1/responses/{id}", "forget it"),
    ("GET /v1/responses/{id}/input_items", "what it answered"),
    ("POST /v1/responses/{id}/cancel", "a 400: nothing runs in the background"),
    ("POST /v1/messages", "the next turn of a conversation (Anthropic's API)"),
    ("POST /v1/messages/count_tokens", "how many tokens the prompt of such a request has"),
    ("GET /v1/models", "the names that requests may use"),
    ("GET /v1/models/{name}", "one of them"),
    ("POST /api/chat", "the next turn of a conversation (Ollama's API)"),
    ("POST /api/generate", "the answer to a prompt"),
    ("POST /api/embed", "vectors of texts"),
    ("POST /api/embeddings", "the vector of one text"),
    ("GET /api/tags", "the models that there are"),
    ("GET /api/ps", "the models that are loaded"),
    ("POST /api/show", "all about one model"),
    ("GET /api/version", "the version of Ollama whose API this is"),
    ("POST /tokenize", "token ids of a text or of a conversation"),
    ("POST /detokenize", "the text of token ids"),
    ("GET /v1/requests", "your requests that are in: state and lengths"),
    ("POST /v1/requests/{id}/suspend", "set one aside, so that others get its place"),
    ("POST /v1/requests/{id}/resume", "go on with it"),
    ("GET /v1/requests/{id}/stream", "take its stream up again"),
    ("DELETE /v1/requests/{id}", "end it"),
    ("GET /v1/profile", "whether a profile is written, and what is in it"),
    ("POST /v1/profile/start", "record where the time of steps and tokens goes"),
    ("POST /v1/profile/stop", "the end of that"),
    ("GET /v1/status", "queue, cache, speed and the last requests"),
    ("GET /health", "200 as long as the process answers"),
    ("GET /v1/health", "the same"),
    ("GET /ping", "the same"),
    ("GET /ready", "200 when requests are served"),
    ("GET /metrics", "figures in Prometheus' text format"),
    ("GET /version", "the version of the program, and the backend"),
    ("GET /server_info", "what is served, and how"),
    ("GET /tokenizer_info", "special tokens and chat template"),
    ("GET /props", "the model and its settings, as llama.cpp says it"),
    ("GET /slots", "what is computed at once, as llama.cpp says it"),
    ("GET /load", "how many requests are in"),
    ("GET /docs", "every field of every route, to read and to try"),
    ("GET /openapi.json", "the same for programs"),
)
"""Every public route with one line about it."""

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
    "td{padding:.2rem 1rem .2rem 0;vertical-align:top}code{white-space:nowrap}"
)
_SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
_CLOSED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_FRONT_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; {_CLOSED}"
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    f"connect-src 'self'; {_CLOSED}"
)

_DOCS_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ktransformers: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui">This page needs JavaScript; <a href="openapi.json">openapi.json</a> says the same.</div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
# validatorUrl: Swagger UI would send the document to a service on the internet.
_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
});
"""
_ASSETS = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}


def _facts(service: Service) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": "ktransformers", "version": __version__, "status": state_of(service)}
    if service.config.api_keys:
        facts["authentication"] = "send Authorization: Bearer KEY, or x-api-key: KEY"
    else:
        facts["models"] = [name for one in service.beside for name in one.model_names]
    return facts | {"docs": "/docs", "health": "/health", "routes": dict(ROUTES)}


def _page(facts: dict[str, Any]) -> str:
    models = "".join(f"<li><code>{html.escape(name)}</code></li>" for name in facts.get("models", ()))
    shown = f"<p>Models:</p><ul>{models}</ul>" if models else "<p>Requests need an API key.</p>"
    routes = "".join(
        f"<tr><td><code>{html.escape(route)}</code></td><td>{html.escape(text)}</td></tr>" for route, text in ROUTES
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>ktransformers</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>'
        f"<h1>ktransformers {html.escape(facts['version'])}</h1><p>Status: {facts['status']}. "
        f'<a href="docs">The API</a>, <a href="health">health</a></p>{shown}<table>{routes}</table></body></html>\n'
    )


@router.api_route("/", methods=["GET", "HEAD"])
async def front(request: Request) -> Response:
    """Answer GET / with JSON for who asks for it; browsers get the chat, or the same facts where it is off; others
    Ollama's line.
    """
    service = service_of(request)
    is_browser = "text/html" in request.headers.get("accept", "")
    if is_browser and service.config.has_web:
        return web.page()
    if not is_browser and (response := running(request)) is not None:
        return response
    facts = _facts(service)
    headers = {**_SAFE, "Vary": "Accept", "Cache-Control": "no-store"}
    if is_browser:
        return HTMLResponse(_page(facts), headers={**headers, "Content-Security-Policy": _FRONT_POLICY})
    return ApiResponse(facts, headers=headers)


@router.get("/docs")
async def docs() -> Response:
    """Answer with Swagger UI over /openapi.json; everything that it loads comes from this server."""
    return HTMLResponse(_DOCS_PAGE, headers={**_SAFE, "Content-Security-Policy": _DOCS_POLICY})


@router.get("/docs/start.js")
async def start() -> Response:
    """Answer with the script that starts Swagger UI."""
    return Response(_START, media_type="text/javascript", headers=_SAFE)


def _asset_route(name: str, media_type: str) -> None:
    @router.get(f"/docs/{name}")
    def asset() -> Response:  # not async: reads a file, on a thread
        data = files("fastapi_offline").joinpath("static", name).read_bytes()
        return Response(data, media_type=media_type, headers={**_SAFE, "Cache-Control": "max-age=86400"})


for _name, _media_type in _ASSETS.items():
    _asset_route(_name, _media_type)
