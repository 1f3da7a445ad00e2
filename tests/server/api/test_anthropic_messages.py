"""/v1/messages over a backend that says what a test wants: broken streams, refusals, fields, the order of blocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent
from ktransformers.errors import EngineError, FieldError
from ktransformers.server.answers.requests import Message, PastCall
from ktransformers.server.api.anthropic.errors import error_shape
from ktransformers.server.api.anthropic.fields import TABLE
from ktransformers.server.api.anthropic.read import read_conversation
from ktransformers.server.api.anthropic.schemas import ConversationBody
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import sort_fields
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.servers.fake_backend import FakeBackend

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
CONFIG = ServerConfig(model_names=("m",))
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BODY: dict[str, Any] = {"max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
ADD = {"name": "add", "input_schema": {"type": "object"}}


class Talking(FakeBackend):
    """Says `pieces`, then ends for `reason`, or fails where there is none. `asked`: what came last."""

    def __init__(self, *pieces: str, reason: FinishReason | None = FinishReason.STOP):
        super().__init__()
        self._pieces, self._reason = pieces, reason
        self.asked: GenerationRequest | None = None

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(TOKENIZER, 512, TOKENIZER.vocab_size, (), SamplingParams(temperature=0), None, "talking")

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.asked = request
        stats = GenerationStats(prompt_len=len(request.prompt_ids), cached_len=4)
        for piece in self._pieces:
            stats.completion_len += 1
            yield TokenEvent(7, piece, stats)
        if self._reason is None:
            raise EngineError("it broke")
        yield TokenEvent(None, "", stats, finish_reason=self._reason)


def post(
    backend: FakeBackend,
    body: dict[str, Any],
    config: ServerConfig = CONFIG,
    path: str = "/v1/messages",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    app = create_app(backend, config)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.post(path, json=body, headers=headers)
        app.state.service.workers.close()
        return response

    return asyncio.run(main())


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line[:5] == "data:"]


def test_blocks_follow_each_other_as_the_model_wrote_them() -> None:
    said = ("<think>hm", "</think>", "So: ", CALL, " and ", CALL, "!")
    fields = {**BODY, "tools": [ADD]}
    whole = post(Talking(*said), fields).json()
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "text", "tool_use", "text"]
    assert [block["text"] for block in whole["content"] if block["type"] == "text"] == ["So: ", " and ", "!"]
    assert [block["input"] for block in whole["content"] if block["type"] == "tool_use"] == [{"a": 1}] * 2
    assert whole["stop_reason"] == "tool_use"
    ids = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 2
    assert all(id.startswith("toolu_") for id in ids)
    events = events_of(post(Talking(*said), {**fields, "stream": True}))
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == list(range(6))
    assert [start["content_block"]["type"] for start in starts] == kinds
    assert all(start["content_block"].get("input", {}) == {} for start in starts)
    one = {**fields, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert sum(block["type"] == "tool_use" for block in post(Talking(*said), one).json()["content"]) == 1


def test_an_error_in_the_middle_is_the_last_event() -> None:
    response = post(Talking("a", reason=None), {**BODY, "stream": True})
    assert response.status_code == 200
    assert events_of(response)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "it broke", "details": {"error_code": "engine_error"}},
        "request_id": response.headers["request-id"],
    }
    assert response.text.splitlines()[-3] == "event: error"
    whole = post(Talking("a", reason=None), BODY)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")


def test_an_answer_that_the_servers_end_cuts_off_is_an_error() -> None:
    events = events_of(post(Talking("a", reason=FinishReason.ABORT), {**BODY, "stream": True}))
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert "message_stop" not in {event["type"] for event in events}
    assert post(Talking("a", reason=FinishReason.ABORT), BODY).status_code == 503


def test_a_call_that_max_tokens_cut_off_before_its_arguments_is_neither_a_call_nor_text() -> None:
    cut = post(Talking(CALL[:40], reason=FinishReason.LENGTH), {**BODY, "max_tokens": 1, "tools": [ADD]}).json()
    assert (cut["stop_reason"], cut["content"]) == ("max_tokens", [])


@pytest.mark.parametrize(
    ("status", "type"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (421, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_types_of_errors(status: int, type: str) -> None:
    assert error_shape(status, "no", None, None)["error"] == {"type": type, "message": "no"}


def test_refusals_in_front_of_the_routes_have_the_paths_shape() -> None:
    guarded = replace(CONFIG, api_keys=("secret",))
    refused = post(Talking(), BODY, guarded)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert refused.json()["request_id"] == refused.headers["request-id"]
    assert post(Talking(), BODY, guarded, headers={"authorization": "Bearer secret"}).status_code == 200
    foreign = post(Talking(), BODY, headers={"origin": "http://elsewhere.example"})
    assert (foreign.status_code, foreign.json()["error"]["type"]) == (403, "permission_error")
    assert set(post(Talking(), BODY, guarded, "/v1/chat/completions").json()["error"]) == {
        "message",
        "type",
        "param",
        "code",
    }
    loading = post(FakeBackend(is_loaded=False), BODY)
    assert (loading.status_code, loading.json()["error"]["type"]) == (503, "overloaded_error")
    assert loading.headers["retry-after"]
    unnamed = replace(CONFIG, is_strict_on_names=True)
    named = {**BODY, "model": "claude-opus-4-5"}
    assert post(Talking(), named, unnamed).json()["error"]["type"] == "not_found_error"
    assert post(Talking(), named, unnamed, "/v1/messages/count_tokens").status_code == 404
    assert post(Talking(), named).json()["model"] == "m"


def test_sampling_reaches_the_backend() -> None:
    backend = Talking("a")
    post(
        backend,
        {
            **BODY,
            "max_tokens": 30.0,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "stop_sequences": ["x", ""],
            "seed": 3,
            "repeat_penalty": 1.5,
        },
    )
    assert backend.asked is not None
    params = backend.asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (30, 0.5, 0.9, 5)
    assert (params.stop, params.seed, params.repetition_penalty) == (("x",), 3, 1.5)
    post(backend, {**BODY, "temperature": 0.5, "top_p": 0})
    assert backend.asked.params.temperature == 0


# The fields.


def test_the_table() -> None:
    given = {
        "max_completion_tokens": 5,
        "stop": "x",
        "metadata": {"user_id": "1"},
        "mcp_servers": [],
        "container": None,
        "n": 1,
        "output_format": {"type": "json_schema"},
        "strange": 1,
        "line\nbreak": 1,
        "none": None,
    }
    assert sort_fields(given, TABLE) == (
        {"max_tokens": 5, "stop_sequences": ["x"], "output_config": {"format": {"type": "json_schema"}}},
        ("strange", "line\nbreak"),
    )
    for refused in ({"n": 2}, {"n": True}, {"logit_bias": {"1": 1}}, {"container": "x"}, {"thread": {}}):
        with pytest.raises(FieldError, match=f"^{next(iter(refused))}: this server does not support it; use "):
            sort_fields(refused, TABLE)


def test_names_that_no_header_can_carry() -> None:
    response = post(Talking("a"), {**BODY, "line\nbreak": 1, "ok": 1})
    assert response.headers["x-ktransformers-ignored"] == "?, ok"


# The conversation.


def turns_of(*messages: dict[str, Any], **fields: Any) -> list[Message]:
    body = ConversationBody.model_validate({"messages": list(messages), **fields})
    return list(read_conversation(body).conversation.messages)


def test_turns() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    found = {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "found"}]}
    document = {
        "type": "document",
        "title": "D",
        "source": {"type": "text", "media_type": "text/plain", "data": "read me"},
    }
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    assert turns_of(
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, document]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "d", "citations": []}, {**use, "caller": {}}]},
        {"role": "user", "content": [{**result, "content": [found]}, {"type": "text", "text": "e"}, result]},
        {"role": "system", "content": "f"},
        system="s",
    ) == [
        Message(role="system", content="s"),
        Message(role="user", content="a\nD\nread me\nb"),
        Message(role="assistant", content="c\nd", tool_calls=(PastCall(id="t1", name="add", arguments={"a": 1}),)),
        Message(role="tool", content="T\nS\nfound", tool_call_id="t1", name="add"),
        Message(role="user", content="e"),
        Message(role="tool", content="", tool_call_id="t1", name="add"),
        Message(role="user", content="<system-reminder>\nf\n</system-reminder>"),
    ]
    first = turns_of({"role": "system", "content": "b"}, {"role": "user", "content": "c"}, system="a")
    assert first == [Message(role="system", content="a\nb"), Message(role="user", content="c")]


def test_failed_calls_say_so() -> None:
    for text, shown in (("gone", "Error: gone"), ("<tool_use_error>gone</tool_use_error>",) * 2, ("", "Error: ")):
        block = {"type": "tool_result", "tool_use_id": "t1", "content": text, "is_error": True}
        assert turns_of({"role": "user", "content": [block]})[0].text == shown


def test_billing_is_not_shown_to_the_model() -> None:
    account = "x-anthropic-billing-header: cc_version=2; cch=1;"
    turns = turns_of({"role": "user", "content": "a"}, system=[{"type": "text", "text": account}])
    assert [turn.role for turn in turns] == ["user"]
    turns = turns_of({"role": "user", "content": "a"}, system=f"{account}\nBe brief.")
    assert turns[0].text == "Be brief."


def test_tools_that_find_tools_are_not_needed() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    body = {"messages": BODY["messages"], "tools": [search, {**ADD, "defer_loading": True, "type": "custom"}]}
    reading = read_conversation(ConversationBody.model_validate(body))
    assert [tool.name for tool in reading.conversation.tools] == ["add"]
    assert reading.ignored == ("tools.tool_search_tool",)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, (None, None, None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, (True, 9, None)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, (True, None, "high")),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, (False, None, "low")),
    ],
)
def test_reasoning(fields: dict[str, Any], wanted: tuple[bool | None, int | None, str | None]) -> None:
    conversation = read_conversation(ConversationBody.model_validate(BODY | fields)).conversation
    assert (conversation.thinks, conversation.reasoning_budget, conversation.reasoning_effort) == wanted


def test_strict_requests_refuse_what_has_no_effect() -> None:
    strict = replace(CONFIG, is_strict_on_fields=True)
    for fields in (
        {"made_up": 1},
        {"context_management": {"edits": [{"type": "x"}]}},
        {"thinking": {"type": "disabled"}},
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = post(Talking("a"), {**BODY, **fields}, strict, path)
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert post(Talking("a"), {**BODY, "metadata": {}}, strict).status_code == 200
