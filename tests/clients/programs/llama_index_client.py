"""llama-index: OpenAILike, complete and chat, streaming and not, tools, structured predictions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from cases import EXTRACT, FORECAST, QUESTION, WEATHER, report
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str
    age: int
    city: str


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    assert city
    return json.dumps(FORECAST)


def model(url: str, **fields: Any) -> OpenAILike:
    fields = {"is_chat_model": True, "is_function_calling_model": True, **fields}
    return OpenAILike("demo", api_base=f"{url}/v1", api_key="none", temperature=0, context_window=4096, **fields)


def loop(llm: OpenAILike) -> Any:
    tool = FunctionTool.from_defaults(get_weather, description="Get the current weather of a city.")
    asked = ChatMessage(role="user", content=WEATHER)
    first = llm.chat_with_tools([tool], chat_history=[asked])
    calls = llm.get_tool_calls_from_response(first)
    results = [
        ChatMessage(
            role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
        )
        for call in calls
    ]
    last = llm.chat_with_tools([tool], chat_history=[asked, first.message, *results])
    return [*([call.tool_name, call.tool_kwargs] for call in calls), last.message.content]


def streamed_call(llm: OpenAILike) -> Any:
    tool = FunctionTool.from_defaults(get_weather, description="Get the current weather of a city.")
    *_, last = llm.stream_chat_with_tools([tool], user_msg=WEATHER)
    return [[call.tool_name, call.tool_kwargs] for call in llm.get_tool_calls_from_response(last)]


def last_of(stream: Any) -> Any:
    pieces = list(stream)
    assert len(pieces) > 1
    return pieces[-1]


async def async_chat(llm: OpenAILike) -> Any:
    return (await llm.achat([ChatMessage(role="user", content=QUESTION)])).message.content


def main(url: str) -> dict[str, Callable[[], Any]]:
    llm = model(url)
    by_schema = model(url, should_use_structured_outputs=True)
    text = model(url, is_chat_model=False, is_function_calling_model=False, max_tokens=12)
    asked = [ChatMessage(role="user", content=QUESTION)]
    extract = PromptTemplate(EXTRACT)
    return {
        "chat": lambda: llm.chat(asked).message.content,
        "streamed chat": lambda: last_of(llm.stream_chat(asked)).message.content,
        "async chat": lambda: async_chat(llm),
        "complete": lambda: text.complete("1, 2, 3,").text,
        "streamed complete": lambda: last_of(text.stream_complete("1, 2, 3,")).text,
        "loop": lambda: loop(llm),
        "streamed call": lambda: streamed_call(llm),
        "structured by tool": lambda: llm.structured_predict(Person, extract).model_dump(),
        "structured by schema": lambda: by_schema.structured_predict(Person, extract).model_dump(),
    }


if __name__ == "__main__":
    report(main(sys.argv[1]))
