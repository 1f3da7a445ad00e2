"""The routes POST /api/chat and /api/generate."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.server.answers.requests import ChatRequest, TextRequest
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.ollama.fields import CHAT, GENERATE
from ktransformers.server.api.ollama.names import plain_name, shown_name
from ktransformers.server.api.ollama.read import chat_request, generate_request, is_load
from ktransformers.server.api.ollama.routes import ERRORS, any_type_route
from ktransformers.server.api.ollama.schemas import ChatBody, GenerateBody
from ktransformers.server.api.ollama.writer import ChatWriter, Fields, GenerateWriter, timestamp
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import Service, note_unused, service_of

__all__ = ["generate_router", "router"]

router = APIRouter(route_class=any_type_route(CHAT), responses=ERRORS)
generate_router = APIRouter(route_class=any_type_route(GENERATE), responses=ERRORS)


@router.post("/api/chat")
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer with the next turn of a conversation, as lines of JSON or, with `stream` false, as one object."""
    if is_load(body):
        return _loaded(request, body, {"message": {"role": "assistant", "content": ""}})
    return await _answer(request, body, partial(chat_request, service_of(request), body), ChatWriter)


@generate_router.post("/api/generate")
async def generate(body: GenerateBody, request: Request) -> Response:
    """Answer a prompt, as lines of JSON or, with `stream` false, as one object."""
    if is_load(body):
        return _loaded(request, body, {"response": ""})
    return await _answer(request, body, partial(generate_request, service_of(request), body), GenerateWriter)


async def _answer(
    request: Request,
    body: ChatBody | GenerateBody,
    read: Callable[[list[str]], ChatRequest | TextRequest],
    writer: type[ChatWriter | GenerateWriter],
) -> Response:
    """read: adds the fields without effect to the list that it is given."""
    service, began = service_of(request), time.perf_counter()

    def read_all() -> ChatRequest | TextRequest:
        ignored: list[str] = []
        made = read(ignored)
        note_unused(request, ignored)
        return made

    return await respond(
        request,
        1,
        body.is_streamed,
        read_all,
        lambda prepared: writer(prepared, shown_name(service, body.model, prepared.model), began),
    )


def _loaded(request: Request, body: ChatBody | GenerateBody, empty: Fields) -> Response:
    """The answer to a request that wants the model to be loaded, or unloaded. An only model is, and stays so."""
    service = service_of(request)
    name = _served(service, body)
    if body.is_to_unload and service.group is None:
        note_unused(request, ["keep_alive"])
    head = {"model": shown_name(service, body.model, name), "created_at": timestamp(time.time())}
    reason = "unload" if body.is_to_unload else "load"
    return ApiResponse(head | empty | {"done": True, "done_reason": reason})


def _served(service: Service, body: ChatBody | GenerateBody) -> str:
    service.shown_model  # noqa: B018 - raises while an only model loads
    return service.check_model(plain_name(service, body.model))
