"""POST /v1/messages and /v1/messages/count_tokens.

The headers `anthropic-version` and `anthropic-beta` and the query `?beta=true` are taken and change nothing.
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ContextLengthError
from ktransformers.server.answers.prompts import chat_prompt, template_kwargs
from ktransformers.server.answers.requests import ChatRequest
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.anthropic.errors import ERROR_RESPONSES, too_long
from ktransformers.server.api.anthropic.fields import TABLE
from ktransformers.server.api.anthropic.read import read_chat, read_conversation
from ktransformers.server.api.anthropic.schemas import ConversationBody, MessagesBody
from ktransformers.server.api.anthropic.writer import MessageWriter
from ktransformers.server.bodies import body_route, body_size
from ktransformers.server.fields import note_ignored
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import note_altered, note_unused, service_of

__all__ = ["router"]

router = APIRouter(route_class=body_route(TABLE), responses=ERROR_RESPONSES)

MAX_TOKENS = 1 << 18
"""Most tokens that are counted where the context is shorter: texts that will be cut are counted, too."""


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request) -> Response:
    """The next turn of a conversation, as one message or as a stream of events (Anthropic's API)."""

    def read() -> ChatRequest:
        reading = read_conversation(body)
        note_unused(request, reading.ignored)
        return read_chat(body, reading)

    hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
    try:
        return await respond(
            request, 1, bool(body.stream), read, lambda job: MessageWriter(job, hides_thinking=hides_thinking)
        )
    except ContextLengthError as error:
        raise too_long(error) from error


def _count(request: Request, body: ConversationBody) -> Response:
    service, reading = service_of(request), read_conversation(body)
    tokenizer, config = service.model.tokenizer, service.config
    note_unused(request, reading.ignored + template_kwargs(tokenizer, reading.conversation).ignored)
    note_altered(request, reading.conversation.altered)
    try:
        ids = chat_prompt(
            tokenizer,
            reading.conversation,
            max_len=max(service.model.max_len, MAX_TOKENS),
            force_think=config.force_think,
            reads_special_tokens=config.reads_special_tokens,
            note_changes=partial(note_ignored, request.scope),
        )
    except ContextLengthError as error:
        raise too_long(error) from error
    return ApiResponse({"input_tokens": len(ids)})


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: ConversationBody, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    service = service_of(request)
    service.check_model(body.model)
    return await service.workers.run(await body_size(request), _count, request, body)
