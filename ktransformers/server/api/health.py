"""Routes that say whether the process lives, whether it serves, and what it is. /health and /ready need no API key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers import __version__
from ktransformers.errors import NotReadyError
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import service_of
from ktransformers.server.telemetry.request_log import refusals_of

__all__ = ["router"]

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 as long as the process answers."""
    return ApiResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer 200 when requests are served, 503 while the model loads, while an engine is replaced, while the server
    drains.
    """
    service = service_of(request)
    if service.admission.is_draining:
        raise NotReadyError("the server is shutting down")
    if service.backend.pause is not None:
        raise NotReadyError(service.backend.pause)
    service.model  # noqa: B018 - raises while loading
    return ApiResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    service = service_of(request)
    more = refusals_of(request)
    text, content_type = service.metrics.render(more) if service.group is None else service.group.metrics(more)
    return Response(text, media_type=content_type)


@router.get("/version")
async def version(request: Request) -> Response:
    """Answer with the version of the program, and the backend that answers."""
    return ApiResponse({"version": __version__, "backend": service_of(request).backend.name})
