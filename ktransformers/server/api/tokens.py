"""The routes POST /tokenize and /detokenize, as vLLM's clients know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ConfigError
from ktransformers.media.records import is_media_id
from ktransformers.server.answers.fitting import MAX_COUNTED, counted_prompt
from ktransformers.server.answers.pictures import RequestPictures
from ktransformers.server.answers.requests import Conversation
from ktransformers.server.api.openai.fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from ktransformers.server.api.openai.read import tokenized_conversation
from ktransformers.server.api.openai.schemas import DetokenizeBody, TokenizeBody
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.bodies import body_route, body_size
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import service_of

__all__ = ["detokenize_router", "router"]

router = APIRouter(route_class=body_route(TOKENIZE_FIELDS))
detokenize_router = APIRouter(route_class=body_route(DETOKENIZE_FIELDS))


def _tokens(request: Request, body: TokenizeBody, conversation: Conversation | None) -> Sequence[int]:
    """The prompt's tokens; a position of a picture has the one that its processor writes there, as in vLLM."""
    model = service_of(request).model
    if conversation is None:
        max_len, has_special = max(model.max_len, MAX_COUNTED), body.add_special_tokens is not False
        return model.tokenizer.encode(body.prompt or "", add_special_tokens=has_special, max_len=max_len)
    pictures, prompt = model.pictures, counted_prompt(request, conversation)
    if pictures is None or not prompt.media:
        return prompt.ids
    position = min(pictures.position_token_ids)
    return [position if is_media_id(token) else token for token in prompt.ids]


def _tokenize(request: Request, body: TokenizeBody, conversation: Conversation | None) -> Response:
    model, tokens = service_of(request).model, _tokens(request, body, conversation)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": model.max_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return ApiResponse(answer)


def _detokenize(model: ModelInfo, tokens: list[int]) -> Response:
    largest = max(tokens, default=0)
    if largest >= model.vocab_size:
        raise ConfigError(f"token {largest} does not exist; this model's ids are 0 to {model.vocab_size - 1}")
    return ApiResponse({"prompt": model.tokenizer.decode(tokens, skip_special_tokens=False)})


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Answer with the token ids of a text or of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    size, pictures = await body_size(request), RequestPictures(service)
    try:
        conversation = None
        if body.prompt is None:
            conversation = await pictures.read(await service.workers.run(size, tokenized_conversation, body))
        return await service.workers.run(size, _tokenize, request, body, conversation)
    finally:
        pictures.release()


@detokenize_router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Answer with the text of token ids, special tokens included."""
    service = service_of(request)
    service.check_model(body.model)
    return await service.workers.run(await body_size(request), _detokenize, service.model, body.tokens)
