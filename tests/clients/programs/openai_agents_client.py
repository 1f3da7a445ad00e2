"""openai-agents: an agent with a tool, and one with an output type, over chat completions and responses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from cases import EXTRACT, FORECAST, QUESTION, WEATHER, report
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, ConfigDict


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    age: int
    city: str


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    assert city
    return json.dumps(FORECAST)


def agent(model: Any, settings: dict[str, Any] | None = None, **fields: Any) -> Agent:
    return Agent("weather", model=model, model_settings=ModelSettings(temperature=0, **settings or {}), **fields)


async def text(model: Any) -> Any:
    return (await Runner.run(agent(model), QUESTION)).final_output


async def stream(model: Any) -> Any:
    """The pieces of the answer, as they come."""
    run = Runner.run_streamed(agent(model), QUESTION)
    data = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    pieces = [one.delta for one in data if isinstance(one, ResponseTextDeltaEvent)]
    assert len(pieces) > 1
    assert "".join(pieces) == run.final_output
    return run.final_output


def outcome(run: Any) -> Any:
    calls = [item.raw_item for item in run.new_items if isinstance(item, ToolCallItem)]
    return [*([call.name, json.loads(call.arguments)] for call in calls), run.final_output]


async def loop(model: Any) -> Any:
    return outcome(await Runner.run(agent(model, tools=[get_weather]), WEATHER))


async def streamed_loop(model: Any) -> Any:
    run = Runner.run_streamed(agent(model, tools=[get_weather]), WEATHER)
    async for _ in run.stream_events():
        pass
    return outcome(run)


async def required(model: Any) -> Any:
    """A call that the question does not ask for; the agent stops at it."""
    made = agent(model, {"tool_choice": "required"}, tools=[get_weather], tool_use_behavior="stop_on_first_tool")
    run = await Runner.run(made, QUESTION)
    return outcome(run)[0][0]


async def schema(model: Any) -> Any:
    return (await Runner.run(agent(model, output_type=Person), EXTRACT)).final_output.model_dump()


if __name__ == "__main__":
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    models = {"chat": OpenAIChatCompletionsModel("demo", client), "responses": OpenAIResponsesModel("demo", client)}
    cases: dict[str, Callable[[], Any]] = {
        f"{name} {case.__name__}": partial(case, model)
        for name, model in models.items()
        for case in (text, stream, loop, streamed_loop, required, schema)
    }
    report(cases)
