"""Many answers at once, through every dialect, streamed and not: each is what the same request gets alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.support.servers.server_process import ServerProcess

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def balanced() -> Iterator[ServerProcess]:
    """Few pages for what is asked: requests wait, and throw each other out."""
    with ServerProcess(
        "--model_name", "demo", "--cache_lens", "1536", "--max_batch_size", "32", "--no-spare_engine"
    ) as process:
        yield process


@dataclass(frozen=True)
class Dialect:
    """One route. body: of a request for so many tokens. whole: the text of an answer; piece: of one event."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    whole: Callable[[dict[str, Any]], str]
    piece: Callable[[dict[str, Any]], str]
    is_chat: bool = True

    async def ask(self, client: httpx.AsyncClient, prompt: str, max_tokens: int, is_streamed: bool) -> str:
        body = {"model": "demo", "stream": is_streamed, **self.body(prompt, max_tokens)}
        if not is_streamed:
            response = await client.post(self.path, json=body)
            assert response.status_code == 200, response.text
            return self.whole(response.json())
        pieces = []
        async with client.stream("POST", self.path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data.startswith("{"):
                    pieces.append(self.piece(json.loads(data)))
        return "".join(pieces)


def turn(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def of_message(message: dict[str, Any]) -> str:
    """Text and calls of OpenAI's and of Ollama's messages and deltas."""
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return (message.get("content") or "") + "".join(c if isinstance(c, str) else json.dumps(c) for c in calls)


def of_choices(data: dict[str, Any]) -> str:
    return "".join(of_message(choice.get("message") or choice.get("delta") or {}) for choice in data["choices"])


def of_blocks(data: dict[str, Any]) -> str:
    return "".join(block["text"] if "text" in block else json.dumps(block["input"]) for block in data["content"])


def of_block_delta(event: dict[str, Any]) -> str:
    delta = event.get("delta", {})
    return str(delta.get("text") or delta.get("partial_json") or "")


def of_items(data: dict[str, Any]) -> str:
    return "".join(part["text"] for item in data["output"] for part in item["content"])


def of_item_delta(event: dict[str, Any]) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Get the weather.", "parameters": WEATHER}}


DIALECTS = (
    Dialect(
        "/v1/chat/completions",
        lambda prompt, most: {"messages": turn(prompt), "max_tokens": most, "temperature": 0},
        of_choices,
        of_choices,
    ),
    Dialect(
        "/v1/chat/completions",
        lambda prompt, most: (
            {"messages": turn(prompt), "max_tokens": most, "temperature": 0}
            | {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}}
        ),
        of_choices,
        of_choices,
        is_chat=False,
    ),
    Dialect(
        "/v1/completions",
        lambda prompt, most: {"prompt": f"{prompt} 1, 2, 3,", "max_tokens": most, "temperature": 0},
        lambda data: str(data["choices"][0]["text"]),
        lambda event: "".join(choice["text"] for choice in event["choices"]),
        is_chat=False,
    ),
    Dialect(
        "/v1/responses",
        lambda prompt, most: {"input": prompt, "max_output_tokens": most, "temperature": 0},
        of_items,
        of_item_delta,
    ),
    Dialect(
        "/v1/messages",
        lambda prompt, most: {"messages": turn(prompt), "max_tokens": most, "temperature": 0},
        of_blocks,
        of_block_delta,
    ),
    Dialect(
        "/v1/messages",
        lambda prompt, most: (
            {"messages": turn(f"{prompt} What is the weather in Paris?"), "max_tokens": most}
            | {"temperature": 0, "tools": [{"name": "get_weather", "input_schema": WEATHER}]}
        ),
        of_blocks,
        of_block_delta,
        is_chat=False,
    ),
    Dialect(
        "/api/chat",
        lambda prompt, most: {"messages": turn(prompt), "options": {"num_predict": most, "temperature": 0}},
        lambda data: of_message(data["message"]),
        lambda event: of_message(event["message"]),
    ),
    Dialect(
        "/api/generate",
        lambda prompt, most: {"prompt": prompt, "options": {"num_predict": most, "temperature": 0}},
        lambda data: str(data["response"]),
        lambda event: str(event["response"]),
    ),
)


def prompt_of(number: int) -> str:
    """Long and short ones; some begin alike."""
    rng = random.Random(number)
    kinds = (
        f"What is {rng.randint(10, 99)} + {rng.randint(10, 99)}?",
        f"Count from {rng.randint(1, 9)} to {rng.randint(20, 60)}.",
        "Extract name and age as JSON: " + f"Anna is {number} years old. " * rng.randint(1, 12),
    )
    return kinds[number % 3]


@pytest.mark.parametrize("count", [24, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_each_answer_is_the_one_it_gets_alone(balanced: ServerProcess, llm: LLM, count: int) -> None:
    # Every dialect both ways; every one with each kind of prompt (3 is coprime to 16).
    asked = [
        (DIALECTS[number % 8], prompt_of(number + count), 20 + number % 30, number % 16 < 8) for number in range(count)
    ]

    async def main() -> tuple[list[str], list[str]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=balanced.url, timeout=300, limits=limits) as client:
            together = await asyncio.gather(*(one.ask(client, *rest) for one, *rest in asked))
            return together, [await one.ask(client, *rest) for one, *rest in asked]

    together, alone = asyncio.run(main())
    assert together == alone
    assert all(alone)
    assert len(set(alone)) > count // 2
    for (dialect, prompt, max_tokens, _), answer in zip(asked, alone, strict=True):
        if dialect.is_chat:
            assert answer == llm.chat(turn(prompt), SamplingParams(temperature=0, max_tokens=max_tokens))[0].text
