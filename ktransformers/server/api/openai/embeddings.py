"""The route POST /v1/embeddings. https://platform.openai.com/docs/api-reference/embeddings"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ConfigError
from ktransformers.server.answers.embed import Cut, EmbeddingRequest, Embeddings, respond_embeddings
from ktransformers.server.answers.requests import new_id
from ktransformers.server.api.openai.fields import EMBEDDING_FIELDS
from ktransformers.server.api.openai.schemas import EmbeddingsBody
from ktransformers.server.bodies import body_route
from ktransformers.server.responses import ApiResponse

__all__ = ["router"]

router = APIRouter(route_class=body_route(EMBEDDING_FIELDS))


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Answer with a vector of length 1 for each input, from the hidden states of the model's last layer."""
    inputs = _inputs(body)

    def read() -> EmbeddingRequest:
        return EmbeddingRequest(
            id=new_id("embd"),
            model=body.model,
            inputs=inputs,
            dimensions=body.dimensions,
            cut=_cut(body),
            priority=body.priority or 0,
            timeout=body.timeout,
        )

    return await respond_embeddings(
        request, len(inputs), read, lambda made: _response(made, body.encoding_format or "float")
    )


def _cut(body: EmbeddingsBody) -> Cut | None:
    most = body.truncate_prompt_tokens
    if most is None:
        return None
    return Cut(None if most == -1 else most, keeps_end=body.truncation_side != "right")


def _inputs(body: EmbeddingsBody) -> Sequence[str | Sequence[int]]:
    given: Any = body.input
    if not given:
        raise ConfigError("input is empty: there is nothing to embed")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _encoded(vector: npt.NDArray[np.float32], encoding: str) -> str | list[float]:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()


def _response(made: Embeddings, encoding: str) -> Response:
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens}
    return ApiResponse({"object": "list", "data": data, "model": made.model, "usage": usage})
