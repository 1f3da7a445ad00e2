"""What GET /v1/models says to Anthropic's clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Request

from ktransformers.server.service import Service

__all__ = ["described_model", "described_models", "is_asked_for"]


def is_asked_for(request: Request) -> bool:
    """Whether the client is one of Anthropic's."""
    return "anthropic-version" in request.headers


def described_model(service: Service, name: str) -> dict[str, Any]:
    """One name. Raises NotReadyError while the model loads."""
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
    """All names, on one page."""
    models = [described_model(one, name) for one in service.beside for name in one.listed_names]
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
