"""The routes POST /v1/messages and /v1/messages/count_tokens.

The headers `anthropic-version` and `anthropic-beta` and the query `?beta=true` are taken and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ContextLengthError
from ktransformers.server.answers.fitting import counted_prompt, served_prompt
from ktransformers.server.answers.pictures import RequestPictures
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.requests import ChatRequest, Conversation
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.anthropic.context_edits import Edited, edited
from ktransformers.server.api.anthropic.errors import ERROR_RESPONSES, too_long
from ktransformers.server.api.anthropic.fields import TABLE
from ktransformers.server.api.anthropic.read import edits_of, read_chat, read_conversation
from ktransformers.server.api.anthropic.schemas import ConversationBody, MessagesBody
from ktransformers.server.api.anthropic.writer import MessageWriter
from ktransformers.server.bodies import body_route, body_size
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, note_unused, service_of
from ktransformers.tokenizer.shortening import prompt_room

__all__ = ["router"]

router = APIRouter(route_class=body_route(TABLE), responses=ERROR_RESPONSES)


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answer with the next turn of a conversation, as one message or as a stream of events (Anthropic's API)."""

    applied: list[Mapping[str, Any]] = []

    def read() -> ChatRequest:
        reading = read_conversation(body)
        note_unused(request, reading.ignored)
        return read_chat(body, reading)

    def edit(asked: ChatRequest) -> ChatRequest:
        found = _edited(service_of(request), body, asked.conversation, body.max_tokens)
        applied[:] = found.applied if found is not None else ()
        return asked if found is None else replace(asked, conversation=found.conversation)

    def writer(prepared: PreparedRequest) -> MessageWriter:
        hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        edits = None if body.context_management is None else [dict(one) for one in applied]
        return MessageWriter(prepared, hides_thinking=hides_thinking, applied_edits=edits)

    try:
        return await respond(request, 1, bool(body.stream), read, writer, edited=edit)
    except ContextLengthError as error:
        raise too_long(error) from error


def _edited(service: Service, body: ConversationBody, conversation: Conversation, max_tokens: int) -> Edited | None:
    """The conversation as context_management has it; None where that asks for nothing.

    max_tokens: of the answer, for which there should be room.
    """
    edits, max_len = edits_of(body), service.model.max_len
    if not edits:
        return None

    def count(one: Conversation) -> int:
        try:
            return len(served_prompt(service, one).ids)
        except ContextLengthError as error:
            return error.prompt_len

    return edited(conversation, edits, count, prompt_room(max_len, service.max_tokens(max_tokens)))


def _count(request: Request, body: ConversationBody, conversation: Conversation) -> Response:
    found = _edited(service_of(request), body, conversation, 0)
    try:
        ids = counted_prompt(request, conversation if found is None else found.conversation).ids
    except ContextLengthError as error:
        raise too_long(error) from error
    more = {} if found is None else {"context_management": {"original_input_tokens": found.original_len}}
    return ApiResponse({"input_tokens": len(ids), **more})


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: ConversationBody, request: Request) -> Response:
    """Answer with how many tokens the prompt of a request to /v1/messages has."""
    service = service_of(request)
    service.check_model(body.model)
    size, pictures = await body_size(request), RequestPictures(service)
    reading = await service.workers.run(size, read_conversation, body)
    note_unused(request, reading.ignored)
    try:
        conversation = await pictures.read(reading.conversation)
        return await service.workers.run(size, _count, request, body, conversation)
    finally:
        pictures.release()
