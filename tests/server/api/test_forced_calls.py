"""Calls that a request demands: real clients of three dialects, the bundled model, which would rather say something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.support.servers.server_process import ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]
CITIES: list[Any] = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["one", 2, None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": k, "parameters": v}} for k, v in PARAMETERS.items()]
FLAT: list[Any] = [{"type": "function", "name": k, "parameters": v} for k, v in PARAMETERS.items()]
CLAUDES: list[Any] = [{"name": k, "input_schema": v} for k, v in PARAMETERS.items()]
ADD: Any = {"type": "function", "function": {"name": "add"}}
ONLY_ADD: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD]}}
IMPOSSIBLE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def chat(client: openai.OpenAI, messages: list[Any] = HELLO, **fields: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 200, "tools": TOOLS} | fields
    return client.chat.completions.create(model="demo", messages=messages, **asked)


def names(calls: list[tuple[str, str]]) -> list[str]:
    """Of calls by name and arguments, which fit the tool's schema."""
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])
    return [name for name, _ in calls]


def called(choice: Any) -> list[str]:
    assert not choice.message.content
    return names([(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []])


def test_a_required_call_is_made_where_none_would_be(client: openai.OpenAI) -> None:
    assert chat(client, tool_choice="auto").choices[0].message.tool_calls is None
    whole = chat(client, tool_choice="required", n=2).choices
    for choice in whole:
        assert (called(choice), choice.finish_reason) == (["get_weather"], "tool_calls")
    chunks = [chunk.choices[0] for chunk in chat(client, tool_choice="required", stream=True)]
    pieces = [call.function.arguments for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert "".join(pieces) == whole[0].message.tool_calls[0].function.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_some_of_the_tools(client: openai.OpenAI) -> None:
    (named,) = chat(client, CITIES, tool_choice=ADD).choices
    assert (called(named), named.finish_reason) == (["add"], "stop")
    assert [chunk.choices[0].finish_reason for chunk in chat(client, tool_choice=ADD, stream=True)][-1] == "stop"
    (allowed,) = chat(client, CITIES, tool_choice=ONLY_ADD, parallel_tool_calls=False).choices
    assert (called(allowed), allowed.finish_reason) == (["add"], "tool_calls")
    optional = ONLY_ADD | {"allowed_tools": {"mode": "auto", "tools": [ADD]}}
    shown, all_shown = (chat(client, max_tokens=1, tool_choice=one).usage for one in (optional, "auto"))
    assert shown.prompt_tokens < all_shown.prompt_tokens
    functions = [tool["function"] for tool in TOOLS]
    legacy = chat(client, tools=openai.omit, functions=functions, function_call={"name": "add"}).choices[0]
    assert names([(legacy.message.function_call.name, legacy.message.function_call.arguments)]) == ["add"]
    assert legacy.finish_reason == "stop"


def test_how_many_calls(client: openai.OpenAI) -> None:
    many = chat(client, CITIES, tool_choice="required")
    assert called(many.choices[0]) == ["get_weather"] * 2
    one = chat(client, CITIES, tool_choice="required", parallel_tool_calls=False)
    assert called(one.choices[0]) == ["get_weather"]
    assert one.choices[0].message.tool_calls[0].function == many.choices[0].message.tool_calls[0].function
    assert one.usage.completion_tokens < many.usage.completion_tokens


@pytest.mark.parametrize("seed", range(4))
def test_arguments_fit_whatever_is_drawn(client: openai.OpenAI, seed: int) -> None:
    fields: dict[str, Any] = {"temperature": 5, "seed": seed, "max_tokens": 400}
    unthinking = {"thinking_budget": 0}  # else some would think to their end
    drawn = chat(client, tool_choice="required", parallel_tool_calls=False, **fields, extra_body=unthinking)
    assert len(called(drawn.choices[0])) == 1


def test_beside_reasoning_and_a_response_format(client: openai.OpenAI) -> None:
    (choice,) = chat(
        client, tool_choice="required", extra_body={"enable_thinking": True, "thinking_budget": 20}
    ).choices
    assert choice.message.reasoning_content
    assert called(choice)
    # The content has to look like something, and there is none.
    (choice,) = chat(client, tool_choice=ADD, response_format={"type": "json_object"}).choices
    assert called(choice) == ["add"]


def test_responses(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> list[Any]:
        asked = {"input": "Hello!", "temperature": 0, "tools": FLAT, "max_output_tokens": 200} | fields
        return list(client.responses.create(model="demo", **asked).output)

    def outcome(**fields: Any) -> list[str]:
        items = ask(**fields)
        assert {item.type for item in items} == {"function_call"}
        return names([(item.name, item.arguments) for item in items])

    assert [item.type for item in ask()] == ["message"]
    assert outcome(tool_choice="required", parallel_tool_calls=False) == ["get_weather"]
    assert outcome(tool_choice={"type": "function", "name": "add"}) == ["add"]
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    assert outcome(tool_choice=only, parallel_tool_calls=False) == ["add"]
    custom = [*FLAT, {"type": "custom", "name": "note"}]
    (item,) = ask(tools=custom, tool_choice={"type": "custom", "name": "note"})
    assert (item.type, item.name) == ("custom_tool_call", "note")


def test_messages(claude: anthropic.Anthropic) -> None:
    def ask(messages: list[Any], **choice: Any) -> list[str]:
        asked: dict[str, Any] = {"messages": messages, "tools": CLAUDES, "tool_choice": choice}
        asked["extra_body"] = {"temperature": 0}
        answer = claude.messages.create(model="demo", max_tokens=200, **asked)
        assert answer.stop_reason == "tool_use"
        with claude.messages.stream(model="demo", max_tokens=200, **asked) as stream:
            blocks = stream.get_final_message().content
        made = [[(block.name, json.dumps(block.input)) for block in one] for one in (answer.content, blocks)]  # type: ignore[union-attr]
        assert made[0] == made[1]
        return names(made[0])

    assert ask(HELLO, type="any", disable_parallel_tool_use=True) == ["get_weather"]
    assert ask(CITIES, type="any") == ["get_weather"] * 2
    assert ask(CITIES, type="any", disable_parallel_tool_use=True) == ["get_weather"]
    assert ask(HELLO, type="tool", name="add", disable_parallel_tool_use=True) == ["add"]


def test_what_cannot_be_forced_is_a_400_that_says_which_tool(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": IMPOSSIBLE}}]
    flat = [*FLAT, {"type": "function", "name": "odd", "parameters": IMPOSSIBLE}]
    claudes = [*CLAUDES, {"name": "odd", "input_schema": IMPOSSIBLE}]
    said = r"calls of .*odd.* cannot be forced: #: \$ref: each value needs"
    with pytest.raises(openai.BadRequestError, match=said) as wrong:
        chat(client, tools=tools, tool_choice="required")
    assert wrong.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(model="demo", input="x", tools=flat, tool_choice="required")
    with pytest.raises(anthropic.BadRequestError, match=said):
        claude.messages.create(model="demo", max_tokens=9, messages=HELLO, tools=claudes, tool_choice={"type": "any"})
    assert called(chat(client, tools=tools, tool_choice=ADD).choices[0]) == ["add"]  # the others do not matter
    missing = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
    }
    with pytest.raises(openai.BadRequestError, match="there is no tool 'x'"):
        chat(client, tool_choice=missing)
    for wrong_choice in ("required", {"type": "function", "name": "x"}):
        with pytest.raises(openai.BadRequestError, match=r"there (are no tools|is no tool)"):
            client.responses.create(model="demo", input="x", tools=[], tool_choice=wrong_choice)  # type: ignore[call-overload]
    with pytest.raises(anthropic.BadRequestError, match="there are no tools"):
        claude.messages.create(model="demo", max_tokens=9, messages=HELLO, tool_choice={"type": "any"})
    odd = {"allowed_token_ids": [5]}
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        chat(client, tool_choice="required", extra_body=odd)


WIDE = {
    "type": "object",
    "properties": {
        "env": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    },
    "required": ["tags"],
    "additionalProperties": False,
}


def test_what_arguments_are_not_held_to_is_named(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    def tool(**more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "wide", "parameters": WIDE, **more}}

    named: Any = {"type": "function", "function": {"name": "wide"}}
    raw = client.chat.completions.with_raw_response
    asked: Any = {"model": "demo", "messages": HELLO, "max_tokens": 200, "temperature": 0}
    answer = raw.create(tools=[*TOOLS, tool()], tool_choice=named, **asked)
    assert answer.headers["x-ktransformers-ignored"] == "tools.wide#/properties/tags/uniqueItems"
    (call,) = answer.parse().choices[0].message.tool_calls or ()
    assert set(json.loads(call.function.arguments)) <= {"env", "tags"}
    # Offered beside others nobody asks what its schema says; forced, with strict, it is all of it or a 400.
    free = raw.create(tools=[*TOOLS, tool(strict=True)], tool_choice="auto", **asked)
    assert "x-ktransformers-ignored" not in free.headers
    other = raw.create(tools=[*TOOLS, tool(strict=True)], tool_choice=ADD, **asked)
    assert "x-ktransformers-ignored" not in other.headers
    said = r"calls of 'wide' cannot be forced: it is strict.*#/properties/tags/uniqueItems"
    for choice in (named, "required"):
        with pytest.raises(openai.BadRequestError, match=said) as wrong:
            client.chat.completions.create(tools=[*TOOLS, tool(strict=True)], tool_choice=choice, **asked)
        assert wrong.value.param == "tool_choice"
    flat: Any = [*FLAT, {"type": "function", "name": "wide", "parameters": WIDE, "strict": True}]
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(model="demo", input="x", tools=flat, tool_choice="required")
    strict: Any = [*CLAUDES, {"name": "wide", "input_schema": WIDE, "strict": True}]
    with pytest.raises(anthropic.BadRequestError, match=said):
        claude.messages.create(model="demo", max_tokens=9, messages=HELLO, tools=strict, tool_choice={"type": "any"})
    loose: Any = [*CLAUDES, {"name": "wide", "input_schema": WIDE}]
    made = claude.messages.with_raw_response.create(
        model="demo", max_tokens=200, messages=HELLO, tools=loose, tool_choice={"type": "any"}
    )
    assert made.headers["x-ktransformers-ignored"] == "tools.wide#/properties/tags/uniqueItems"
