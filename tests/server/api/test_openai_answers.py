"""What fields do to answers: the real client, the bundled model, the engine of one sequence beside it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.support.servers.server_process import ServerProcess

QUESTION: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ABOUT_PARIS: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def chat(client: openai.OpenAI, messages: list[Any] = QUESTION, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **{"temperature": 0} | fields)


def test_min_tokens_keeps_an_answer_from_ending(client: openai.OpenAI, llm: LLM) -> None:
    short = chat(client)
    long = chat(client, max_tokens=40, extra_body={"min_tokens": 30})
    assert short.usage.completion_tokens < 30 <= long.usage.completion_tokens
    assert long.choices[0].message.content.startswith("17 + 25 = 42.")
    (alone,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=40, min_tokens=30))
    assert long.choices[0].message.content == alone.text
    assert chat(client, stop="=", max_tokens=40, extra_body={"min_tokens": 8}).choices[0].message.content != "17 + 25 "


def test_the_stop_string_can_be_shown(client: openai.OpenAI) -> None:
    assert chat(client, stop="=").choices[0].message.content == "17 + 25 "
    shown = chat(client, stop="=", extra_body={"include_stop_str_in_output": True}).choices[0]
    assert (shown.message.content, shown.finish_reason) == ("17 + 25 =", "stop")


def test_special_tokens_can_be_shown(client: openai.OpenAI, llm: LLM) -> None:
    fields = {"logit_bias": {str(llm.tokenizer.token_id("<|im_start|>")): 100}, "max_tokens": 1}
    assert chat(client, **fields).choices[0].message.content == ""
    shown = chat(client, **fields, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].message.content == "<|im_start|>"


def test_top_p_zero_is_greedy(client: openai.OpenAI) -> None:
    answers = {chat(client, temperature=2.0, top_p=0).choices[0].message.content for _ in range(3)}
    assert answers == {"17 + 25 = 42."}


def test_max_tokens_zero_looks_at_the_prompt_only(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens > 0) == (0, True)


def test_an_answer_goes_on_where_the_last_message_ends(client: openai.OpenAI, llm: LLM) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "17 + 25 ="}]
    answer = chat(client, begun, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content.strip() == "42."
    prefixed = [*QUESTION, {"role": "assistant", "content": "17 + 25 =", "prefix": True}]
    assert chat(client, prefixed).choices[0].message.content == answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="role is assistant"):
        chat(client, extra_body={"continue_final_message": True})


def test_the_role_comes_with_the_first_token(server: ServerProcess) -> None:
    body = {"messages": QUESTION, "temperature": 0, "stream": True, "n": 2, "max_tokens": 2}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    # One sequence at a time here: the second answer has not begun while the first one is told.
    order = [(choice["index"], "role" in choice["delta"]) for chunk in chunks for choice in chunk["choices"]]
    assert [has_role for index, has_role in order if index == 1][:1] == [True]
    assert order[:2] == [(0, True), (0, False)]
    assert sum(has_role for _, has_role in order) == 2


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": WEATHER}]
    asked = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    many = chat(client, asked, tools=tools, max_tokens=80)
    one = chat(client, asked, tools=tools, max_tokens=80, parallel_tool_calls=False)
    calls = [
        [json.loads(call.function.arguments) for call in answer.choices[0].message.tool_calls] for answer in (many, one)
    ]
    assert calls == [[{"city": "Paris"}, {"city": "Rome"}], [{"city": "Paris"}]]
    assert [answer.choices[0].finish_reason for answer in (many, one)] == ["tool_calls"] * 2
    assert one.choices[0].message.content is None


def test_functions_are_tools_both_ways(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"functions": [WEATHER], "max_tokens": 80}
    choice = chat(client, ABOUT_PARIS, **asked).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    deltas = [chunk.choices[0] for chunk in chat(client, ABOUT_PARIS, **asked, stream=True)]
    told = [one.delta.function_call for one in deltas if one.delta.function_call]
    assert [one.name for one in told if one.name] == ["get_weather"]
    assert "".join(one.arguments or "" for one in told) == choice.message.function_call.arguments
    assert deltas[-1].finish_reason == "function_call"
    back = [*ABOUT_PARIS, choice.message, {"role": "function", "name": "get_weather", "content": '{"temperature": 18}'}]
    assert "18" in chat(client, back, **asked).choices[0].message.content
    assert chat(client, ABOUT_PARIS, **asked, function_call="none").choices[0].message.function_call is None


def test_best_of_is_the_likeliest(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "The", "temperature": 1.5, "max_tokens": 6, "seed": 3, "logprobs": 0}
    every = client.completions.create(model="demo", n=6, **asked)
    best = client.completions.create(model="demo", n=2, best_of=6, **asked)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    wanted = sorted(every.choices, key=mean, reverse=True)[:2]
    assert [one.text for one in best.choices] == [one.text for one in wanted]
    assert [one.index for one in best.choices] == [0, 1]
    assert best.usage.completion_tokens == every.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="less than n"):
        client.completions.create(model="demo", n=3, best_of=2, **asked)
    with pytest.raises(openai.BadRequestError, match="streamed"):
        client.completions.create(model="demo", best_of=2, stream=True, **asked)


def test_answers_have_a_fingerprint(client: openai.OpenAI) -> None:
    prints = {chat(client, max_tokens=1).system_fingerprint for _ in range(2)}
    prints |= {chunk.system_fingerprint for chunk in chat(client, max_tokens=2, stream=True)}
    assert len(prints) == 1
    assert prints.pop().startswith("fp_")


def counted(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for sample in samples
        if sample.name.endswith("_total")
    }


def test_tokens_of_aborted_answers_are_counted(client: openai.OpenAI, server: ServerProcess) -> None:
    before = counted(server)
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        seen = sum(1 for _, line in zip(range(20), answer.iter_lines(), strict=False) if line)
    chat(client, max_tokens=1)  # waits until the engine is free, which is after the stream was given up
    after = counted(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:request_success_totalabort"] == 1
    assert grown["vllm:generation_tokens_total"] > seen - 2
    assert grown["vllm:prompt_tokens_total"] > 0


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[:3] == [1, 1, 2]  # the role, then the tokens
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 12
