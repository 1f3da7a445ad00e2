"""Calls that were demanded and cut before their arguments, in the formats without a tag: all dialects, both ways."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from ktransformers.core import FinishReason, SamplingParams
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.tokenizer import Tokenizer
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.servers.scripted_backend import TEMPLATE, Script, ScriptedBackend

BEGUN = {
    "json": ['{"name": "lo', "{", '[{"name": "look"', '```json\n{"na'],
    "llama3_json": ['{"name": "lo', '{"name": "look", "param', '<|python_tag|>{"na'],
    "llama4_pythonic": ["[lo", "["],
}
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "Weather in Oslo?"}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "look"}}
CLAUDE = {"name": "look", "input_schema": CITY}
FLAT = {"type": "function", "name": "look", "parameters": CITY}

ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [USER], "tools": [FUNCTION], "tool_choice": "required"}, '"length"'),
    ("/v1/chat/completions", {"messages": [USER], "tools": [FUNCTION], "tool_choice": NAMED}, '"length"'),
    ("/v1/responses", {"input": "x", "tools": [FLAT], "tool_choice": "required"}, '"max_output_tokens"'),
    (
        "/v1/messages",
        {"messages": [USER], "tools": [CLAUDE], "tool_choice": {"type": "tool", "name": "look"}},
        '"max_tokens"',
    ),
]


class Untagged(ScriptedBackend):
    """Reads its answers in a format of --tool_format."""

    def __init__(self, tokenizer: Tokenizer, *scripts: Script):
        super().__init__(*scripts)
        self._tokenizer = tokenizer

    @property
    def model(self) -> ModelInfo:
        size = self._tokenizer.vocab_size
        ends = (self._tokenizer.eos_token_id,)
        return ModelInfo(self._tokenizer, 1 << 18, size, ends, SamplingParams(temperature=0), None, "scripted")


def ask(form: str, text: str, path: str, body: dict[str, Any]) -> str:
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.use_tool_format(form)
    script = Script([text[at : at + 3] for at in range(0, len(text), 3)], FinishReason.LENGTH)
    if path == "/v1/messages":
        body = {**body, "max_tokens": len(script.pieces)}
    app = create_app(Untagged(tokenizer, script), ServerConfig(model_names=("m",)))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    response = asyncio.run(send())
    assert response.status_code == 200, response.text
    return response.text


def shown(text: str) -> set[str]:
    """All texts for the reader, wherever a dialect has them."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.update(value[key] for key in ("content", "text", "delta") if isinstance(value.get(key), str))
            list(map(walk, value.values()))
        elif isinstance(value, list):
            list(map(walk, value))

    for line in text.splitlines():
        if line.startswith(("data: {", "{")):
            walk(json.loads(line.removeprefix("data: ")))
    return found - {""}


@pytest.mark.every(4)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("path", "body", "reason"), ASKED)
def test_half_a_demanded_call_is_no_text(path: str, body: dict[str, Any], reason: str, is_streamed: bool) -> None:
    for form, texts in BEGUN.items():
        for text in texts:
            told = ask(form, text, path, body | {"stream": is_streamed})
            assert shown(told) == set(), text
            assert reason in told


@pytest.mark.parametrize(("path", "body", "reason"), ASKED)
def test_what_nobody_demanded_stays_text(path: str, body: dict[str, Any], reason: str) -> None:
    told = ask("json", '{"name": "lo', path, {**body, "tool_choice": "auto"} if path != "/v1/messages" else
               {**body, "tool_choice": {"type": "auto"}})  # fmt: skip
    assert '{"name": "lo' in told.replace('\\"', '"')
    assert reason in told
