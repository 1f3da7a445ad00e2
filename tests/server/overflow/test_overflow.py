"""Conversations that are longer than the context, in every dialect: refused in the field's words, or shortened."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ktransformers.server.app import create_app
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import DROPPED_HEADER
from tests.support.servers.scripted_backend import Script, ScriptedBackend

LIMIT = 800
SYSTEM = {"role": "system", "content": "RULES"}


def turns(count: int) -> list[dict[str, Any]]:
    """A conversation of `count` exchanges of 60 letters each, a byte of which is a token, and a last question."""
    made = [SYSTEM]
    for number in range(count):
        made.append({"role": "user", "content": f"question {number:02} " + "x" * 18})
        made.append({"role": "assistant", "content": f"answer {number:02} " + "y" * 20})
    return [*made, {"role": "user", "content": "LAST"}]


class Small(ScriptedBackend):
    """Has a context of LIMIT tokens."""

    is_models_limit = False

    @property
    def model(self) -> ModelInfo:
        return replace(super().model, max_len=LIMIT, is_models_limit=self.is_models_limit)

    @property
    def max_running(self) -> int:
        return 8


async def post(backend: Small, path: str, body: dict[str, Any], **config: Any) -> httpx.Response:
    await backend.start()
    app = create_app(backend, ServerConfig(model_names=("m",), **config))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return await client.post(path, json={"model": "m"} | body)


@pytest.fixture
def backend() -> Small:
    return Small(Script(["fine"]))


def ask(backend: Small, path: str, body: dict[str, Any], **config: Any) -> httpx.Response:
    return asyncio.run(post(backend, path, body, **config))


def conversation(path: str, count: int) -> dict[str, Any]:
    """The same conversation as each dialect has it."""
    messages = turns(count)
    if path == "/v1/responses":
        return {"input": messages}
    if path == "/v1/messages":
        return {"system": SYSTEM["content"], "messages": messages[1:], "max_tokens": 50}
    return {"messages": messages, "stream": False}


CHATS = {
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": None,
    "/api/chat": None,
}
OPENAI = re.compile(
    r"This model's maximum context length is 800 tokens \(set by the server's --cache_lens\)(, for prompt and answer "
    r"together)?\. However, the (conversation|prompt|input) has \d+ tokens(, which leaves no room for an answer)?: "
    r"shorten the \2, or start the server with a larger --cache_lens"
)


@pytest.mark.parametrize("path", CHATS)
def test_refused_in_the_fields_words(path: str, backend: Small) -> None:
    answer = ask(backend, path, conversation(path, 20))
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert OPENAI.search(message)
    if CHATS[path]:
        assert (error["param"], error["code"]) == (CHATS[path], "context_length_exceeded")
    assert not backend.requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 900}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 900}, "prompt"),
        ("/v1/embeddings", {"input": "x" * 900}, "input"),
        ("/v1/embeddings", {"input": ["x", "x" * 900]}, "input"),
    ],
)
def test_texts_are_refused_in_the_same_words(path: str, body: dict[str, Any], param: str, backend: Small) -> None:
    error = ask(backend, path, body).json()["error"]
    assert OPENAI.match(error["message"])
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_the_models_own_limit_is_named_as_such(backend: Small) -> None:
    backend.is_models_limit = True
    message = ask(backend, "/v1/chat/completions", conversation("", 20)).json()["error"]["message"]
    assert "is 800 tokens (what the model takes)" in message
    assert "--cache_lens" not in message


ASKED = [
    ("/v1/chat/completions", {"truncate_prompt_tokens": -1}),
    ("/v1/chat/completions", {"transforms": ["middle-out"]}),
    ("/v1/responses", {"truncation": "auto"}),
    ("/api/chat", {"truncate": True}),
    ("/api/chat", {"shift": True, "truncate": False}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_shortened_where_the_request_asks_for_it(path: str, body: dict[str, Any], backend: Small) -> None:
    answer = ask(backend, path, conversation(path, 20) | body)
    assert answer.status_code == 200, answer.text
    dropped = int(answer.headers[DROPPED_HEADER])
    (prompt,) = backend.prompts
    assert dropped % 2 == 0
    assert dropped > 0
    assert prompt.index("RULES") < prompt.index(f"question {dropped // 2:02}") < prompt.index("LAST")
    assert f"answer {dropped // 2 - 1:02}" not in prompt
    assert len(backend.requests[0].prompt_ids) <= LIMIT - LIMIT // 8
    assert not answer.headers.get("x-ktransformers-ignored")


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_what_fits_is_left_alone(path: str, body: dict[str, Any], backend: Small) -> None:
    answer = ask(backend, path, conversation(path, 3) | body)
    assert answer.status_code == 200
    assert DROPPED_HEADER not in answer.headers
    assert "question 00" in backend.prompts[0]


@pytest.mark.parametrize("path", CHATS)
def test_shortened_where_the_operator_says_so(path: str, backend: Small) -> None:
    answer = ask(backend, path, conversation(path, 20), drops_oldest=True)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers[DROPPED_HEADER]) > 0
    assert "RULES" in backend.prompts[0]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", {"truncation": "disabled"}), ("/api/chat", {"truncate": False})]
)
def test_a_request_that_wants_no_such_thing_is_refused_all_the_same(
    path: str, body: dict[str, Any], backend: Small
) -> None:
    assert ask(backend, path, conversation(path, 20) | body, drops_oldest=True).status_code == 400


def test_no_more_than_so_many_tokens(backend: Small) -> None:
    answer = ask(backend, "/v1/chat/completions", conversation("", 8) | {"truncate_prompt_tokens": 300})
    assert answer.status_code == 200
    assert len(backend.requests[0].prompt_ids) <= 300
    few = ask(backend, "/v1/chat/completions", conversation("", 8) | {"truncate_prompt_tokens": 10})
    assert (few.status_code, few.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert "more than 10 tokens" in few.json()["error"]["message"]


@pytest.mark.parametrize(("wanted", "left"), [(5, "vwxyz"), (26, "abcdefghijklmnopqrstuvwxyz"), (-1, None)])
def test_of_a_text_the_last_tokens_are_left(wanted: int, left: str | None, backend: Small) -> None:
    text = "0" * 900 + "abcdefghijklmnopqrstuvwxyz"
    answer = ask(backend, "/v1/completions", {"prompt": text, "truncate_prompt_tokens": wanted, "max_tokens": 16})
    assert answer.status_code == 200
    (prompt,) = backend.prompts
    assert prompt == left if left else (prompt.endswith("xyz") and len(prompt) == LIMIT - 16)


def test_a_last_question_that_is_too_long_is_refused(backend: Small) -> None:
    body = {"messages": [SYSTEM, {"role": "user", "content": "x" * 900}]}
    answer = ask(backend, "/v1/chat/completions", body, drops_oldest=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_one_that_leaves_little_room_is_answered(backend: Small) -> None:
    body = {"messages": [SYSTEM, {"role": "user", "content": "x" * 650}]}
    assert ask(backend, "/v1/chat/completions", body, drops_oldest=True).status_code == 200
