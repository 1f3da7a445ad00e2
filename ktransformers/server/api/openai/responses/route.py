"""The routes of /v1/responses."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ktransformers.errors import UnknownIdError, UnsupportedError
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.openai.responses.policy import Ignored, LoggedNames
from ktransformers.server.api.openai.responses.read import begin_exchange
from ktransformers.server.api.openai.responses.schemas import ResponsesBody
from ktransformers.server.api.openai.responses.store import KeptResponse, ResponseStore
from ktransformers.server.api.openai.responses.writer import ResponsesWriter
from ktransformers.server.api_paths import SCOPE_KEY
from ktransformers.server.bodies import BodyRoute
from ktransformers.server.config import ServerConfig
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import service_of

__all__ = ["add_responses"]

router = APIRouter(route_class=BodyRoute)


class _State:
    """What the routes keep between requests, in one app."""

    def __init__(self, config: ServerConfig):
        self.store = ResponseStore(config.responses_store)
        self.logged = LoggedNames()


def add_responses(app: Any, config: ServerConfig) -> None:
    """The routes, and the store behind them."""
    app.state.responses = _State(config)
    app.include_router(router)


def _state_of(request: Request) -> _State:
    state = request.app.state.responses
    assert isinstance(state, _State)
    return state


def _key_of(request: Request) -> str:
    return str(request.scope.get(SCOPE_KEY, ""))


def _kept(request: Request, id: str) -> KeptResponse:
    return _state_of(request).store.get(_key_of(request), id)


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """The next turn of a conversation, as one JSON object or as a stream of server-sent events."""
    service, state, key = service_of(request), _state_of(request), _key_of(request)
    # --strict_requests
    ignored = Ignored(service.config.is_strict_on_fields, state.logged)
    tokenizer = service.model.tokenizer
    exchange = begin_exchange(body, state.store, key, ignored, tokenizer.template_knows)
    keep = partial(state.store.keep, key) if body.keeps and state.store.is_on else None
    response = await respond(
        request,
        1,
        bool(body.stream),
        exchange.read,
        lambda job: ResponsesWriter(job, exchange, keep),
        more_bytes=exchange.num_bytes,
    )
    response.headers.update(ignored.headers())
    return response


@router.get("/v1/responses/{id}")
async def get_response(id: str, request: Request, stream: bool = False) -> Response:
    """A response that was kept, as it was sent. Streams cannot be taken up again."""
    kept = _kept(request, id)
    if stream:
        raise UnsupportedError("stream: a response is kept whole; leave stream out")
    return Response(kept.body, media_type="application/json")


@router.delete("/v1/responses/{id}")
async def delete_response(id: str, request: Request) -> Response:
    """Forget it. Responses that followed it still know the conversation."""
    _state_of(request).store.delete(_key_of(request), id)
    return ApiResponse({"id": id, "object": "response", "deleted": True})


@router.post("/v1/responses/{id}/cancel")
async def cancel_response(id: str, request: Request) -> Response:
    """Always refused: only responses made in the background can be cancelled, and there are none."""
    _kept(request, id)
    raise UnsupportedError("only background responses can be cancelled; to stop a stream, close its connection")


@router.get("/v1/responses/{id}/input_items")
async def list_input_items(
    id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    before: str | None = None,
) -> Response:
    """What a response answered, the turns before it included. after, before: ids of items around the page."""
    kept = _kept(request, id)
    items = [item for turn in kept.context for item in turn.items()]
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    for one in (after, before):
        if one is not None and one not in ids:
            raise UnknownIdError(f"there is no item {one[:100]!r} in response {id[:100]!r}")
    first = ids.index(after) + 1 if after is not None else 0
    last = ids.index(before) if before is not None else len(items)
    page = items[first : min(first + limit, last)]
    return ApiResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": first + len(page) < last,
        }
    )
