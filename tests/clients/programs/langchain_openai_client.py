"""langchain-openai: chat and responses, streams, bound tools, structured output by each of its methods."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from cases import EXTRACT, FORECAST, QUESTION, WEATHER, report
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str
    age: int
    city: str


@tool
def get_weather(city: str) -> dict[str, Any]:
    """Get the current weather of a city."""
    assert city
    return FORECAST


def whole(model: Any, prompt: Any) -> Any:
    return model.invoke(prompt)


def streamed(model: Any, prompt: Any) -> AIMessageChunk:
    """The chunks as langchain adds them up."""
    chunks = list(model.stream(prompt))
    assert len(chunks) > 1
    return sum(chunks[1:], chunks[0])


def text(model: Any, ask: Callable[[Any, Any], Any]) -> list[Any]:
    answer = ask(model, QUESTION)
    return [answer.text, answer.usage_metadata["output_tokens"]]


def loop(model: Any, ask: Callable[[Any, Any], Any]) -> list[Any]:
    """Question, call, result, answer."""
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER)]
    messages.append(ask(bound, messages))
    calls = messages[-1].tool_calls
    messages += [ToolMessage(json.dumps(get_weather.invoke(call["args"])), tool_call_id=call["id"]) for call in calls]
    return [*([call["name"], call["args"]] for call in calls), ask(bound, messages).text]


def structured(model: Any, method: str) -> Any:
    return model.with_structured_output(Person, method=method).invoke(EXTRACT).model_dump()


def named(model: Any) -> Any:
    """A tool that the question does not ask for."""
    return model.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION).tool_calls[0]["name"]


if __name__ == "__main__":
    chat = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="demo", temperature=0, max_retries=0)
    cases: dict[str, Callable[[], Any]] = {}
    for name, model in {"chat": chat, "responses": chat.model_copy(update={"use_responses_api": True})}.items():
        cases[f"{name} text"] = partial(text, model, whole)
        cases[f"{name} stream"] = partial(text, model, streamed)
        cases[f"{name} loop"] = partial(loop, model, whole)
        cases[f"{name} streamed loop"] = partial(loop, model, streamed)
        cases[f"{name} named"] = partial(named, model)
        for method in ("json_schema", "json_mode", "function_calling"):
            cases[f"{name} {method}"] = partial(structured, model, method)
    report(cases)
