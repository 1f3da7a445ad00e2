"""Ollama's API without a model: what its fields become, how answers are written, what is said before there is one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Request

from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent
from ktransformers.engine.model.card import ModelCard
from ktransformers.errors import EngineError, FieldError
from ktransformers.server.answers.events import (
    AnswerFinished,
    AnswerReason,
    AnswerStep,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from ktransformers.server.api.ollama.fields import GENERATE
from ktransformers.server.api.ollama.front import running
from ktransformers.server.api.ollama.read import chat_request, knows_thinking
from ktransformers.server.api.ollama.schemas import ChatBody, OllamaBody
from ktransformers.server.api.ollama.writer import ChatWriter
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import sort_fields
from tests.support.engines.fake_runner import CHAT_TEMPLATE, byte_tokenizer
from tests.support.servers.fake_backend import FakeBackend

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Talking(FakeBackend):
    """Says `pieces`, then ends or fails. template: of its model."""

    def __init__(self, pieces: list[str], fails: bool = False, template: str = CHAT_TEMPLATE):
        super().__init__()
        self._pieces, self._fails, self._tokenizer = pieces, fails, byte_tokenizer(template)
        self.asked: list[GenerationRequest] = []

    @property
    def model(self) -> ModelInfo:
        tokenizer = self._tokenizer
        card = ModelCard(gpu_bytes=3 << 30)
        return ModelInfo(
            tokenizer, 256, tokenizer.vocab_size, (), SamplingParams(temperature=0), None, "talking", card=card
        )

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append(request)
        stats = GenerationStats(prompt_len=len(request.prompt_ids))
        for piece in self._pieces:
            stats.completion_len += 1
            yield TokenEvent(7, piece, stats)
        if self._fails:
            raise EngineError("it broke")
        yield TokenEvent(self._tokenizer.eos_token_id, "", stats, finish_reason=FinishReason.STOP, stop=2)


def ask(
    method: str, path: str, backend: FakeBackend | None = None, config: ServerConfig | None = None, **more: Any
) -> httpx.Response:
    app = create_app(backend or Talking(["so"]), config or ServerConfig(model_names=("m", "org/n:7b")))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def test_an_error_in_the_middle_is_the_last_line() -> None:
    answer = ask("POST", "/api/chat", Talking(["so ", "far"], fails=True), json=CHAT)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["message"]["content"] for line in lines[:-1]] == ["so ", "far"]
    assert lines[-1] == {"error": "it broke"}
    whole = ask("POST", "/api/chat", Talking(["so"], fails=True), json=CHAT | {"stream": False})
    assert (whole.status_code, whole.json()) == (500, {"error": "it broke"})


def step(*events: Any) -> AnswerStep:
    return AnswerStep(0, events)


def finished(reason: AnswerReason) -> AnswerFinished:
    return AnswerFinished(reason, None, GenerationStats())


def writer() -> ChatWriter:
    prepared: Any = SimpleNamespace(usage=lambda: GenerationStats(3, 0, 5, 0.25, 0.5))
    return ChatWriter(prepared, "m", 0.0)


def test_calls_are_whole_however_their_arguments_come() -> None:
    made = writer()
    lines = [
        *made.write(step(TextDelta("a "), ToolCallStarted(0, "x", "add"), ToolArgumentsDelta(0, '{"a"'))),
        *made.write(step(ToolArgumentsDelta(0, ": [1]}"))),
        *made.write(step(ToolCallEnded(0), ToolCallStarted(1, "y", "now"), ToolCallEnded(1))),
        *made.write(step(finished(AnswerReason.TOOL_CALLS))),
    ]
    messages = [json.loads(line)["message"] for line in lines]
    calls = [
        {"id": "x", "function": {"index": 0, "name": "add", "arguments": {"a": [1]}}},
        {"id": "y", "function": {"index": 1, "name": "now", "arguments": {}}},
    ]
    assert messages == [
        {"role": "assistant", "content": "a "},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "assistant", "content": ""},
    ]
    end = json.loads(lines[-1])
    assert end["done_reason"] == "stop"
    counts = {name: end[name] for name in ("prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")}
    assert list(counts.values()) == [3, 250_000_000, 5, 500_000_000]


@pytest.mark.parametrize("text", ["[1]", '{"a": ', '{"a": ' + "[" * 5000 + "]" * 5000 + "}"])
@pytest.mark.parametrize(
    ("reason", "shown"), [(AnswerReason.STOP, "stop"), (AnswerReason.LENGTH, "length"), (AnswerReason.ABORT, "abort")]
)
def test_a_call_without_an_object_is_left_out(text: str, reason: AnswerReason, shown: str) -> None:
    made = writer()
    called = (ToolCallStarted(0, "x", "add"), ToolArgumentsDelta(0, text), ToolCallEnded(0, is_whole=False))
    made.keep(step(TextDelta("so"), *called, finished(reason)))
    assert made.body()["message"] == {"role": "assistant", "content": "so"}
    assert made.body()["done_reason"] == shown


PLAIN, SWITCH = CHAT_TEMPLATE, CHAT_TEMPLATE + "{% if enable_thinking %}<think>{% endif %}"
EFFORT = CHAT_TEMPLATE + "{{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "think", "kwargs", "effort", "ignored"),
    [
        (SWITCH, None, {}, None, []),
        (SWITCH, True, {"enable_thinking": True}, None, []),
        (SWITCH, False, {"enable_thinking": False}, None, []),
        (SWITCH, "low", {"enable_thinking": True}, None, ["think"]),
        (EFFORT, "low", {}, "low", []),
        (EFFORT, True, {}, None, []),
        (EFFORT, False, {}, None, ["think"]),
        (PLAIN, True, {}, None, []),  # its tokenizer has the tags: it thinks as it likes
        (PLAIN, False, {}, None, ["think"]),
    ],
)
def test_think(
    template: str, think: bool | str, kwargs: dict[str, Any], effort: str | None, ignored: list[str]
) -> None:
    service: Any = SimpleNamespace(model=Talking([], template=template).model, model_names=("m",))
    noted: list[str] = []
    asked = chat_request(service, ChatBody.model_validate(CHAT | {"think": think}), noted)
    assert asked.conversation.template_kwargs == kwargs
    assert asked.conversation.reasoning_effort == effort
    assert noted == ignored
    assert knows_thinking(service.model.tokenizer)


def test_calls_and_results_get_ids() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("b", "a", "c")]
    again = {"role": "assistant", "tool_calls": [{"id": "own", "function": {"name": "a", "arguments": '{"x": 1}'}}]}
    last = {"role": "tool", "content": "1"}
    messages = [{"role": "assistant", "tool_calls": calls}, *results, again, last]
    service: Any = SimpleNamespace(model=Talking([]).model, model_names=("m",))
    made = chat_request(service, ChatBody.model_validate({"messages": messages}), []).conversation.messages
    assert [call.id for call in made[0].tool_calls] == ["call00000", "call00001"]
    assert [message.tool_call_id for message in made[1:4]] == ["call00001", "call00000", None]
    assert (made[4].tool_calls[0].id, made[4].tool_calls[0].arguments) == ("own", {"x": 1})
    assert made[5].tool_call_id == "own"


def test_neutral_values_are_as_if_absent() -> None:
    neutral = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "penalize_newline": True, "num_gpu": 7, "top_k": None}
    body = {"format": "", "template": None, "options": neutral | {"seed": 3, "spin": 1}, "suffix": ""}
    assert sort_fields(body, GENERATE) == ({"options": {"seed": 3}}, ("options.spin",))
    for wrong in ({"mirostat": 1}, {"mirostat": False}, {"typical_p": 0.9}, {"penalize_newline": False}):
        with pytest.raises(FieldError, match=r"^options\..*: this server does not support it; use "):
            sort_fields({"options": wrong}, GENERATE)


@pytest.mark.parametrize(
    ("keep_alive", "is_to_unload"), [(0, True), ("0", True), ("0s", True), (0.0, True), (-1, False), ("10m", False)]
)
def test_keep_alive(keep_alive: Any, is_to_unload: bool) -> None:
    assert OllamaBody(keep_alive=keep_alive).is_to_unload is is_to_unload


@pytest.mark.parametrize(
    "more", [{"foo": 1}, {"options": {"spin": 1}}, {"options": {"num_ctx": 1 << 20}}, {"messages": [], "keep_alive": 0}]
)
def test_strict_requests(more: dict[str, Any]) -> None:
    strict = ServerConfig(model_names=("m",), is_strict_on_fields=True)
    assert ask("POST", "/api/chat", config=strict, json=CHAT).status_code == 200
    answer = ask("POST", "/api/chat", config=strict, json=CHAT | more)
    assert (answer.status_code, answer.json().keys()) == (400, {"error"})
    assert "has no effect here" in answer.json()["error"]


def test_before_the_model_is_loaded() -> None:
    backend = FakeBackend(is_loaded=False)
    assert ask("GET", "/api/version", backend).status_code == 200
    assert ask("GET", "/api/ps", backend).json() == {"models": []}
    for method, path, body in (("GET", "/api/tags", None), ("POST", "/api/chat", {}), ("POST", "/api/generate", {})):
        answer = ask(method, path, backend, json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "not loaded" in answer.json()["error"]


def test_what_is_on_gpus() -> None:
    assert [model["size_vram"] for model in ask("GET", "/api/ps").json()["models"]] == [3 << 30] * 2


def test_names_have_a_tag() -> None:
    assert [model["name"] for model in ask("GET", "/api/tags").json()["models"]] == ["m:latest", "org/n:7b"]
    assert ask("POST", "/api/show", json={"name": "m:latest", "verbose": True}).status_code == 200
    strict = ServerConfig(model_names=("m",), is_strict_on_names=True)
    assert ask("POST", "/api/chat", config=strict, json=CHAT | {"model": "m:latest"}).status_code == 200
    answer = ask("POST", "/api/chat", config=strict, json=CHAT | {"model": "llama3"})
    assert (answer.status_code, set(answer.json())) == (404, {"error"})


def test_keys() -> None:
    config = ServerConfig(model_names=("m",), api_keys=("k",))
    answer = ask("GET", "/api/tags", config=config)
    assert (answer.status_code, set(answer.json())) == (401, {"error"})
    assert ask("GET", "/api/tags", config=config, headers={"Authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize(
    ("accept", "is_shown"), [("*/*", True), ("", True), ("text/html,*/*", False), ("application/json", False)]
)
def test_who_hears_that_ollama_is_running(accept: str, is_shown: bool) -> None:
    response = running(Request({"type": "http", "headers": [(b"accept", accept.encode())]}))
    assert (response is not None) is is_shown
    assert response is None or response.body == b"Ollama is running"
