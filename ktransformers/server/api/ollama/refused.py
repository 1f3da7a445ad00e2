"""Ollama's routes that this server has no way to serve: each says so, and what to do instead."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import UnsupportedError
from ktransformers.server.api.ollama.fields import PULL
from ktransformers.server.api.ollama.names import named_service, plain_name
from ktransformers.server.api.ollama.routes import ERRORS, any_type_route
from ktransformers.server.api.ollama.schemas import NameBody
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import service_of

__all__ = ["router"]

router = APIRouter(route_class=any_type_route(PULL), responses=ERRORS)

_REFUSED = (
    ("POST", "/api/create", "models are not made here: `ktransformers quantize` makes GGUF files"),
    ("POST", "/api/copy", "a model is not copied: --model_name NAME (repeatable) gives it more names"),
    ("DELETE", "/api/delete", "models are not deleted over HTTP: delete the files"),
    ("POST", "/api/push", "models are not uploaded from here"),
    ("POST", "/api/blobs/{digest}", "files are not uploaded over HTTP: start the server on a file"),
    ("HEAD", "/api/blobs/{digest}", "files are not uploaded over HTTP"),
)


@router.post("/api/pull", include_in_schema=False)
async def pull(body: NameBody, request: Request) -> Response:
    """Answer success for the model that is served; a running server fetches no others."""
    service = named_service(service_of(request), body.model)
    if plain_name(service, body.model) in service.model_names:
        return ApiResponse({"status": "success"})
    raise UnsupportedError(
        f"{body.model[:200]!r} is not fetched: a running server gets no new models; `ktransformers pull` fetches "
        "them, and `ktransformers serve` starts a server on them"
    )


def _refuse(method: str, path: str, why: str) -> None:
    @router.api_route(path, methods=[method], include_in_schema=False)
    async def refused() -> Response:
        raise UnsupportedError(why)


for _method, _path, _why in _REFUSED:
    _refuse(_method, _path, _why)
