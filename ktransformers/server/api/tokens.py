"""POST /tokenize and /detokenize, as vLLM's clients know them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ConfigError
from ktransformers.server.answers.prompts import chat_prompt
from ktransformers.server.api.openai.read import tokenized_conversation
from ktransformers.server.api.openai.schemas import DetokenizeBody, TokenizeBody
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.bodies import BodyRoute, body_size
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of
from ktransformers.tokenizer import Tokenizer

__all__ = ["router"]

router = APIRouter(route_class=BodyRoute)

MAX_TOKENS = 1 << 18
"""Most tokens of an answer of /tokenize where the context is shorter: texts that will be cut are counted here."""


def _tokens(tokenizer: Tokenizer, body: TokenizeBody, max_len: int, reads_special_tokens: bool) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False, max_len=max_len)
    conversation = tokenized_conversation(body)
    return chat_prompt(tokenizer, conversation, max_len=max_len, reads_special_tokens=reads_special_tokens)


def _tokenize(service: Service, body: TokenizeBody) -> Response:
    model = service.model
    reads_special_tokens = service.config.reads_special_tokens
    tokens = _tokens(model.tokenizer, body, max(model.max_len, MAX_TOKENS), reads_special_tokens)
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
    """Token ids of a text or of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    return await service.workers.run(await body_size(request), _tokenize, service, body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    service.check_model(body.model)
    return await service.workers.run(await body_size(request), _detokenize, service.model, body.tokens)
