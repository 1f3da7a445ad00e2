"""What clients say of draft tokens and of the answer they expect, and what they are told of both."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, get_args

import httpx
import pytest

from ktransformers.config import SPECULATIVES
from ktransformers.core import TokenEvent
from ktransformers.server.api.sampling_fields import SamplingFields
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from tests.support.servers.scripted_backend import Script, ScriptedBackend

TURN = {"role": "user", "content": "hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [TURN], "max_tokens": 8},
    "/api/chat": {"messages": [TURN], "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}
OPENAI = tuple(BODIES)[:3]


class Drafting(ScriptedBackend):
    """Says of each answer that four draft tokens were run before each token, of which one was accepted."""

    is_drafting = True

    @property
    def model(self) -> ModelInfo:
        return replace(super().model, max_len=40, max_drafts=4 * self.is_drafting, drafter="mtp")

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        async for event in super().inference(request):
            if self.is_drafting:
                event.stats.num_drafted += 4
                event.stats.num_accepted += 1
            yield event


class Plain(Drafting):
    is_drafting = False


def ask(backend: ScriptedBackend, *calls: tuple[str, str, dict[str, Any] | None]) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        app = create_app(backend, ServerConfig(model_names=("m",)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return [await client.request(method, path, json=body) for method, path, body in calls]

    return asyncio.run(send())


def post(path: str, fields: dict[str, Any], backend: ScriptedBackend | None = None) -> httpx.Response:
    body = BODIES[path] | ({"options": fields} if path.startswith("/api") else fields)
    (answer,) = ask(backend or Drafting(Script(["a", "b"])), ("POST", path, body))
    return answer


def test_the_words_are_those_of_the_flag() -> None:
    allowed = get_args(get_args(SamplingFields.model_fields["speculative"].annotation)[0])
    assert set(allowed) == set(SPECULATIVES)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speculative": "eagle"}, "'auto', 'ngram', 'draft', 'mtp' or 'off'"),
        ({"speculative": True}, "'auto', 'ngram', 'draft', 'mtp' or 'off'"),
        ({"speculative": {"n_max": 3}}, "'auto', 'ngram', 'draft', 'mtp' or 'off'"),
        ({"speculative_tokens": -1}, "greater than or equal to 0"),
        ({"speculative_tokens": 1 << 31}, "less than"),
        ({"speculative_tokens": "3"}, "valid integer"),
        ({"speculative_tokens": 1.5}, "valid integer"),
        ({"speculative.n_max": -1}, "greater than or equal to 0"),
        ({"speculative.n_max": 3, "speculative_tokens": 4}, "says something else than"),
        ({"speculative": "off", "speculative_tokens": 4}, "say different things; send one of them"),
    ],
)
def test_a_wrong_value_is_refused(path: str, fields: dict[str, Any], said: str) -> None:
    answer = post(path, fields)
    assert answer.status_code == 400, answer.text
    assert said in answer.text
    assert "speculative" in answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["speculative.n_max", "speculative_tokens"])
def test_errors_name_what_the_request_has(path: str, name: str) -> None:
    wrong, two = (post(path, fields).text for fields in ({name: -1}, {"speculative": "off", name: 4}))
    assert f"{name}: Input should be greater than or equal to 0" in wrong
    assert f"speculative off and {name} 4 say different things" in two
    if name != "speculative_tokens":
        assert "speculative_tokens" not in wrong + two
    if path in OPENAI:
        assert json.loads(wrong)["error"]["param"] == name


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"content": "text"}, "prediction.type"),
        ({"type": "tokens", "content": "text"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url", "text": "x"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": "x" * 40}, "the prediction has 40 tokens, and no answer has more than 39"),
        ({"type": "content", "content": "x" * 100_000}, "no answer has more than 39"),
    ],
)
def test_a_prediction_that_is_none_is_refused(path: str, prediction: object, said: str) -> None:
    answer = post(path, {"prediction": prediction})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in f"{error['param']} {error['message']}"
    assert error["param"].split(".")[0] == "prediction"
    assert error["code"] != "context_length_exceeded"  # clients would shorten the conversation


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("content", ["", []])
def test_an_empty_prediction_predicts_nothing(path: str, content: object) -> None:
    backend = Drafting(Script(["a"]))
    assert post(path, {"prediction": {"type": "content", "content": content}}, backend).status_code == 200
    assert backend.requests[0].prediction_ids == ()


def test_answers_to_one_prompt_share_their_prediction() -> None:
    backend = Drafting(*[Script(["a"])] * 3)
    post("/v1/chat/completions", {"n": 3, "prediction": {"type": "content", "content": "abc"}}, backend)
    assert len({id(request.prediction_ids) for request in backend.requests}) == 1
    assert len(backend.requests[0].prediction_ids) == 3


COUNTED = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 9}
"""Of two pieces and the end token."""

NOTHING = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize(("kind", "counts"), [(Drafting, COUNTED), (Plain, NOTHING)])
def test_the_usage_counts_draft_tokens(kind: type[Drafting], counts: dict[str, int]) -> None:
    for path in OPENAI[:2]:
        usage = post(path, {}, kind(Script(["a", "b"]))).json()["usage"]
        assert usage["completion_tokens_details"] == counts
        assert usage["completion_tokens"] == 3  # what was rejected is no token of the answer
        for options in (None, {"include_usage": True}):
            streamed = post(path, {"stream": True, "stream_options": options}, kind(Script(["a", "b"])))
            lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
            usages = [json.loads(line).get("usage") for line in lines if line != "[DONE]"]
            assert [usage["completion_tokens_details"] for usage in usages if usage] == [counts]
    usage = post("/v1/responses", {}, kind(Script(["a", "b"]))).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0} | counts


def test_metrics_status_and_log_count_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ktransformers.server")
    chat = ("POST", "/v1/chat/completions", BODIES["/v1/chat/completions"] | {"n": 2})
    looks = [("GET", path, None) for path in ("/metrics", "/v1/status", "/slots", "/server_info")]
    _, metrics, status, slots, info = ask(Drafting(*[Script(["a", "b"])] * 2), chat, *looks)
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 24.0' in metrics.text
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 6.0' in metrics.text
    assert status.json()["drafts"] == {"drafter": "mtp", "drafted": 24, "accepted": 6}
    (past,) = status.json()["requests"]
    assert (past["draft_tokens"], past["accepted_tokens"]) == (24, 6)
    assert ", 6 of 24 draft tokens accepted, stop" in caplog.text
    assert [slot["speculative"] for slot in slots.json()] == [True]
    assert info.json()["speculative_tokens"] == 4
    assert info.json()["speculative"] == "mtp"


def test_without_any_nothing_is_said_of_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ktransformers.server")
    chat = ("POST", "/v1/chat/completions", BODIES["/v1/chat/completions"])
    looks = [("GET", path, None) for path in ("/metrics", "/v1/status", "/slots")]
    _, metrics, status, slots = ask(Plain(Script(["a"])), chat, *looks)
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 0.0' in metrics.text
    assert status.json()["drafts"] is None
    assert "draft tokens" not in caplog.text
    assert slots.json()[0]["speculative"] is False
