"""The service as the official client sees it: a real process, the bundled model, the offline API as oracle."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.support.servers.server_process import ServerProcess

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
LONG = [{"role": "user", "content": "Count from 1 to 60."}]


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": QUESTION, **fields})


def test_greedy_chat_is_the_offline_answer(client: openai.OpenAI, llm: LLM) -> None:
    for messages in (QUESTION, LONG, [{"role": "system", "content": "Be brief."}, *QUESTION]):
        (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
        answer = chat(client, messages=messages, temperature=0, max_tokens=64)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason.value
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    whole = chat(client, messages=LONG, temperature=0, max_tokens=64)
    chunks = list(chat(client, messages=LONG, temperature=0, max_tokens=64, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_include_usage_has_openais_shape(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, max_tokens=5, stream_options={"include_usage": True}))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    chunks = list(chat(client, stream=True, max_tokens=5, stream_options={"include_usage": False}))
    assert all(chunk.usage is None for chunk in chunks)


def test_length_and_stop_are_told_apart(client: openai.OpenAI) -> None:
    cut = chat(client, messages=LONG, max_tokens=4, temperature=0).choices[0]
    assert cut.finish_reason == "length"
    stopped = chat(client, messages=LONG, max_tokens=200, temperature=0, stop=["12"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content.endswith("11, ")
    several = chat(client, messages=LONG, max_completion_tokens=200, temperature=0, stop=["12", "8"]).choices[0]
    assert several.message.content.endswith("7, ")


def test_a_seed_repeats_and_n_differs(client: openai.OpenAI, llm: LLM) -> None:
    fields = {"messages": LONG, "temperature": 6.0, "max_tokens": 24, "seed": 11, "top_p": 0.97}
    first = [choice.message.content for choice in chat(client, n=3, **fields).choices]
    again = [choice.message.content for choice in chat(client, n=3, **fields).choices]
    assert first == again
    assert len(set(first)) > 1
    for i in range(3):  # choice i draws with seed + i
        params = SamplingParams(temperature=6.0, max_tokens=24, seed=11 + i, top_p=0.97)
        assert llm.chat(LONG, params)[0].text == first[i]
    chunks = list(chat(client, n=3, stream=True, **fields))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == first
    assert sum(chunk.usage is not None for chunk in chunks) == 1
    assert chunks[-1].usage.completion_tokens == chat(client, n=3, **fields).usage.completion_tokens


def test_logprobs_are_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=8, logprobs=3))
    assert expected.logprobs is not None
    content = chat(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [entry.logprob for entry in expected.logprobs]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [
        [value for _, value in entry.top] for entry in expected.logprobs
    ]
    assert bytes(b for entry in content for b in entry.bytes).decode() == expected.text
    bare = chat(client, temperature=0, max_tokens=8, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in bare)
    streamed = [
        entry
        for chunk in chat(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_logit_bias_and_penalties_reach_the_sampler(client: openai.OpenAI, llm: LLM) -> None:
    (plain,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=4))
    banned = plain.token_ids[0]
    answer = chat(client, temperature=0, max_tokens=4, logit_bias={str(banned): -100})
    expected = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=4, logit_bias={banned: -100.0}))
    assert answer.choices[0].message.content == expected[0].text != plain.text
    penalties = {"frequency_penalty": 1.5, "presence_penalty": 2.0}
    answer = chat(client, messages=LONG, temperature=0, max_tokens=30, **penalties)
    expected = llm.chat(LONG, SamplingParams(temperature=0, max_tokens=30, **penalties))
    assert answer.choices[0].message.content == expected[0].text
    extra = {"allowed_token_ids": [banned], "ignore_eos": True}
    answer = chat(client, temperature=0, max_tokens=3, extra_body=extra)
    assert answer.choices[0].message.content == llm.tokenizer.decode([banned] * 3)


def test_a_constraint_that_ends_in_mid_answer_is_the_requests_fault(client: openai.OpenAI, llm: LLM) -> None:
    """Clients send again what was a 500."""
    begins = [*llm.tokenizer.encode("a", add_special_tokens=False), *llm.engine.model.eos_token_ids]
    extra = {"structured_outputs": {"regex": "ab"}, "allowed_token_ids": begins}
    with pytest.raises(openai.BadRequestError, match="no token may come next"):
        chat(client, max_tokens=8, extra_body=extra)


def test_the_prefix_of_a_conversation_is_reused(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "A prompt that no other test uses. " * 4}, *QUESTION]
    first = chat(client, messages=messages, temperature=0, max_tokens=30)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "What is 3 + 4?"},
    ]
    second = chat(client, messages=messages, temperature=0, max_tokens=30)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    salted = chat(client, messages=messages, temperature=0, max_tokens=30, extra_body={"cache_salt": "other"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].message.content == second.choices[0].message.content


def test_reasoning_comes_back_under_both_names_and_is_taken_back(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Think step by step: what is 12 + 30 + 7?"}]
    with ServerProcess("--backend_type", "ktransformers", "--force_think") as process:
        thinker = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
        message = (
            thinker.chat.completions.create(model="demo-Q4_K_M", messages=messages, max_tokens=120).choices[0].message
        )
        dumped = message.model_dump()
        assert dumped["reasoning_content"]
        assert dumped["reasoning"] == dumped["reasoning_content"]
        assert "<think>" not in (dumped["content"] or "") + dumped["reasoning"]
        stream = thinker.chat.completions.create(model="demo-Q4_K_M", messages=messages, max_tokens=120, stream=True)
        deltas = [chunk.choices[0].delta.model_dump() for chunk in stream]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == dumped["reasoning"]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == dumped["reasoning"]
        assert "".join(delta.get("content") or "" for delta in deltas) == dumped["content"]
    sent_back = [*messages, {"role": "assistant", **{k: dumped[k] for k in ("content", "reasoning")}}, *QUESTION]
    assert chat(client, messages=sent_back, max_tokens=4).choices[0].message.content


def test_tools_become_tool_calls(client: openai.OpenAI) -> None:
    tools: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the current weather for a city",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
    ]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = chat(client, messages=messages, tools=tools, temperature=0, max_tokens=80).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Paris"
    chunks = list(chat(client, messages=messages, tools=tools, temperature=0, max_tokens=80, stream=True))
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(c.index, c.function.name) for c in streamed] == [(0, "get_weather")] + [(0, None)] * (len(streamed) - 1)
    assert "".join(c.function.arguments for c in streamed) == call.function.arguments
    assert len(streamed) > 2  # they come while they are written
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18}'}]
    assert chat(client, messages=messages, tools=tools, max_tokens=20).choices[0].message.content
    unasked = chat(client, messages=messages[:1], tools=tools, tool_choice="none", max_tokens=40).choices[0]
    assert unasked.message.tool_calls is None


def test_content_parts_and_template_fields(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert chat(client, messages=parts, temperature=0).choices[0].message.content == "17 + 25 = 42."
    answer = client.chat.completions.with_raw_response.create(
        model="demo", messages=parts, max_tokens=1, extra_body={"chat_template_kwargs": {"no_such_field": 1}}
    )
    assert answer.headers["x-ktransformers-ignored"] == "chat_template_kwargs.no_such_field"


def test_answers_follow_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
    answer = chat(client, response_format=named, n=3, temperature=0.5, seed=5, max_tokens=400)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"name", "age"}
    for body in ({"guided_regex": "[a-c]{4}"}, {"structured_outputs": {"regex": "[a-c]{4}"}}):
        assert re.fullmatch("[a-c]{4}", chat(client, extra_body=body).choices[0].message.content)
    text = client.completions.create(
        model=client.models.list().data[0].id, prompt="x", extra_body={"guided_choice": ["so", "not so"]}
    )
    assert text.choices[0].text in ("so", "not so")
    with pytest.raises(openai.BadRequestError, match="#: minItems: at most"):
        chat(client, extra_body={"guided_json": {"type": "array", "minItems": 100000}})


def test_completions(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.generate("The capital of France", SamplingParams(temperature=0, max_tokens=12))
    answer = client.completions.create(model="demo", prompt="The capital of France", temperature=0, max_tokens=12)
    assert answer.choices[0].text == expected.text
    ids = list(expected.prompt_token_ids)
    several = client.completions.create(model="demo", prompt=[ids, ids[:3]], temperature=0, max_tokens=12, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == expected.text
    assert several.choices[3].text == llm.generate(ids[:3], SamplingParams(temperature=0, max_tokens=12))[0].text
    assert several.usage is not None
    assert several.usage.prompt_tokens == len(ids) + 3
    chunks = client.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    with_ids = client.completions.create(
        model="demo", prompt=ids, temperature=0, max_tokens=12, extra_body={"return_token_ids": True}
    )
    assert with_ids.choices[0].model_dump()["token_ids"] == list(expected.token_ids)


def test_echo_scores_the_prompt(client: openai.OpenAI, llm: LLM) -> None:
    prompt = "The capital of France is Paris."
    ids = llm.tokenizer.encode(prompt)
    (expected,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2))
    assert expected.prompt_logprobs is not None
    assert expected.logprobs is not None
    choice = client.completions.create(
        model="demo", prompt=prompt, temperature=0, max_tokens=3, echo=True, logprobs=2
    ).choices[0]
    assert choice.text == prompt + expected.text
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert logprobs.text_offset
    wanted = [None if entry is None else entry.logprob for entry in expected.prompt_logprobs]
    assert logprobs.token_logprobs[: len(ids)] == wanted
    assert (
        logprobs.token_logprobs[len(ids) :]
        == [entry.logprob for entry in expected.logprobs][: len(logprobs.tokens) - len(ids)]
    )
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    only = client.completions.create(model="demo", prompt=ids, max_tokens=0, echo=True, logprobs=2)
    assert only.choices[0].text == prompt
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == wanted
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


def test_errors_have_openais_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_logprobs": 5}, None),
        ({"n": 0}, "n"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"extra_body": {"mirostat": 2}}, "mirostat"),
        ({"extra_body": {"priority": 3}}, None),
        ({"logit_bias": {"99999999": 1}}, None),
    ):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, **fields)
        assert wrong.value.type == "invalid_request_error"
        if param is not None:
            assert wrong.value.param == param
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo", prompt=[])
    assert chat(client, temperature=0).choices[0].message.content == "17 + 25 = 42."


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_cancelled_stream_frees_the_engine(client: openai.OpenAI, server: ServerProcess) -> None:
    stream = chat(client, messages=LONG, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    for _ in range(5):
        next(iter(stream))
    stream.close()
    line = server.wait_for(r"cut off")
    cut = int(line.split(" tokens in ")[0].rsplit(" ", 1)[1])
    assert cut < 2000
    assert chat(client, temperature=0).choices[0].message.content == "17 + 25 = 42."


def test_a_timeout_ends_the_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as late:
        chat(client, messages=LONG, max_tokens=2000, extra_body={"ignore_eos": True, "timeout": 0.2})
    assert late.value.status_code == 408
    assert late.value.code == "deadline_exceeded"
