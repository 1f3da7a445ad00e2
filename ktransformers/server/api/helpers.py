"""Routes that other servers have and tools ask for: vLLM's and llama.cpp's, as far as they mean something here.

What they are called, and what they answer: vllm/entrypoints/openai/api_server.py, llama.cpp/tools/server/README.md.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from ktransformers import __version__
from ktransformers.core import SamplingParams
from ktransformers.server.api.sampling_fields import DrawFields
from ktransformers.server.api.status import state_of
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["router"]

router = APIRouter()

_NOT_SERVED = {
    "scores and ranks no texts": ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    "classifies no texts, and shows no hidden states": ("/classify", "/pooling", "/v1/moderations"),
    "neither hears nor speaks": ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
    "makes no images": ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
}


@router.get("/v1/health")
@router.get("/ping")
async def ping(request: Request) -> Response:
    """Answer 200 as long as the process answers, as /health does."""
    return ApiResponse({"status": "ok"})


@router.get("/load")
async def load(request: Request) -> Response:
    """Answer with how many requests are computed or wait, under vLLM's name."""
    return ApiResponse({"server_load": sum(one.admission.num_active for one in service_of(request).beside)})


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Answer with what is served, and how: the model, its limits, the backend."""
    service = service_of(request)
    model, config = service.model, service.config
    return ApiResponse(
        {
            "version": __version__,
            "backend": service.backend.name,
            "status": state_of(service),
            "model": service.model_names[0],
            "architecture": model.architecture,
            "description": model.description,
            "max_model_len": model.max_len,
            "speculative": model.drafter if model.max_drafts else "off",
            "speculative_tokens": model.max_drafts,
            "vocab_size": model.vocab_size,
            "max_running_requests": service.backend.max_running,
            "max_queued_requests": config.max_queue,
            "default_sampling": _sampling(service),
            "default_max_tokens": config.max_new_tokens,  # None: to the end of the context
        }
    )


def _sampling(service: Service) -> dict[str, Any]:
    """What requests get that name nothing."""
    params: SamplingParams = service.model.default_params
    return {name: service.config.sampling.get(name, getattr(params, name)) for name in DrawFields.model_fields}


def _tokens(model: ModelInfo) -> dict[str, Any]:
    """The special tokens that templates write, and the template; None where the model's files hold none."""
    if not model.tokenizer.has_vocabulary:
        return dict.fromkeys(("bos_token", "eos_token", "chat_template"))
    backend = model.tokenizer.backend
    return {name: getattr(backend, name) for name in ("bos_token", "eos_token", "chat_template")}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Answer with what a client needs to render and count prompts itself, under vLLM's names."""
    model = service_of(request).model
    tokenizer = model.tokenizer
    known: dict[str, Any] = {
        "tokenizer_class": type(tokenizer.backend).__name__ if tokenizer.has_vocabulary else None,
        "model_max_length": model.max_len,
        "vocab_size": model.vocab_size,
        "eos_token_ids": list(model.eos_token_ids),
    }
    return ApiResponse(known | _tokens(model))


@router.get("/props")
async def props(request: Request) -> Response:
    """Answer, under llama.cpp's names, with slots, context, sampling of requests that name none, and chat template."""
    service = service_of(request)
    model, sampling = service.model, _sampling(service)
    params = {name: value for name, value in sampling.items() if name != "repetition_penalty"}
    params |= {"repeat_penalty": sampling["repetition_penalty"], "n_predict": service.config.max_new_tokens or -1}
    tokens = _tokens(model)
    template = tokens.pop("chat_template")
    return ApiResponse(
        {
            "default_generation_settings": {"n_ctx": model.max_len, "params": params},
            "total_slots": service.backend.max_running,
            "model_alias": service.model_names[0],
            "model_path": service.model_names[0],  # a name: where files lie is not for clients
            "modalities": {"vision": "image" in model.modalities, "audio": False},
            "chat_template": template if isinstance(template, str) else (template or {}).get("default", ""),
            "build_info": f"ktransformers {__version__}",
            "is_sleeping": False,
        }
        | tokens
    )


@router.get("/slots")
async def slots(request: Request) -> Response:
    """Answer, under llama.cpp's names, with one entry for each request that can be computed at once."""
    service = service_of(request)
    model, num_running = service.model, service.backend.stats().num_running
    shared = {"n_ctx": model.max_len, "speculative": model.max_drafts > 0}
    return ApiResponse(
        [{"id": index, **shared, "is_processing": index < num_running} for index in range(service.backend.max_running)]
    )


def _missing_route(path: str, text: str) -> None:
    @router.api_route(path, methods=["GET", "POST"], include_in_schema=False)
    async def missing(request: Request) -> Response:
        """Answer 404 with why this route is left out, rather than misspelled."""
        raise HTTPException(404, f"{path} is not served: this server {text}; / names its routes")


for _text, _paths in _NOT_SERVED.items():
    for _path in _paths:
        _missing_route(_path, _text)
