"""The answers of GET /v1/models to Anthropic's clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from ktransformers.server.service import Service

__all__ = ["described_model", "described_models", "is_asked_for"]


def is_asked_for(request: Request) -> bool:
    """Whether the client of this request is one of Anthropic's."""
    return "anthropic-version" in request.headers


def described_model(service: Service, name: str) -> dict[str, Any]:
    """Return the entry of one model name for Anthropic's clients. Raises NotReadyError while the model loads."""
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": service.shown_model.max_len,
        "max_tokens": service.shown_model.max_len,
    }


def described_models(service: Service) -> dict[str, Any]:
    """Return the entries of all model names at this address, on one page."""
    models = [described_model(one, name) for one in service.beside for name in one.listed_names]
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
