"""POST /tokenize and /detokenize, as vLLM's clients know them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ConfigError
from ktransformers.server.api.openai.prompts import chat_prompt
from ktransformers.server.responses import ApiResponse
from ktransformers.server.schemas import DetokenizeRequest, TokenizeRequest
from ktransformers.server.service import service_of
from ktransformers.tokenizer import Tokenizer

__all__ = ["router"]

router = APIRouter()


def _tokenize(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    assert body.messages is not None
    return chat_prompt(
        tokenizer,
        body.messages,
        tools=body.tools,
        template_kwargs=dict(body.chat_template_kwargs or {}),
        add_generation_prompt=body.add_generation_prompt is not False,
    )


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    model = service.model
    tokens = await asyncio.to_thread(_tokenize, model.tokenizer, body)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": model.max_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return ApiResponse(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    service.check_model(body.model)
    model = service.model
    wrong = [token for token in body.tokens if token >= model.vocab_size]
    if wrong:
        raise ConfigError(f"token {wrong[0]} does not exist; this model's ids are 0 to {model.vocab_size - 1}")
    text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, False)
    return ApiResponse({"prompt": text})
