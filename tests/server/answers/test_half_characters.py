"""Halves of characters, as JavaScript cuts emoji: taken as U+FFFD and named, wherever a request has them."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from ktransformers.server.app import create_app
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import IGNORED_HEADER
from ktransformers.tokenizer.unicode import is_whole, may_have_halves, whole_text, with_whole_texts
from tests.support.servers.scripted_backend import Script, ScriptedBackend

HALF, MADE = "cut \ud83d", "cut \ufffd"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": HALF}}}
USER = {"role": "user", "content": "Hi"}


def _chat(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": list(messages), **more}


def _function(arguments: Any, name: str = "look") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def _claude(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 5, "messages": list(messages), **more}


def _responses(*items: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": list(items), **more}


def _ollama(*messages: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"model": "demo", "messages": list(messages), "stream": False, **more}


CALL = {"role": "assistant", "content": None, "tool_calls": [_function("{}")]}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": HALF}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]}
ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
SENT: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (_chat({"role": "user", "content": HALF}), "messages.content"),
    (_chat({"role": "user", "content": [{"type": "text", "text": HALF}]}), "messages.content.text"),
    (_chat({"role": HALF, "content": "Hi"}), "messages.role"),
    (_chat({"role": "user", "content": "Hi", "name": HALF}), "messages.name"),
    (_chat({"role": "assistant", "content": "Hm", "reasoning_content": HALF}, USER), "messages.reasoning_content"),
    (_chat(USER, CALL, {"role": "tool", "tool_call_id": "c1", "content": HALF}), "messages.content"),
    (
        _chat(USER, {"role": "assistant", "tool_calls": [_function(json.dumps({"a": HALF}))]}, USER),
        "messages.tool_calls.function.arguments",
    ),
    (
        _chat(USER, {"role": "assistant", "tool_calls": [_function('{"' + HALF + '": 1}')]}, USER),
        "messages.tool_calls.function.arguments",
    ),
    (
        _chat(USER, {"role": "assistant", "tool_calls": [_function("{}", HALF)]}, USER),
        "messages.tool_calls.function.name",
    ),
    (
        _chat(USER, tools=[{"type": "function", "function": {"name": "look", "description": HALF}}]),
        "tools.function.description",
    ),
    (
        _chat(USER, tools=[{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]),
        "tools.function.parameters",
    ),
    (_chat(USER, tools=[{"type": "function", "function": {"name": HALF}}]), "tools.function.name"),
    (_claude({"role": "user", "content": HALF}), "messages.content"),
    (_claude(USER, system=HALF), "system"),
    (_claude(USER, system=[{"type": "text", "text": HALF}]), "system.text"),
    (
        _claude(
            USER, USE, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": HALF}]}
        ),
        "messages.tool_result.content",
    ),
    (
        _claude(USER, {"role": "assistant", "content": [USE["content"][0] | {"input": {HALF: [HALF]}}]}, USER),  # type: ignore[index,operator]
        "messages.tool_use.input",
    ),
    (_claude(USER, tools=[{"name": "look", "input_schema": SCHEMA}]), "tools.input_schema"),
    (_responses({"role": "user", "content": HALF}), "input.content"),
    (("/v1/responses", {"input": HALF}), "input"),
    (_responses(USER, instructions=HALF), "instructions"),
    (
        _responses(USER, ITEM, {"type": "function_call_output", "call_id": "c1", "output": HALF}),
        "input.function_call_output.output",
    ),
    (_responses(USER, ITEM | {"arguments": json.dumps({"a": HALF})}, USER), "input.function_call.arguments"),
    (_responses(USER, tools=[{"type": "function", "name": "look", "parameters": SCHEMA}]), "tools.parameters"),
    (_ollama({"role": "user", "content": HALF}), "messages.content"),
    (_ollama(USER, {"role": "tool", "tool_name": "look", "content": HALF}), "messages.content"),
    (
        _ollama(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"a": HALF}}}]}),
        "messages.tool_calls.function.arguments",
    ),
    (("/api/generate", {"model": "demo", "prompt": HALF, "stream": False}), "prompt"),
    (("/v1/completions", {"prompt": HALF}), "prompt"),
    (("/v1/completions", {"prompt": [HALF, "whole"]}), "prompt"),
    (("/tokenize", {"prompt": HALF}), "prompt"),
]


def ask(path: str, data: bytes, **config: Any) -> tuple[httpx.Response, list[str]]:
    backend = ScriptedBackend(*[Script(["so"])] * 2)
    app = create_app(backend, ServerConfig(model_names=("demo",), **config))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, content=data, headers={"Content-Type": "application/json"})

    return asyncio.run(send()), backend.prompts


@pytest.mark.every(5)
@pytest.mark.parametrize(("asked", "field"), SENT)
def test_halves_are_taken_in_every_dialect(
    asked: tuple[str, dict[str, Any]], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, body = asked
    for data in (json.dumps(body).encode(), json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")):
        with caplog.at_level(logging.WARNING):
            response, prompts = ask(path, data, is_strict_on_fields=True)
        assert response.status_code == 200, response.text
        named = response.headers[IGNORED_HEADER].split(", ")
        assert field in named
        assert any(field in record.getMessage() for record in caplog.records)
        assert "cut" not in caplog.text
        if path != "/tokenize":
            shown = "".join(prompts).replace("\\ufffd", "\ufffd")
            assert MADE in shown
            assert is_whole(shown)


@pytest.mark.parametrize("name", ["stop", "cache_salt"])
def test_what_is_compared_has_to_be_text(name: str) -> None:
    response, _ = ask("/v1/chat/completions", json.dumps({"messages": [USER], name: HALF}).encode())
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]


WHOLE = ["Hi", "é", "😀", "\ufffd", "\\ud83d is a half", "a\\"]


@pytest.mark.parametrize("text", WHOLE)
def test_whole_texts_are_left_alone(text: str) -> None:
    assert is_whole(text)
    assert whole_text(text) == text
    value = {text: [text, 1, None]}
    assert with_whole_texts(value, pytest.fail) == value
    response, prompts = ask("/v1/completions", json.dumps({"prompt": text}).encode())
    assert IGNORED_HEADER not in response.headers
    assert prompts == [text]


@pytest.mark.parametrize(
    ("spelled", "made"),
    [
        ("\\ud83d", "\ufffd"),
        ("\\ude00", "\ufffd"),
        ("\\ud83d\\ude00", "😀"),
        ("\\ude00\\ud83d", "\ufffd\ufffd"),
        ("\\ud83d\\ud83d\\ude00", "\ufffd😀"),
        ("\\\\ud83d\\ude00", "\\ud83d\ufffd"),
        ("\\\\\\ud83d", "\\\ufffd"),
        ("\\uD83D x", "\ufffd x"),
        ("\\ud83d\\u0041", "\ufffdA"),
    ],
)
def test_halves_are_found_however_they_are_spelled(spelled: str, made: str) -> None:
    data = f'{{"a": "{spelled}"}}'.encode()
    parsed = json.loads(data)
    assert with_whole_texts(parsed, lambda at: None) == {"a": made}
    assert may_have_halves(data) or parsed == {"a": made}


def test_members_whose_names_become_the_same_stay_apart() -> None:
    places: list[Any] = []
    names = ("\ud83d", "\ud83e", "\ufffd")
    value: dict[str, Any] = dict(zip(names, (1, 2, 3), strict=True)) | {"x": [{"type": "t", "y": "\udc00"}]}
    made = with_whole_texts(value, places.append)
    assert list(made.values()) == [1, 2, 3, [{"type": "t", "y": "\ufffd"}]]
    assert len(made) == 4
    assert places == [(), (), ("x", "[t]", "y")]
    assert list(value)[:3] == list(names)
