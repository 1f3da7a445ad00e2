"""The routes POST /api/embed and /api/embeddings, for vectors of texts. Too long ones are cut, unless `truncate` is
false.
"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.server.answers.embed import Cut, EmbeddingRequest, Embeddings, respond_embeddings
from ktransformers.server.answers.requests import count_answers, new_id
from ktransformers.server.api.ollama.fields import EMBED, EMBED_ONE
from ktransformers.server.api.ollama.names import plain_name, shown_name
from ktransformers.server.api.ollama.routes import ERRORS, any_type_route
from ktransformers.server.api.ollama.schemas import EmbedBody, EmbedOneBody
from ktransformers.server.api.ollama.writer import nanoseconds
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["one_router", "router"]

router = APIRouter(route_class=any_type_route(EMBED), responses=ERRORS)
one_router = APIRouter(route_class=any_type_route(EMBED_ONE), responses=ERRORS)


@router.post("/api/embed")
async def embed(body: EmbedBody, request: Request) -> Response:
    """Answer with a vector of length 1 for each input, from the hidden states of the model's last layer."""
    began, service = time.perf_counter(), service_of(request)

    def render(made: Embeddings) -> Response:
        return ApiResponse(
            {
                "model": shown_name(service, body.model, made.model),
                "embeddings": [vector.tolist() for vector in made.vectors],
                "total_duration": nanoseconds(time.perf_counter() - began),
                "load_duration": 0,  # the model is always there
                "prompt_eval_count": made.num_tokens,
            }
        )

    inputs = [body.input] if isinstance(body.input, str) else body.input
    if inputs in ([], [""]):  # to load the model, as of a chat without messages
        return render(_none_of(service, body.model))
    asked = EmbeddingRequest(
        id=new_id("embd"),
        model=plain_name(service, body.model),
        inputs=inputs,
        dimensions=body.dimensions,
        cut=None if body.truncate is False else Cut(),
    )
    return await respond_embeddings(request, count_answers(len(asked.inputs), 1), lambda: asked, render)


@one_router.post("/api/embeddings")
async def embeddings(body: EmbedOneBody, request: Request) -> Response:
    """Answer with the embedding of one prompt, as older clients ask for it."""
    service = service_of(request)

    def render(made: Embeddings) -> Response:
        return ApiResponse({"embedding": made.vectors[0].tolist() if made.vectors else []})

    if not body.prompt:
        return render(_none_of(service, body.model))
    asked = EmbeddingRequest(id=new_id("embd"), model=plain_name(service, body.model), inputs=[body.prompt], cut=Cut())
    return await respond_embeddings(request, count_answers(len(asked.inputs), 1), lambda: asked, render)


def _none_of(service: Service, asked: str | None) -> Embeddings:
    """Of nothing. Raises while the model loads, and for a name that is not served."""
    service.model  # noqa: B018
    return Embeddings(service.check_model(plain_name(service, asked)), [], 0)
