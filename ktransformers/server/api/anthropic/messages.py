"""POST /v1/messages and /v1/messages/count_tokens.

The headers `anthropic-version` and `anthropic-beta` and the query `?beta=true` are taken and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.errors import ContextLengthError, UnsupportedError
from ktransformers.server.answers.prompts import chat_prompt
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.anthropic.errors import ERROR_RESPONSES, too_long
from ktransformers.server.api.anthropic.policy import IGNORED_HEADER, LoggedNames, shown_names
from ktransformers.server.api.anthropic.read import Reading, read_chat, read_conversation
from ktransformers.server.api.anthropic.schemas import ConversationBody, MessagesBody
from ktransformers.server.api.anthropic.writer import MessageWriter
from ktransformers.server.bodies import BodyRoute, body_size
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["router"]

router = APIRouter(route_class=BodyRoute, responses=ERROR_RESPONSES)

MAX_TOKENS = 1 << 18
"""Most tokens that are counted where the context is shorter: texts that will be cut are counted, too."""

_logged = LoggedNames()


def _read(service: Service, body: ConversationBody) -> Reading:
    """Raises UnsupportedError for fields without an effect where the operator wants none."""
    reading = read_conversation(body, service.model.tokenizer)
    if reading.ignored and getattr(service.config, "is_strict_on_fields", False):
        raise UnsupportedError(f"{reading.ignored[0][:64]!r} has no effect here, and --strict_requests refuses it")
    return reading


def _note_ignored(response: Response, ignored: Sequence[str]) -> Response:
    if ignored:
        _logged.say(ignored)
        response.headers[IGNORED_HEADER] = ", ".join(shown_names(ignored))
    return response


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request) -> Response:
    """The next turn of a conversation, as one message or as a stream of events (Anthropic's API)."""
    service = service_of(request)
    ignored: list[str] = []

    def read() -> Any:
        reading = _read(service, body)
        ignored.extend(reading.ignored)
        return read_chat(body, reading)

    choice, thinking = body.tool_choice, body.thinking
    try:
        response = await respond(
            request,
            1,
            bool(body.stream),
            read,
            lambda job: MessageWriter(
                job,
                hides_thinking=thinking is not None and thinking.display == "omitted",
                is_single_call=choice is not None and bool(choice.disable_parallel_tool_use),
                is_prompt_only=body.max_tokens == 0,
            ),
        )
    except ContextLengthError as error:
        raise too_long(error) from error
    return _note_ignored(response, ignored)


def _count(service: Service, body: ConversationBody) -> Response:
    reading, max_len = _read(service, body), max(service.model.max_len, MAX_TOKENS)
    try:
        ids = chat_prompt(
            service.model.tokenizer,
            reading.conversation,
            max_len=max_len,
            force_think=service.config.force_think,
        )
    except ContextLengthError as error:
        raise too_long(error) from error
    return _note_ignored(ApiResponse({"input_tokens": len(ids)}), reading.ignored)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: ConversationBody, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    service = service_of(request)
    service.check_model(body.model)
    return await service.workers.run(await body_size(request), _count, service, body)
