"""Answers that end in the middle of a call, in all dialects; and loops of tools that go on after them; real clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from ktransformers.core import FinishReason, GenerationStats, TokenEvent
from ktransformers.server.answers.choices import ChatChoice
from ktransformers.server.answers.events import AnswerFinished, AnswerReason, ToolCallEnded
from ktransformers.server.app import create_app
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import IGNORED_HEADER
from tests.support.servers.scripted_backend import TOKENIZER, Script, ScriptedBackend

END = TOKENIZER.eos_token_id
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "Weather in Oslo?"}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": CITY}}
FLAT = {"type": "function", "name": "look", "parameters": CITY}
CLAUDE = {"name": "look", "input_schema": CITY}
PATCH = {"type": "custom", "name": "patch"}
WHOLE = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>'


class Service:
    """The app over scripted answers."""

    def __init__(self, *scripts: Script):
        self.backend = ScriptedBackend(*scripts)
        self.app = create_app(self.backend, ServerConfig(model_names=("demo",)))

    async def send(self, path: str, body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    def ask(self, path: str, **body: Any) -> httpx.Response:
        response = asyncio.run(self.send(path, body))
        assert response.status_code == 200, response.text
        return response


def cut(text: str, reason: FinishReason = FinishReason.LENGTH) -> Script:
    return Script([text[at : at + 3] for at in range(0, len(text), 3)], reason)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith(("data: ", "{")))
    return [json.loads(line) for line in lines if line != "[DONE]"]


ARGUMENTS = ["{", '{"', '{"city', '{"city": ', '{"city": "O', '{"city": "Oslo"', '{"city": "Oslo", "d": [1, {"x": tr']


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_responses_say_that_a_call_is_incomplete(arguments: str) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}'
    made = Service(cut(text)).ask("/v1/responses", input="x", tools=[FLAT]).json()
    (item,) = made["output"]
    expected = arguments.removesuffix("tr")
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", expected)
    told = events(Service(cut(text)).ask("/v1/responses", input="x", tools=[FLAT], stream=True))
    done = next(event for event in told if event["type"] == "response.output_item.done")
    assert (done["item"]["status"], done["item"]["arguments"]) == ("incomplete", expected)
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{", ""),
        ('{"inp', ""),
        ('{"input": ', ""),
        ('{"input": "', ""),
        ('{"input": "*** Begin', "*** Begin"),
        ('{"input": "a\\nb\\"c', 'a\nb"c'),
        ('{"input": "a\\u00', "a"),
        ('{"input": "\\ud83d\\ude00 x', "😀 x"),
        ('{"input": "all"', "all"),
    ],
)
def test_a_custom_tools_text_is_taken_out_of_what_there_is(arguments: str, shown: str) -> None:
    text = f'<tool_call>{{"name": "patch", "arguments": {arguments}'
    made = Service(cut(text)).ask("/v1/responses", input="x", tools=[PATCH]).json()
    (item,) = made["output"]
    assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", "incomplete", shown)
    told = events(Service(cut(text)).ask("/v1/responses", input="x", tools=[PATCH], stream=True))
    (done,) = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert (done["status"], done["input"]) == ("incomplete", shown)


def test_whole_calls_of_a_cut_answer_are_complete() -> None:
    made = Service(cut(WHOLE + '<tool_call>{"name": "look", "arguments": {"ci')).ask(
        "/v1/responses", input="x", tools=[FLAT]
    )
    items = made.json()["output"]
    assert [(item["status"], item["arguments"]) for item in items] == [
        ("completed", '{"city": "Oslo"}'),
        ("incomplete", '{"ci'),
    ]


def test_a_call_that_the_model_broke_off_itself_is_incomplete_too() -> None:
    broken = cut('<tool_call>{"name": "look", "arguments": {"city": "O', FinishReason.STOP)
    made = Service(broken).ask("/v1/responses", input="x", tools=[FLAT]).json()
    assert (made["status"], made["output"][0]["status"]) == ("completed", "incomplete")


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}, {"tool_choice": "auto"}])
def test_chat_says_length(arguments: str, more: dict[str, Any]) -> None:
    text, expected = f'<tool_call>{{"name": "look", "arguments": {arguments}', arguments.removesuffix("tr")
    body = {"messages": [USER], "tools": [FUNCTION]} | more
    (choice,) = Service(cut(text)).ask("/v1/chat/completions", **body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["arguments"]) == ("length", expected)
    chunks = events(Service(cut(text)).ask("/v1/chat/completions", **body, stream=True))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    pieces = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == expected


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_ollama_leaves_a_cut_call_out(arguments: str) -> None:
    text = f'So: <tool_call>{{"name": "look", "arguments": {arguments}'
    body: dict[str, Any] = {"model": "demo", "messages": [USER], "tools": [FUNCTION]}
    made = Service(cut(text)).ask("/api/chat", **body, stream=False).json()
    assert made["message"] == {"role": "assistant", "content": "So: "}
    assert made["done_reason"] == "length"
    lines = events(Service(cut(text)).ask("/api/chat", **body))
    assert "".join(line["message"]["content"] for line in lines) == "So: "
    assert not any("tool_calls" in line["message"] for line in lines)
    assert lines[-1]["done_reason"] == "length"
    both = Service(cut(WHOLE + text)).ask("/api/chat", **body, stream=False).json()
    assert [call["function"]["arguments"] for call in both["message"]["tool_calls"]] == [{"city": "Oslo"}]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{", {}),
        ('{"city": "O', {}),
        ('{"city": "Oslo"', {"city": "Oslo"}),
        ('{"city": "Oslo", "d": [1, {"x": "y', {"city": "Oslo", "d": [1, {}]}),
    ],
)
def test_anthropics_official_client_reads_both_ways_the_same(arguments: str, shown: dict[str, Any]) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}'
    service = Service(cut(text), cut(text))

    async def main() -> list[anthropic.types.Message]:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(service.app))
        async with anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", http_client=http) as client:
            asked: dict[str, Any] = {"model": "demo", "max_tokens": -(-len(text) // 3), "tools": [CLAUDE]}
            whole = await client.messages.create(messages=[USER], **asked)  # type: ignore[list-item]
            async with client.messages.stream(messages=[USER], **asked) as stream:  # type: ignore[list-item]
                return [whole, await stream.get_final_message()]

    for message in asyncio.run(main()):
        assert message.stop_reason == "max_tokens"
        (block,) = message.content
        assert (block.type, block.input) == ("tool_use", shown)  # type: ignore[union-attr]


def test_a_stop_string_inside_of_a_call_does_not_make_it_one_to_run() -> None:
    """The model had more to say. Where it ended its turn itself the client is told of a call and sees what is wrong."""
    text = '<tool_call>{"name": "look", "arguments": {"city": "O'
    for stop, reason in ((";", AnswerReason.STOP), (END, AnswerReason.TOOL_CALLS)):
        choice = ChatChoice(TOKENIZER.answer_parser([], {"look": CITY}))
        choice.feed(TokenEvent(7, text, GenerationStats()))
        end = choice.feed(TokenEvent(7, "", GenerationStats(), finish_reason=FinishReason.STOP, stop=stop))
        assert end[-2:] == (ToolCallEnded(0, is_whole=False), AnswerFinished(reason, end[-1].stop, end[-1].stats))  # type: ignore[union-attr]


# A loop of tools whose first answers are cut, and what a client makes of the history then.

CUT_AT_17 = [
    cut('<tool_call>{"name": "look", "arguments": {"city": "O'),
    cut('<tool_call>{"name": "look", "argu'),
    Script([WHOLE]),
    Script(["It rains in Oslo."]),
]
LIMIT = 17


def look(arguments: str) -> str:
    try:
        return f"rain in {json.loads(arguments)['city']}"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}"


async def chat_loop(http: httpx.AsyncClient) -> tuple[str, int]:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=0)
    messages: list[Any] = [USER]
    for turn in range(1, 9):
        made = await client.chat.completions.create(model="demo", messages=messages, tools=[FUNCTION], max_tokens=LIMIT)  # type: ignore[list-item]
        answer = made.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if answer.tool_calls:
            for call in answer.tool_calls:
                assert call.type == "function"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": look(call.function.arguments)})
        elif made.choices[0].finish_reason == "length":
            messages.append({"role": "user", "content": "Go on."})
        else:
            return answer.content or "", turn
    raise AssertionError("no end")


async def responses_loop(http: httpx.AsyncClient) -> tuple[str, int]:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=0)
    items: list[Any] = [USER]
    for turn in range(1, 9):
        made = await client.responses.create(model="demo", input=items, tools=[FLAT], max_output_tokens=LIMIT)  # type: ignore[list-item]
        calls = [item for item in made.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in made.output]
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": look(call.arguments)})
        if not calls and made.status == "completed":
            return made.output_text, turn
        if not calls:
            items.append({"role": "user", "content": "Go on."})
    raise AssertionError("no end")


async def messages_loop(http: httpx2.AsyncClient) -> tuple[str, int]:
    client = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", http_client=http, max_retries=0)
    messages: list[Any] = [USER]
    for turn in range(1, 9):
        made = await client.messages.create(model="demo", messages=messages, tools=[CLAUDE], max_tokens=LIMIT)  # type: ignore[list-item]
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in made.content]}
        )
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": look(json.dumps(block.input))}
            for block in made.content
            if block.type == "tool_use"
        ]
        if made.stop_reason == "end_turn":
            (text,) = made.content
            assert text.type == "text"
            return text.text, turn
        messages.append({"role": "user", "content": results or "Go on."})
    raise AssertionError("no end")


async def ollama_loop(http: httpx.AsyncClient) -> tuple[str, int]:
    messages: list[Any] = [USER]
    for turn in range(1, 9):
        body = {
            "model": "demo",
            "messages": messages,
            "tools": [FUNCTION],
            "stream": False,
            "options": {"num_predict": LIMIT},
        }
        response = await http.post("http://localhost/api/chat", json=body)
        made = response.raise_for_status().json()
        messages.append(made["message"])
        for call in made["message"].get("tool_calls", ()):
            result = look(json.dumps(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_name": call["function"]["name"], "content": result})
        if made["done_reason"] == "length":
            messages.append({"role": "user", "content": "Go on."})
        elif not made["message"].get("tool_calls"):
            return made["message"]["content"], turn
    raise AssertionError("no end")


@pytest.mark.parametrize("loop", [chat_loop, responses_loop, messages_loop, ollama_loop])
def test_a_loop_of_tools_at_17_tokens_comes_to_its_end(loop: Callable[..., Any]) -> None:
    service = Service(*CUT_AT_17)

    async def main() -> tuple[str, int]:
        of = httpx2 if loop is messages_loop else httpx
        async with of.AsyncClient(transport=of.ASGITransport(service.app)) as http:
            return await loop(http)  # type: ignore[no-any-return]

    assert asyncio.run(main()) == ("It rains in Oslo.", 4)
    assert [request.params.max_tokens for request in service.backend.requests] == [LIMIT] * 4
    assert "rain in Oslo" in service.backend.prompts[-1]


def test_anthropics_tool_runner_goes_on_without_threads() -> None:
    """It asks with `thread` first, which a server may say that it has not."""
    service = Service(Script([WHOLE]), Script(["It rains."]))

    @anthropic.beta_async_tool
    async def look(city: str) -> str:
        """Looks.

        Args:
            city: Where.
        """
        return f"rain in {city}"

    async def main() -> Any:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(service.app))
        async with anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", http_client=http) as client:
            runner = client.beta.messages.tool_runner(model="demo", max_tokens=50, messages=[USER], tools=[look])  # type: ignore[list-item]
            return await runner.until_done()

    (text,) = asyncio.run(main()).content
    assert text.text == "It rains."
    assert "rain in Oslo" in service.backend.prompts[-1]


def test_what_is_told_of_threads() -> None:
    service = Service()
    body = {"model": "demo", "max_tokens": 5, "messages": [USER], "thread": {"id": "x"}}
    refused = asyncio.run(service.send("/v1/messages", body))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "messages" in error["message"]
    assert IGNORED_HEADER not in refused.headers
