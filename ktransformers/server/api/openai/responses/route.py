"""The routes of /v1/responses."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ktransformers.errors import UnknownIdError, UnsupportedError
from ktransformers.server.answers.replay import REPLAY_KEY, Replay
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.openai.responses.fields import TABLE
from ktransformers.server.api.openai.responses.read import begin_exchange
from ktransformers.server.api.openai.responses.schemas import ResponsesBody
from ktransformers.server.api.openai.responses.store import KeptResponse, ResponseStore
from ktransformers.server.api.openai.responses.writer import ResponsesWriter
from ktransformers.server.bodies import body_route
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.api_paths import SCOPE_KEY
from ktransformers.server.responses import ApiResponse
from ktransformers.server.service import note_unused, service_of

__all__ = ["add_responses"]

router = APIRouter(route_class=body_route(TABLE))


def add_responses(app: Any, config: ServerConfig) -> None:
    """Add the routes of /v1/responses to the app, and the store behind them."""
    app.state.responses = ResponseStore(config.responses_store)
    app.include_router(router)


def _store_of(request: Request) -> ResponseStore:
    store = request.app.state.responses
    assert isinstance(store, ResponseStore)
    return store


def _key_of(request: Request) -> str:
    return str(request.scope.get(SCOPE_KEY, ""))


def _kept(request: Request, id: str) -> KeptResponse:
    return _store_of(request).get(_key_of(request), id)


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answer with the next turn of a conversation, as one JSON object or as a stream of server-sent events."""
    store, key = _store_of(request), _key_of(request)
    tokenizer = service_of(request).model.tokenizer
    replay: Replay | None = request.scope.get(REPLAY_KEY)
    exchange = begin_exchange(body, store, key, partial(note_unused, request), tokenizer.template_knows, replay)
    keep = partial(store.keep, key) if body.keeps and store.is_on else None
    return await respond(
        request,
        1,
        bool(body.stream),
        exchange.read,
        lambda prepared: ResponsesWriter(prepared, exchange, keep),
        more_bytes=exchange.num_bytes,
        beside=exchange.earlier.packed,
    )


@router.get("/v1/responses/{id}")
async def get_response(id: str, request: Request, stream: bool = False) -> Response:
    """Answer with a response that was kept, as it was sent. Streams cannot be taken up again."""
    kept = _kept(request, id)
    if stream:
        raise UnsupportedError("stream: a response is kept whole; leave stream out")
    return Response(kept.body, media_type="application/json")


@router.delete("/v1/responses/{id}")
async def delete_response(id: str, request: Request) -> Response:
    """Delete a kept response. Responses that followed it still know the conversation."""
    _store_of(request).delete(_key_of(request), id)
    return ApiResponse({"id": id, "object": "response", "deleted": True})


@router.post("/v1/responses/{id}/cancel")
async def cancel_response(id: str, request: Request) -> Response:
    """Refuse to cancel a response: only responses made in the background can be cancelled, and there are none."""
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
    """Answer with the items that a response answered, the turns before it included. after, before: ids of items around
    the page.
    """
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
