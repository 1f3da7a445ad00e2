"""The routes below GET /v1/models, which say the names that requests may use. 503 while the model loads: scripts wait
here for it.

Anthropic's clients, which send `anthropic-version`, get their dialect.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.server.api.anthropic.models import described_model, described_models, is_asked_for
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["router"]

router = APIRouter()


def _describe(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "ktransformers",
        "root": service.model_names[0],
        "max_model_len": service.shown_model.max_len,
        "architecture": {"input_modalities": service.shown_model.modalities, "output_modalities": ["text"]},
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Answer with the names to choose from: those that the operator gave, of each model at this address."""
    service = service_of(request)
    if is_asked_for(request):
        return ApiResponse(described_models(service))
    listed = [_describe(one, name) for one in service.beside for name in one.listed_names]
    return ApiResponse({"object": "list", "data": listed})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    """Answer with the entry of one model name."""
    asked = service_of(request)
    service = next((one for one in asked.beside if name in one.model_names), asked)
    described = _describe(service, name)
    if name not in service.model_names:
        raise service.not_served(name)
    return ApiResponse(described_model(service, name) if is_asked_for(request) else described)
