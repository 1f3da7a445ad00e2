"""POST /api/chat and /api/generate."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.server.answers.requests import ChatRequest, TextRequest
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.ollama.names import plain_name, shown_name
from ktransformers.server.api.ollama.read import chat_request, generate_request, is_load
from ktransformers.server.api.ollama.routes import ERRORS, AnyTypeRoute, check_strict, say_ignored
from ktransformers.server.api.ollama.schemas import ChatBody, GenerateBody
from ktransformers.server.api.ollama.writer import ChatWriter, Fields, GenerateWriter, timestamp
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, service_of

__all__ = ["router"]

router = APIRouter(route_class=AnyTypeRoute, responses=ERRORS)


@router.post("/api/chat")
async def chat(body: ChatBody, request: Request) -> Response:
    """The next turn of a conversation, as lines of JSON or, with `stream` false, as one object."""
    service, ignored = service_of(request), body.unknown
    if is_load(body):
        return _loaded(request, body, {"message": {"role": "assistant", "content": ""}}, ignored)
    return await _answer(request, body, lambda: chat_request(service, body, ignored), ChatWriter, ignored)


@router.post("/api/generate")
async def generate(body: GenerateBody, request: Request) -> Response:
    """The answer to a prompt, as lines of JSON or, with `stream` false, as one object."""
    service, ignored = service_of(request), body.unknown
    if is_load(body):
        return _loaded(request, body, {"response": ""}, ignored)
    return await _answer(request, body, lambda: generate_request(service, body, ignored), GenerateWriter, ignored)


async def _answer(
    request: Request,
    body: ChatBody | GenerateBody,
    read: Callable[[], ChatRequest | TextRequest],
    writer: type[ChatWriter | GenerateWriter],
    ignored: list[str],
) -> Response:
    service, began = service_of(request), time.perf_counter()

    def read_all() -> ChatRequest | TextRequest:
        made = read()
        check_strict(service, ignored)
        return made

    response = await respond(
        request,
        1,
        body.is_streamed,
        read_all,
        lambda job: writer(job, shown_name(service, body.model, job.model), began),
    )
    return say_ignored(request, response, ignored)


def _loaded(request: Request, body: ChatBody | GenerateBody, empty: Fields, ignored: list[str]) -> Response:
    """The answer to a request that wants the model to be loaded, or unloaded: it is, and stays so."""
    service = service_of(request)
    name = _served(service, body)
    if body.is_to_unload:
        ignored.append("keep_alive")
    check_strict(service, ignored)
    head = {"model": shown_name(service, body.model, name), "created_at": timestamp(time.time())}
    reason = "unload" if body.is_to_unload else "load"
    return say_ignored(request, ApiResponse(head | empty | {"done": True, "done_reason": reason}), ignored)


def _served(service: Service, body: ChatBody | GenerateBody) -> str:
    service.model  # noqa: B018 - raises while it loads
    return service.check_model(plain_name(service, body.model))
