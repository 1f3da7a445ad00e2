"""Anthropic's SDK: messages and streams, and its tool runner, sync and async, whole and streamed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool
from cases import EXTRACT, FORECAST, QUESTION, WEATHER, report
from pydantic import BaseModel, ConfigDict

RAN: list[dict[str, Any]] = []


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    age: int
    city: str


@beta_tool
def get_weather(city: str, labels: dict[str, str] | None = None) -> str:
    """Get the current weather of a city."""
    assert not labels
    RAN.append({"city": city})
    return json.dumps(FORECAST)


@beta_async_tool(name="get_weather")
async def get_weather_async(city: str) -> str:
    """Get the current weather of a city."""
    RAN.append({"city": city})
    return json.dumps(FORECAST)


def asking(text: str, max_tokens: int = 200) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}]}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def text(client: Anthropic) -> str:
    return text_of(client.messages.create(**asking(QUESTION)))


def stream(client: Anthropic) -> str:
    with client.messages.stream(**asking(QUESTION)) as events:
        pieces = list(events.text_stream)
    assert len(pieces) > 1
    return "".join(pieces)


def parsed(client: Anthropic) -> Any:
    return client.beta.messages.parse(**asking(EXTRACT), output_format=Person).parsed_output.model_dump()


def runner(client: Anthropic) -> list[Any]:
    RAN.clear()
    last = client.beta.messages.tool_runner(**asking(WEATHER), tools=[get_weather]).until_done()
    return [*RAN, text_of(last)]


def streamed_runner(client: Anthropic) -> list[Any]:
    RAN.clear()
    said = [
        text_of(events.get_final_message())
        for events in client.beta.messages.tool_runner(**asking(WEATHER), tools=[get_weather], stream=True)
    ]
    return [*RAN, said[-1]]


async def async_runner(client: AsyncAnthropic) -> list[Any]:
    RAN.clear()
    last = await client.beta.messages.tool_runner(**asking(WEATHER), tools=[get_weather_async]).until_done()
    return [*RAN, text_of(last)]


async def async_streamed_runner(client: AsyncAnthropic) -> list[Any]:
    RAN.clear()
    runner = client.beta.messages.tool_runner(**asking(WEATHER), tools=[get_weather_async], stream=True)
    said = [text_of(await events.get_final_message()) async for events in runner]
    return [*RAN, said[-1]]


def cut_runner(client: Anthropic) -> str | None:
    """The call is longer than 17 tokens: the runner must not start a tool of which half is known."""
    RAN.clear()
    messages = list(client.beta.messages.tool_runner(**asking(WEATHER, 17), tools=[get_weather], max_iterations=1))
    assert not any(given["city"] for given in RAN)
    return messages[0].stop_reason


if __name__ == "__main__":
    fields: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0}
    client, async_client = Anthropic(**fields), AsyncAnthropic(**fields)
    cases: dict[str, Callable[[], Any]] = {
        one.__name__.replace("_", " "): partial(one, client)
        for one in (text, stream, parsed, runner, streamed_runner, cut_runner)
    }
    cases |= {
        one.__name__.replace("_", " "): partial(one, async_client) for one in (async_runner, async_streamed_runner)
    }
    report(cases)
