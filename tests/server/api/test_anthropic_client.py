"""/v1/messages as Anthropic's own client sees it: a real process, the bundled model, the offline API as oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.support.servers.server_process import ServerProcess

QUESTION: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
LONG: list[Any] = [{"role": "user", "content": "Count from 1 to 60."}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def fields_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Greedy; and what the client has no parameter for."""
    extra = {"temperature": 0, **fields.pop("extra_body", {})}
    return {"model": "demo", "messages": QUESTION, "max_tokens": 64, **fields, "extra_body": extra}


def ask(claude: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    return claude.messages.create(**fields_of(fields))


def streamed(claude: anthropic.Anthropic, **fields: Any) -> tuple[list[Any], anthropic.types.Message]:
    """The events as they came, and what the client makes of them."""
    raw = list(claude.messages.create(stream=True, **fields_of(dict(fields))))
    with claude.messages.stream(**fields_of(dict(fields))) as stream:
        return raw, stream.get_final_message()


def check_order(events: list[Any]) -> None:
    """message_start (block_start block_delta* block_stop)* message_delta message_stop, blocks numbered from 0."""
    types = [event.type for event in events]
    assert types[0] == "message_start"
    assert types[-2:] == ["message_delta", "message_stop"]
    num_blocks, is_open = 0, False
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert not is_open
            assert event.index == num_blocks
            is_open = True
        elif event.type == "content_block_delta":
            assert is_open
            assert event.index == num_blocks
        else:
            assert event.type == "content_block_stop"
            assert is_open
            assert event.index == num_blocks
            num_blocks, is_open = num_blocks + 1, False
    assert not is_open


def without_ids(message: Any) -> Any:
    made = message.to_dict() if not isinstance(message, dict) else message
    return [
        {k: v for k, v in block.items() if v is not None and k not in ("id", "parsed_output")}
        for block in made["content"]
    ]


def num_input(usage: Any) -> int:
    assert usage.cache_creation_input_tokens == 0
    return usage.input_tokens + usage.cache_read_input_tokens


def test_greedy_answer_is_the_offline_one(claude: anthropic.Anthropic, llm: LLM) -> None:
    for system, messages in (("", QUESTION), ("", LONG), ("Be brief.", QUESTION)):
        turns = ([{"role": "system", "content": system}] if system else []) + messages
        (expected,) = llm.chat(turns, SamplingParams(temperature=0, max_tokens=64))
        answer = ask(claude, messages=messages, **({"system": system} if system else {}))
        assert [block.type for block in answer.content] == ["text"]
        assert answer.content[0].text == expected.text
        assert answer.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason.value]
        assert num_input(answer.usage) == len(expected.prompt_token_ids)
        assert answer.usage.output_tokens == len(expected.token_ids)
        assert (answer.role, answer.type, answer.model) == ("assistant", "message", "demo")
        assert answer.id.startswith("msg_")
        assert answer._request_id is not None
        assert answer._request_id.startswith("req_")


def test_a_stream_adds_up_to_the_answer(claude: anthropic.Anthropic) -> None:
    whole = ask(claude, messages=LONG)
    events, final = streamed(claude, messages=LONG)
    check_order(events)
    assert sum(event.type == "content_block_delta" for event in events) > 10
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert num_input(events[0].message.usage) == num_input(whole.usage) == num_input(final.usage)
    assert events[0].message.content == []


def test_the_cached_part_of_a_prompt_is_said(claude: anthropic.Anthropic) -> None:
    system = "A prompt that no other test uses, in this dialect at least. " * 4
    first = ask(claude, system=system)
    again = ask(claude, system=system)
    assert first.usage.cache_read_input_tokens < again.usage.cache_read_input_tokens < num_input(again.usage)
    assert num_input(first.usage) == num_input(again.usage)


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_thinking_is_a_block_of_its_own(claude: anthropic.Anthropic, llm: LLM, kind: str) -> None:
    thinking = {"type": kind, "budget_tokens": 1024} if kind == "enabled" else {"type": kind}
    whole = ask(claude, thinking=thinking)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    reasoning, text = whole.content[0].thinking, whole.content[1].text
    (expected,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=64), enable_thinking=True)
    assert expected.text.endswith(text)
    assert reasoning.strip() in expected.text.removesuffix(text)
    assert reasoning.strip()
    assert whole.content[0].signature
    events, final = streamed(claude, thinking=thinking)
    check_order(events)
    assert without_ids(final) == without_ids(whole)
    deltas = [event.delta.type for event in events if event.type == "content_block_delta" and event.index == 0]
    assert set(deltas[:-1]) == {"thinking_delta"}
    assert deltas[-1] == "signature_delta"
    hidden = ask(claude, thinking={**thinking, "display": "omitted"})
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert hidden.content[0].thinking == ""
    assert hidden.content[1].text == text
    # What came back can be sent back.
    history = [*QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "And 3 + 4?"}]
    assert ask(claude, messages=history, thinking={"type": "disabled"}).content[0].type == "text"


def test_a_loop_of_tools(claude: anthropic.Anthropic) -> None:
    messages = list(PARIS)
    whole = ask(claude, messages=messages, tools=[WEATHER])
    assert whole.stop_reason == "tool_use"
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    events, final = streamed(claude, messages=messages, tools=[WEATHER])
    check_order(events)
    assert without_ids(final) == without_ids(whole)
    assert final.stop_reason == "tool_use"
    messages += [
        {"role": "assistant", "content": whole.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "18 degrees"}]},
                {"type": "text", "text": "Say it in words."},
            ],
        },
    ]
    answer = ask(claude, messages=messages, tools=[WEATHER])
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    single = ask(
        claude, messages=PARIS, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert without_ids(single) == without_ids(whole)
    unasked = ask(claude, messages=PARIS, tools=[WEATHER], tool_choice={"type": "none"})
    assert {block.type for block in unasked.content} == {"text"}


def test_the_prompt_is_that_of_the_other_dialect(claude: anthropic.Anthropic, server: ServerProcess) -> None:
    """The same conversation, written twice, has the same prompt, and count_tokens and usage agree about its length."""
    here: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "tools": [WEATHER],
        "messages": [
            *PARIS,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I should look.", "signature": "x"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True},
                    {"type": "text", "text": "Try again."},
                ],
            },
            {"role": "user", "content": "Please."},
        ],
    }
    function = {"name": WEATHER["name"], "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    call = {"id": "toolu_1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    there = {
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "system", "content": "Be brief.\nBe kind."},
            *PARIS,
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "I should look.",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "Error: no such city", "tool_call_id": "toolu_1"},
            {"role": "user", "content": "Try again.\nPlease."},
        ],
    }
    wanted = httpx.post(f"{server.url}/tokenize", json=there).json()["count"]
    assert claude.messages.count_tokens(model="claude-opus-4-5", **here).input_tokens == wanted
    assert num_input(ask(claude, **here, max_tokens=1).usage) == wanted


def test_the_last_message_may_begin_the_answer(claude: anthropic.Anthropic) -> None:
    whole = ask(claude).content[0].text
    begun = [*QUESTION, {"role": "assistant", "content": whole[:7]}]
    assert ask(claude, messages=begun).content[0].text == whole[7:]


@pytest.mark.exhaustive
def test_why_an_answer_ended(claude: anthropic.Anthropic) -> None:
    cut = ask(claude, messages=LONG, max_tokens=4)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 4)
    for stopped in (
        ask(claude, messages=LONG, max_tokens=200, stop_sequences=["12", "99"]),
        streamed(claude, messages=LONG, max_tokens=200, stop_sequences=["12", "99"])[1],
    ):
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "12")
        assert stopped.content[0].text.endswith("11, ")
    full = ask(claude, messages=LONG, max_tokens=100_000, extra_body={"ignore_eos": True})
    assert full.stop_reason == "model_context_window_exceeded"
    warmed = ask(claude, messages=LONG, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": -1}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": []}]}, "nothing to answer"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role: "),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
                ]
            },
            "send its result",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            r"messages\[0\].content\[0\].source: it is neither a URL nor base64",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}]},
            "only documents of plain text",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}, "tool_use"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool that Anthropic runs"),
        ({"tools": [{"name": "x"}]}, r"tools\[0\].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "there is no tool"),
        ({"extra_body": {"n": 2}}, "use several requests"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"stop": ["a"], "stop_sequences": ["b"]}}, "send one of them"),
        (
            {"messages": [{"role": "user", "content": "a b c " * 3000}]},
            r"prompt is too long: \d+ tokens > 2048 maximum",
        ),
    ],
)
def test_what_is_wrong_is_a_400_in_its_shape(claude: anthropic.Anthropic, fields: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        ask(claude, **fields)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id is not None
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["request_id"] == caught.value.request_id


def test_models(claude: anthropic.Anthropic, server: ServerProcess) -> None:
    models = list(claude.models.list())
    assert [model.id for model in models] == [
        model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]
    ]
    assert claude.models.retrieve("demo").max_input_tokens == 2048
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("claude-opus-4-5")
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.batches.list()
    assert caught.value.type == "not_found_error"
