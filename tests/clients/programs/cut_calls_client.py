"""A tool loop at 17 tokens an answer, in all dialects: the call is cut, and the conversation goes on with it.

Each case gives how the first answer says that it was cut, the tools that it called, and whether there is an answer to a
question after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
from anthropic import Anthropic
from cases import QUESTION, WEATHER, report
from openai import OpenAI

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the current weather of a city.", "parameters": SCHEMA}
TOKENS = 17
FAILED = "The arguments are not complete."

Turn = dict[str, Any]


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def chat(client: OpenAI, is_streamed: bool) -> list[Any]:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": TOKENS, "temperature": 0}
    fields["tools"] = [{"type": "function", "function": FUNCTION}]
    history: list[Any] = [user(WEATHER)]
    if is_streamed:
        with client.chat.completions.stream(messages=history, **fields) as stream:
            stream.until_done()
            choice = stream.current_completion_snapshot.choices[0]
    else:
        choice = client.chat.completions.create(messages=history, **fields).choices[0]
    history.append(choice.message.model_dump(exclude_none=True))
    calls = choice.message.tool_calls or []
    history += [{"role": "tool", "tool_call_id": call.id, "content": FAILED} for call in calls]
    after = client.chat.completions.create(messages=[*history, user(QUESTION)], **fields).choices[0]
    named = [call.function.name for call in calls]
    return [choice.finish_reason, *named, isinstance(after.message.content, str) or bool(after.message.tool_calls)]


def responses(client: OpenAI, is_streamed: bool) -> list[Any]:
    fields: dict[str, Any] = {"model": "demo", "max_output_tokens": TOKENS, "temperature": 0, "store": False}
    fields["tools"] = [{"type": "function", **FUNCTION}]
    history: list[Any] = [user(WEATHER)]
    if is_streamed:
        with client.responses.stream(input=history, **fields) as stream:
            events = list(stream)
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert all(item.status == "incomplete" for item in items if item.type == "function_call")
        (first,) = (event.response for event in events if event.type == "response.incomplete")
    else:
        first = client.responses.create(input=history, **fields)
    for item in first.output:
        history.append(item.model_dump(exclude_none=True))
        if item.type == "function_call":
            assert item.status == "incomplete"
            history.append({"type": "function_call_output", "call_id": item.call_id, "output": FAILED})
    after = client.responses.create(input=[*history, user(QUESTION)], **fields)
    named = [item.name for item in first.output if item.type == "function_call"]
    return [first.status, first.incomplete_details.reason, *named, bool(after.output)]


def messages(client: Anthropic, is_streamed: bool) -> list[Any]:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": TOKENS}
    fields["tools"] = [{"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}]
    history: list[Any] = [user(WEATHER)]
    if is_streamed:
        with client.messages.stream(messages=history, **fields) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(messages=history, **fields)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": FAILED, "is_error": True}
        for block in first.content
        if block.type == "tool_use"
    ]
    history.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]})
    history.append({"role": "user", "content": [*results, {"type": "text", "text": QUESTION}]})
    named = [block.name for block in first.content if block.type == "tool_use"]
    return [first.stop_reason, *named, bool(client.messages.create(messages=history, **fields).content)]


def ollama(client: httpx.Client) -> list[Any]:
    fields: dict[str, Any] = {"model": "demo", "stream": False, "options": {"num_predict": TOKENS, "temperature": 0}}
    fields["tools"] = [{"type": "function", "function": FUNCTION}]
    history: list[Any] = [user(WEATHER)]
    first = client.post("/api/chat", json={**fields, "messages": history}).raise_for_status().json()
    history.append(first["message"])
    history += [{"role": "tool", "tool_name": "get_weather", "content": FAILED}] * len(
        first["message"].get("tool_calls", [])
    )
    assert '"city' not in first["message"]["content"]
    after = client.post("/api/chat", json={**fields, "messages": [*history, user(QUESTION)]}).raise_for_status().json()
    named = [call["function"]["name"] for call in first["message"].get("tool_calls", [])]
    return [first["done_reason"], *named, after["done"]]


if __name__ == "__main__":
    url = sys.argv[1]
    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    anthropic = Anthropic(base_url=url, api_key="none", max_retries=0)
    cases: dict[str, Callable[[], Any]] = {"ollama": partial(ollama, httpx.Client(base_url=url, timeout=60))}
    for how, is_streamed in (("", False), ("streamed ", True)):
        cases[f"{how}chat"] = partial(chat, openai, is_streamed)
        cases[f"{how}responses"] = partial(responses, openai, is_streamed)
        cases[f"{how}messages"] = partial(messages, anthropic, is_streamed)
    report(cases)
