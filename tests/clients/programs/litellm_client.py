"""litellm: completion, streaming and not, its tool loop, schemas; by the names of four providers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import litellm
from cases import EXTRACT, FORECAST, QUESTION, WEATHER, report
from pydantic import BaseModel, ConfigDict

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    age: int
    city: str


Ask = Callable[..., Any]


def asking(model: str, base: str, is_streamed: bool) -> Ask:
    """completion() with what all cases have in common; the message of its answer."""

    def ask(messages: list[Any], **fields: Any) -> Any:
        fields |= {"model": model, "api_base": base, "api_key": "none", "temperature": 0, "max_tokens": 200}
        if not is_streamed:
            return litellm.completion(messages=messages, **fields)
        chunks = list(litellm.completion(messages=messages, stream=True, **fields))
        assert len(chunks) > 1
        return litellm.stream_chunk_builder(chunks, messages=messages)

    return ask


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def text(ask: Ask) -> Any:
    return ask(user(QUESTION)).choices[0].message.content


def loop(ask: Ask) -> Any:
    """As litellm's documentation has it."""
    messages = user(WEATHER)
    first = ask(messages, tools=[TOOL], tool_choice="auto").choices[0]
    messages.append(first.message.model_dump())
    for call in first.message.tool_calls:
        made = {"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": json.dumps(FORECAST)}
        messages.append(made)
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in first.message.tool_calls]
    return [first.finish_reason, *calls, ask(messages, tools=[TOOL]).choices[0].message.content]


def named(ask: Ask) -> Any:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    return ask(user(QUESTION), tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls[0].function.name


def schema(ask: Ask) -> Any:
    return json.loads(ask(user(EXTRACT), response_format=Person).choices[0].message.content)


def json_object(ask: Ask) -> Any:
    return json.loads(ask(user(EXTRACT), response_format={"type": "json_object"}).choices[0].message.content)


def completions(url: str) -> Any:
    """The older route."""
    fields = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}
    return litellm.text_completion(model="text-completion-openai/demo", prompt="1, 2, 3,", **fields).choices[0].text


def too_long(ask: Ask) -> Any:
    """Whoever stands on litellm shortens its conversation at this error, and at no other."""
    try:
        ask(user("word " * 20000))
    except litellm.ContextWindowExceededError:
        return "ContextWindowExceededError"
    return None


def responses(url: str) -> Any:
    fields = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    return litellm.responses(model="openai/demo", input=QUESTION, **fields).output[0].content[0].text


if __name__ == "__main__":
    litellm.telemetry = False
    url = sys.argv[1]
    providers = {
        "openai": ("openai/demo", f"{url}/v1"),
        "hosted_vllm": ("hosted_vllm/demo", f"{url}/v1"),
        "anthropic": ("anthropic/demo", url),
        "ollama_chat": ("ollama_chat/demo", url),
    }
    cases: dict[str, Callable[[], Any]] = {
        "completions": partial(completions, url),
        "responses": partial(responses, url),
    }
    for name, (model, base) in providers.items():
        for how, is_streamed in (("", False), ("streamed ", True)):
            ask = asking(model, base, is_streamed)
            cases |= {f"{name} {how}{one.__name__}": partial(one, ask) for one in (text, loop, schema)}
            if name != "ollama_chat":  # of its errors litellm tells none apart
                cases[f"{name} {how}too_long"] = partial(too_long, ask)
    openai = asking(*providers["openai"], False)
    cases |= {"openai json_object": partial(json_object, openai), "openai named": partial(named, openai)}
    report(cases)
