"""The page over an API whose answers a test writes down: what it streams, when, and with which errors."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from ktransformers.server.api import web
from ktransformers.server.http.api_paths import PAGE_PREFIX

HOLD = "hold"
"""In an answer: the stream waits here until `release` or until the client leaves."""

LENGTH = "length"
"""At the end of an answer: it has reached the limit of its length."""

USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}, "decode_time": 0.5}


def said(text: str) -> dict[str, Any]:
    """A piece of text."""
    return {"content": text}


def thought(text: str) -> dict[str, Any]:
    """A piece of reasoning."""
    return {"reasoning_content": text, "reasoning": text}


def called(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    """A piece of a tool call; the first one has the name."""
    head = {} if name is None else {"id": f"call-{index}", "type": "function"}
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return {"tool_calls": [{"index": index, **head, "function": function}]}


class FakeApi:
    """Serves on a free port of loopback, on a thread. `answers` are used up one by one; then it says "ok"."""

    def __init__(self) -> None:
        self.reset()
        routes = [
            Route("/", self._page),
            Route("/v1/models", self._models),
            Route("/v1/status", self._status),
            Route("/server_info", self._info),
            Route("/ready", self._ready),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Mount(PAGE_PREFIX, web.page_files()),
        ]
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """As new."""
        self.answers: list[Sequence[dict[str, Any] | str] | Response] = []
        self.bodies: list[dict[str, Any]] = []
        self.key = ""
        self.usage = USAGE
        self.dropped: list[int] = []
        """How many of the oldest messages the answers go without, one by one; then none."""
        self.model = "fake-model"
        self.reads = ["text"]
        """What the model reads."""
        self.loading = ""
        self.status: Any = None
        self.info: dict[str, Any] = {}
        """By model: what /server_info says; a model that is not here is not loaded."""
        self.left = threading.Event()
        """Set when a client leaves in the middle of an answer."""
        self._released = threading.Event()

    def release(self) -> None:
        """Let the answer that is held go on."""
        self._released.set()

    def close(self) -> None:
        self._server.should_exit = True
        self.release()
        self._thread.join()
        self._socket.close()

    def error(self, status: int, message: str, code: str, **headers: str) -> Response:
        """In the shape that the API has for errors."""
        body = {"error": {"message": message, "type": "x", "param": None, "code": code}}
        return JSONResponse(body, status, headers={name.replace("_", "-"): text for name, text in headers.items()})

    def _refusal(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return self.error(401, "the API key is wrong", "invalid_api_key")
        return self.error(503, self.loading, "not_ready") if self.loading else None

    async def _page(self, request: Request) -> Response:
        return web.page()

    async def _models(self, request: Request) -> Response:
        facts = {"max_model_len": 4096, "architecture": {"input_modalities": self.reads, "output_modalities": ["text"]}}
        models = [{"id": name, **facts} for name in (self.model, "alias")]
        return self._refusal(request) or JSONResponse({"object": "list", "data": models})

    async def _ready(self, request: Request) -> Response:
        refusal = self.error(503, self.loading, "not_ready") if self.loading else None
        return refusal or JSONResponse({"status": "ready"})

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self.status) if self.status is not None else self.error(404, "Not Found", "")

    async def _info(self, request: Request) -> Response:
        info = self.info.get(request.query_params.get("model", ""))
        return self._refusal(request) or (JSONResponse(info) if info else self.error(503, "not loaded", "not_ready"))

    async def _chat(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        self.bodies.append(await request.json())
        answer = self.answers.pop(0) if self.answers else [said("ok")]
        if isinstance(answer, Response):
            return answer
        num_dropped = self.dropped.pop(0) if self.dropped else 0
        headers = {"x-ktransformers-dropped-messages": str(num_dropped)} if num_dropped else {}
        return StreamingResponse(self._events(answer), media_type="text/event-stream", headers=headers)

    async def _events(self, pieces: Sequence[dict[str, Any] | str]) -> AsyncIterator[str]:
        try:
            yield ": a comment, as sent while a prompt is computed\n\n"
            yield _event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for piece in pieces:
                if piece == HOLD:
                    while not self._released.is_set():
                        await asyncio.sleep(0.005)
                    self._released.clear()
                elif piece == LENGTH:
                    break
                elif isinstance(piece, str):  # as it is: an error, say
                    yield f"data: {piece}\n\n"
                    return
                else:
                    yield _event([{"index": 0, "delta": piece, "finish_reason": None}])
            reason = "tool_calls" if any("tool_calls" in piece for piece in pieces) else "stop"
            reason = LENGTH if LENGTH in pieces else reason
            yield _event([{"index": 0, "delta": {}, "finish_reason": reason}])
            yield _event([], usage=self.usage)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise


def _event(choices: list[dict[str, Any]], **more: Any) -> str:
    return f"data: {json.dumps({'model': 'fake-model', 'choices': choices, **more})}\n\n"
