"""pydantic-ai: agents with tools and output types, over chat, responses, Anthropic's and Ollama's API."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from cases import EXTRACT, FORECAST, QUESTION, WEATHER, report
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY: Any = {"temperature": 0.0, "max_tokens": 200}


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str
    age: int
    city: str


def get_weather(city: str) -> dict[str, Any]:
    """Get the current weather of a city."""
    assert city
    return FORECAST


async def text(model: Any) -> Any:
    return (await Agent(model, model_settings=GREEDY).run(QUESTION)).output


async def stream(model: Any) -> Any:
    async with Agent(model, model_settings=GREEDY).run_stream(QUESTION) as answer:
        return "".join([piece async for piece in answer.stream_text(delta=True, debounce_by=None)])


async def loop(model: Any) -> Any:
    run = await Agent(model, tools=[get_weather], model_settings=GREEDY).run(WEATHER)
    responses = [message for message in run.all_messages() if isinstance(message, ModelResponse)]
    calls = [part for response in responses for part in response.parts if isinstance(part, ToolCallPart)]
    return [*([call.tool_name, call.args_as_dict()] for call in calls), run.output]


async def streamed_loop(model: Any) -> Any:
    async with Agent(model, tools=[get_weather], model_settings=GREEDY).run_stream(WEATHER) as answer:
        return await answer.get_output()


async def output(model: Any, kind: Any) -> Any:
    return (await Agent(model, output_type=kind(Person), model_settings=GREEDY).run(EXTRACT)).output.model_dump()


if __name__ == "__main__":
    url = sys.argv[1]
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    models = {
        "chat": OpenAIChatModel("demo", provider=provider),
        "responses": OpenAIResponsesModel("demo", provider=provider),
        # Its name tells pydantic-ai that the model can follow schemas; any name is answered.
        "anthropic": AnthropicModel("claude-sonnet-4-5", provider=AnthropicProvider(base_url=url, api_key="none")),
    }
    cases: dict[str, Callable[[], Any]] = {}
    for name, model in models.items():
        cases |= {f"{name} {case.__name__}": partial(case, model) for case in (text, stream, loop, streamed_loop)}
        for kind in (ToolOutput, NativeOutput, PromptedOutput):
            cases[f"{name} {kind.__name__}"] = partial(output, model, kind)
    report(cases)
