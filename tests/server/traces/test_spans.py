"""Spans of answers: their tree and what they say, in every dialect and however the answer ends; without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from ktransformers.core import TokenEvent
from ktransformers.errors import DeadlineError
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.telemetry.otlp import CONVENTIONS
from tests.support.servers.fake_backend import FakeBackend
from tests.support.servers.scripted_backend import Script, ScriptedBackend
from tests.support.servers.spans import (
    CONFIG,
    PARENT,
    PHASES,
    SECRET,
    TRACE,
    Collected,
    ask,
    attributes,
    check_cover,
)

CHAT = {"model": "demo", "messages": [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]}
TOOL = {"type": "function", "function": {"name": "elephant_tool", "parameters": {"type": "object"}}}


def test_what_the_span_of_a_request_says(collected: Collected) -> None:
    body = CHAT | {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.75, "top_k": 7, "seed": 11, "frequency_penalty": 0.25,
        "presence_penalty": -0.5, "stop": [SECRET, "grey-whale"], "tools": [TOOL],
    }  # fmt: skip
    response = ask(ScriptedBackend(Script(["a", "b"])), collected, "/v1/chat/completions", body)
    root, answer = collected.only(), response.json()
    assert (root.name, root.kind, root.status.status_code) == ("chat demo", SpanKind.SERVER, StatusCode.UNSET)
    assert root.instrumentation_scope is not None
    assert root.instrumentation_scope.schema_url == CONVENTIONS
    assert dict(attributes(root)) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ktransformers",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 7.0,
        "gen_ai.request.seed": 11,
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.presence_penalty": -0.5,
        "ktransformers.request.stop_sequences": 2,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "server.address": "localhost",
        "server.port": 10002,
    }
    assert "elephant" not in "".join(span.to_json() for span in collected.spans)
    assert "whale" not in "".join(span.to_json() for span in collected.spans)


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", CHAT, "chat"),
        ("/v1/completions", {"model": "demo", "prompt": SECRET}, "text_completion"),
        ("/v1/responses", {"model": "demo", "input": SECRET, "store": False}, "chat"),
        ("/v1/messages", {"model": "demo", "max_tokens": 5, "messages": CHAT["messages"][1:]}, "chat"),
        ("/api/chat", CHAT | {"stream": False}, "chat"),
        ("/api/generate", {"model": "demo", "prompt": SECRET, "raw": True, "stream": False}, "text_completion"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_all_dialects_have_them(
    path: str, body: dict[str, Any], operation: str, is_streamed: bool, collected: Collected
) -> None:
    response = ask(ScriptedBackend(Script(["a", "b"])), collected, path, body | {"stream": is_streamed})
    assert response.status_code == 200, response.text
    root = collected.only()
    assert root.name == f"{operation} demo"
    assert attributes(root).get("gen_ai.request.stream", False) is is_streamed
    assert attributes(root)["gen_ai.usage.output_tokens"] == 3
    phases = collected.children(root)
    assert [one.name for one in phases] == PHASES
    assert attributes(phases[3])["ktransformers.decode.tokens"] == 3
    check_cover(root, phases)
    assert SECRET not in "".join(span.to_json() for span in collected.spans)


def test_several_answers_have_phases_of_their_own(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 3})
    root = collected.only()
    assert attributes(root)["gen_ai.request.choice.count"] == 2
    assert attributes(root)["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert attributes(root)["gen_ai.usage.input_tokens"] == 3
    children = collected.children(root)
    assert sorted(one.name for one in children) == sorted(PHASES[:1] + 4 * PHASES[1:])
    which = [attributes(one)["ktransformers.answer"] for one in children if one.name == "decode"]
    assert sorted(which) == [0, 1, 2, 3]


def test_traceparent_is_the_parent(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [1]}, traceparent=f"00-{TRACE}-{PARENT}-01")
    root = collected.only()
    assert root.parent is not None
    assert format(root.parent.span_id, "016x") == PARENT
    assert {format(one.context.trace_id, "032x") for one in collected.spans if one.context} == {TRACE}


@pytest.mark.parametrize(
    "parent", [f"00-{TRACE}-{PARENT}", "00-" + "0" * 32 + f"-{PARENT}-01", "\N{SNOWMAN}", "x" * 9999]
)
def test_a_broken_traceparent_is_none(parent: str, collected: Collected) -> None:
    async def work() -> None:
        transport = httpx.ASGITransport(create_app(FakeBackend(), CONFIG, collected.traces))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/v1/completions", json={"prompt": [1]}, headers={"traceparent": parent.encode()})

    asyncio.run(work())
    assert collected.only().parent is None


def test_whoever_does_not_want_a_trace_has_none(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [1]}, traceparent=f"00-{TRACE}-{PARENT}-00")
    assert not collected.spans


@pytest.mark.parametrize(
    ("body", "name", "status", "error"),
    [
        ({"prompt": [1], "temperature": SECRET}, "text_completion", 400, "400"),
        ({"prompt": [1] * 99}, "text_completion", 400, "ContextLengthError"),
    ],
)
def test_refused_requests(body: dict[str, Any], name: str, status: int, error: str, collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", body)
    root = collected.only()
    assert (root.name, root.status.status_code) == (name, StatusCode.ERROR)
    assert attributes(root)["http.response.status_code"] == status
    assert attributes(root)["error.type"] == error
    assert not collected.children(root)
    assert SECRET not in root.to_json()


def test_other_routes_have_none(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/tokenize", {"prompt": 5})
    ask(FakeBackend(), collected, "/no/such/route", {})
    assert not collected.spans


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_in_the_middle(is_streamed: bool, collected: Collected) -> None:
    backend = ScriptedBackend(Script(["a", "b"], error=DeadlineError("too late")))
    response = ask(backend, collected, "/v1/completions", {"prompt": "x", "stream": is_streamed})
    assert response.status_code == (200 if is_streamed else 408)
    root = collected.only()
    assert attributes(root)["error.type"] == "DeadlineError"
    assert root.status.status_code is StatusCode.ERROR
    assert attributes(root)["gen_ai.usage.output_tokens"] == 2
    assert [one.name for one in collected.children(root)] == PHASES
    check_cover(root, collected.children(root))


class Bug(FakeBackend):
    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        raise ZeroDivisionError(SECRET)
        yield


def test_a_bug(collected: Collected) -> None:
    response = ask(Bug(), collected, "/v1/completions", {"prompt": [1]})
    assert response.status_code == 500
    assert attributes(collected.only())["error.type"] == "ZeroDivisionError"
    assert SECRET not in collected.only().to_json()


class Stuck(FakeBackend):
    """Says `count` tokens and no more."""

    def __init__(self, count: int):
        super().__init__()
        self._count, self.is_stuck = count, asyncio.Event()

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        said = 0
        async for event in super().inference(request):
            if said == self._count:
                break
            said += 1
            yield event
        self.is_stuck.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("count", "names"), [(0, ["prepare", "queue"]), (2, ["prepare", "queue", "prefill", "decode"])]
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves(count: int, names: list[str], is_streamed: bool, collected: Collected) -> None:
    async def work() -> None:
        backend = Stuck(count)
        app = create_app(backend, CONFIG, collected.traces)
        body = b'{"prompt": [1, 2], "stream": %s}' % (b"true" if is_streamed else b"false")
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            await backend.is_stuck.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http",
            "client": ("127.0.0.1", 1), "server": None, "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(work())
    root = collected.only()
    assert attributes(root)["error.type"] == "aborted"
    assert "server.address" not in attributes(root)
    assert [one.name for one in collected.children(root)] == names
    check_cover(root, collected.children(root))


def test_a_seed_of_64_bits_is_one_that_means_the_same(collected: Collected) -> None:
    ask(FakeBackend(), collected, "/v1/completions", {"prompt": [1], "seed": -3})
    assert attributes(collected.only())["gen_ai.request.seed"] == -3


def test_the_frameworks_own_spans_stay_off(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: collected.traces._provider)
    ask(FakeBackend(), collected, f"/v1/completions?{SECRET}", {"prompt": [1]})
    assert sorted(one.name for one in collected.spans) == [
        "decode",
        "prefill",
        "prepare",
        "queue",
        "text_completion demo",
    ]
