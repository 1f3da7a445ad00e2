"""Routes about the model: GET /api/version, /api/tags, /api/ps and POST /api/show."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers import __version__
from ktransformers.core import SamplingParams
from ktransformers.server.api.ollama.fields import SHOW
from ktransformers.server.api.ollama.names import listed_names, named_service, plain_name
from ktransformers.server.api.ollama.read import knows_thinking
from ktransformers.server.api.ollama.routes import ERRORS, any_type_route
from ktransformers.server.api.ollama.schemas import NameBody
from ktransformers.server.api.ollama.writer import Fields, timestamp
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["API_VERSION", "router"]

router = APIRouter(route_class=any_type_route(SHOW), responses=ERRORS)

API_VERSION = "0.12.11"
"""Of Ollama, whose API this is: clients refuse versions that lack what they need."""

_FOREVER = 100 * 365 * 86400
"""Seconds that a model is said to stay loaded that is never stopped."""

_PARAMETERS = (
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("repetition_penalty", "repeat_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
)
"""Our names and Ollama's."""


def _count(number: int) -> str:
    """30.5B, 494.0M: as Ollama writes numbers of parameters."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _details(model: ModelInfo) -> Fields:
    card = model.card
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.family,
        "families": [card.family] if card.family else None,
        "parameter_size": _count(card.num_parameters),
        "quantization_level": card.quantization or "unknown",
    }


def _entries(service: Service) -> list[Fields]:
    model = service.shown_model
    return [
        {
            "name": name,
            "model": name,
            "size": model.card.num_bytes,
            "digest": model.card.digest,
            "details": _details(model),
        }
        for name in listed_names(service)
    ]


def _model_info(model: ModelInfo) -> Fields:
    """Under GGUF's names. context_length is what this server takes, which may be less than the model was made for."""
    card = model.card
    family = card.family or "unknown"
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": card.num_parameters,
        f"{family}.context_length": model.max_len,
        f"{family}.vocab_size": model.vocab_size,
    }
    counts = {
        "block_count": card.num_layers,
        "embedding_length": card.hidden_size,
        "attention.head_count": card.num_heads,
        "attention.head_count_kv": card.num_kv_heads,
        "expert_count": card.num_experts,
        "expert_used_count": card.num_used_experts,
    }
    return info | {f"{family}.{name}": count for name, count in counts.items() if count}


def _parameters(service: Service) -> str:
    """What requests get that do not say: one line each, as a Modelfile has them."""
    model = service.shown_model
    params = model.default_params
    values = {ours: service.config.sampling.get(ours, getattr(params, ours)) for ours, _ in _PARAMETERS}
    plain = SamplingParams()
    lines = [
        f"{name:<30} {values[ours]}"
        for ours, name in _PARAMETERS
        if ours == "temperature" or values[ours] != getattr(plain, ours)
    ]
    return "\n".join([f"{'num_ctx':<30} {model.max_len}", *lines])


def _template(model: ModelInfo) -> str:
    """The chat template, in Jinja's language."""
    if not model.tokenizer.has_chat_template:
        return ""
    template = model.tokenizer.backend.chat_template
    return str(template.get("default", "")) if isinstance(template, dict) else str(template)


def _capabilities(model: ModelInfo) -> list[str]:
    tokenizer = model.tokenizer
    has_tools = tokenizer.has_tool_calls
    thinks = tokenizer.has_vocabulary and knows_thinking(tokenizer)
    return ["completion", *["tools"] * has_tools, *["thinking"] * thinks, *["vision"] * ("image" in model.modalities)]


@router.get("/api/version")
async def version(request: Request) -> Response:
    """Answer with the version of Ollama whose API this is, and of this program."""
    return ApiResponse({"version": API_VERSION, "ktransformers": __version__})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """Answer with the models at this address. 503 while the only one loads."""
    found = [
        entry | {"modified_at": timestamp(service.shown_model.card.modified)}
        for service in service_of(request).beside
        for entry in _entries(service)
    ]
    return ApiResponse({"models": found})


@router.get("/api/ps")
async def ps(request: Request) -> Response:
    """Answer with the loaded models. size_vram: what the plan has on GPUs, the cache included."""
    loaded = (service for service in service_of(request).beside if service.backend.is_ready)
    return ApiResponse({"models": [entry | _loaded(service) for service in loaded for entry in _entries(service)]})


def _loaded(service: Service) -> Fields:
    end = None if service.group is None else service.group.expires_at(service)
    return {
        "expires_at": timestamp(service.created + _FOREVER if end is None else end),
        "size_vram": service.model.card.gpu_bytes,
        "context_length": service.model.max_len,
    }


@router.post("/api/show")
async def show(body: NameBody, request: Request) -> Response:
    """Answer with all facts about one model."""
    service = named_service(service_of(request), body.model)
    model, name = service.shown_model, plain_name(service, body.model)
    if name not in service.model_names:
        raise service.not_served(body.model)
    parameters, template = _parameters(service), _template(model)
    lines = [f"FROM {name}", f'TEMPLATE """{template}"""', *(f"PARAMETER {line}" for line in parameters.splitlines())]
    shown = {
        "modelfile": "\n".join(lines) + "\n",
        "parameters": parameters,
        "template": template,
        "details": _details(model),
        "model_info": _model_info(model),
        "capabilities": _capabilities(model),
        "modified_at": timestamp(model.card.modified),
    }
    return ApiResponse(shown)
