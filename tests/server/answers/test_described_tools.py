"""Requests with tools for templates that know none, in every dialect; and where tools are switched off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ktransformers.core import ConstraintKind, SamplingParams
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.tokenizer import Tokenizer
from tests.server.api.test_folded_prompts import DIALECTS, QUESTION, STEPS, SYSTEM
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.servers.scripted_backend import Script, ScriptedBackend
from tests.tokenizer.test_described_tools import ORIGINAL, ZEPHYR

Dialect = Callable[[], tuple[str, dict[str, Any]]]
CALL = '{"name": "clock", "arguments": {"zone": "CET"}}'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n"
    '{"zone": "CET"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


class Scripted(ScriptedBackend):
    """With another chat template."""

    def __init__(self, template: str, answer: str, form: str):
        super().__init__(Script([answer]))
        self.tokenizer: Tokenizer = byte_tokenizer(template)
        self.tokenizer.use_tool_format(form)

    @property
    def model(self) -> ModelInfo:
        made, ends = self.tokenizer, (self.tokenizer.eos_token_id,)
        return ModelInfo(made, 1 << 18, made.vocab_size, ends, SamplingParams(temperature=0), None, "scripted")


def ask(
    template: str, answer: str, path: str, body: dict[str, Any], form: str = "auto"
) -> tuple[Scripted, httpx.Response]:
    backend = Scripted(template, answer, form)
    app = create_app(backend, ServerConfig(model_names=("m",)))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, json=body)

    return backend, asyncio.run(send())


@pytest.mark.parametrize(("template", "answer"), [(ZEPHYR, CALL), (ORIGINAL, DEEPSEEK_CALL)], ids=["zephyr", "v3"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_calls_tools(dialect: Dialect, template: str, answer: str) -> None:
    backend, response = ask(template, answer, *dialect())
    assert response.status_code == 200, response.text
    prompt = backend.tokenizer.decode(backend.requests[0].prompt_ids, skip_special_tokens=False)
    for text in (SYSTEM, "# Functions", QUESTION, *(result for _, _, result in STEPS)):
        assert prompt.count(text) == 1
    assert prompt.index(SYSTEM) < prompt.index("# Functions") < prompt.index(QUESTION)
    for _, arguments, result in STEPS:
        assert prompt.index(json.dumps(arguments)) < prompt.index(result)
    assert "clock" in response.text
    assert "CET" in response.text
    assert answer[:20] not in response.text.replace('\\"', '"')
    assert "tools" in response.headers["x-ktransformers-ignored"].split(", ")


CHOICES: list[tuple[Any, bool, bool]] = [
    ("auto", True, False),
    ("none", False, False),
    ("required", True, True),
    ({"type": "function", "function": {"name": "clock"}}, True, True),
]


@pytest.mark.parametrize(("choice", "is_shown", "is_forced"), CHOICES)
def test_choices_are_what_they_are_elsewhere(choice: Any, is_shown: bool, is_forced: bool) -> None:
    path, body = DIALECTS[0]()
    backend, response = ask(ZEPHYR, CALL, path, body | {"tool_choice": choice})
    assert response.status_code == 200, response.text
    (request,) = backend.requests
    prompt = backend.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert ("# Functions" in prompt) == is_shown
    constraint = request.params.constraint
    assert (constraint is not None and constraint.kind is ConstraintKind.TOOL_CALLS) == is_forced
    message = response.json()["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == is_shown
    assert bool(message["content"]) != is_shown


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tools_can_be_switched_off(dialect: Dialect) -> None:
    _, response = ask(ZEPHYR, CALL, *dialect(), form="none")
    assert response.status_code == 400
    assert "--tool_format none" in response.text
    path, body = dialect()
    del body["tools"]
    assert ask(ZEPHYR, "So.", path, body, form="none")[1].status_code == 200
