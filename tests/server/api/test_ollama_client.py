"""Ollama's API as its official client and Open WebUI see it: a real process, the bundled model, OpenAI's route and the
offline API as oracles.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import ollama
import openai
import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.support.servers.server_process import ServerProcess

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
LONG = [{"role": "user", "content": "Count from 1 to 60."}]
THINK = [{"role": "user", "content": "Think step by step: what is 12 + 30 + 7?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0}
IGNORED = "x-ktransformers-ignored"


@pytest.fixture
def ollama_client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as made:
        yield made


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: its name
    """
    return f"rain in {city}"


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("}\n")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_the_offline_answer(ollama_client: ollama.Client, llm: LLM) -> None:
    for messages, num_predict in ((QUESTION, 64), (LONG, 20), (LONG, 200)):
        (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=num_predict))
        answer = ollama_client.chat("demo", messages, options=GREEDY | {"num_predict": num_predict})
        assert answer.message.content == expected.text
        assert answer.message.role == "assistant"
        assert (answer.done, answer.done_reason) == (True, expected.finish_reason.value)
        assert answer.prompt_eval_count == len(expected.prompt_token_ids)
        assert answer.eval_count == len(expected.token_ids)
        assert answer.eval_duration > 0
        assert answer.prompt_eval_duration > 0
        assert answer.total_duration >= answer.eval_duration


def test_a_stream_adds_up_to_the_answer(ollama_client: ollama.Client) -> None:
    whole = ollama_client.chat("demo", LONG, options=GREEDY | {"num_predict": 50})
    chunks = list(ollama_client.chat("demo", LONG, options=GREEDY | {"num_predict": 50}, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].message.content == ""
    assert (chunks[-1].done_reason, chunks[-1].eval_count) == (whole.done_reason, whole.eval_count) == ("length", 50)
    assert all(chunk.eval_count is None and chunk.done_reason is None for chunk in chunks[:-1])


def test_without_a_word_about_it_an_answer_is_streamed_and_goes_to_its_end(http: httpx.Client, llm: LLM) -> None:
    (expected,) = llm.chat(LONG, SamplingParams(temperature=0))
    for options in ({}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 0}):
        lines = lines_of(http.post("/api/chat", json={"model": "demo", "messages": LONG, "options": GREEDY | options}))
        assert "".join(line["message"]["content"] for line in lines) == expected.text
        assert lines[-1]["done_reason"] == "stop"
        assert abs(datetime.fromisoformat(lines[0]["created_at"]).timestamp() - datetime.now(UTC).timestamp()) < 600


def test_the_async_client(server: ServerProcess, ollama_client: ollama.Client) -> None:
    async def main() -> str:
        async with ollama.AsyncClient(server.url) as client:
            whole = await client.generate("demo", "What is 17 + 25?", options=GREEDY)
            stream = await client.generate("demo", "What is 17 + 25?", options=GREEDY, stream=True)
            assert "".join([part.response async for part in stream]) == whole.response
            return whole.response

    assert asyncio.run(main()) == ollama_client.chat("demo", QUESTION, options=GREEDY).message.content


def test_generate_is_chat_with_one_turn_or_raw(ollama_client: ollama.Client, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=30))
    options = GREEDY | {"num_predict": 30}
    made = ollama_client.generate("demo", "What is 17 + 25?", system="Be brief.", options=options)
    assert made.response == expected.text
    (expected,) = llm.generate("1, 2, 3,", SamplingParams(temperature=0, max_tokens=12))
    made = ollama_client.generate("demo", "1, 2, 3,", raw=True, options=GREEDY | {"num_predict": 12})
    assert made.response == expected.text
    assert made.done_reason == "length"


def test_options_reach_the_sampler(ollama_client: ollama.Client, llm: LLM) -> None:
    options = {"temperature": 6.0, "top_p": 0.97, "top_k": 40.0, "min_p": 0.001, "seed": 11, "num_predict": 24}
    params = SamplingParams(temperature=6.0, top_p=0.97, top_k=40, min_p=0.001, seed=11, max_tokens=24)
    assert ollama_client.chat("demo", LONG, options=options).message.content == llm.chat(LONG, params)[0].text
    penalties = {"repeat_penalty": 1.8, "presence_penalty": 2, "frequency_penalty": 1.5}
    params = SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.8, presence_penalty=2, frequency_penalty=1.5
    )
    made = ollama_client.chat("demo", LONG, options=GREEDY | penalties | {"num_predict": 24}).message.content
    (plain,) = llm.chat(LONG, SamplingParams(temperature=0, max_tokens=24))
    assert made == llm.chat(LONG, params)[0].text != plain.text
    off = GREEDY | penalties | {"num_predict": 24, "repeat_last_n": 0}
    assert ollama_client.chat("demo", LONG, options=off).message.content == plain.text
    no_nucleus = {"temperature": 6.0, "top_p": 0, "num_predict": 24}
    assert ollama_client.chat("demo", LONG, options=no_nucleus).message.content == plain.text
    stopped = ollama_client.chat("demo", LONG, options=GREEDY | {"stop": ["12", ""]})
    assert stopped.message.content.endswith("11, ")
    assert stopped.done_reason == "stop"


def test_thinking_is_a_field_of_its_own(ollama_client: ollama.Client) -> None:
    thought = ollama_client.chat("demo", THINK, think=True, options=GREEDY)
    assert thought.message.thinking
    assert "<think>" not in thought.message.thinking + thought.message.content
    chunks = list(ollama_client.chat("demo", THINK, think=True, options=GREEDY, stream=True))
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == thought.message.thinking
    assert "".join(chunk.message.content or "" for chunk in chunks) == thought.message.content
    made = ollama_client.generate("demo", THINK[0]["content"], think=True, options=GREEDY)
    assert (made.thinking, made.response) == (thought.message.thinking, thought.message.content)
    plain = ollama_client.chat("demo", QUESTION, think=False, options=GREEDY)
    assert plain.message.thinking is None


def test_a_loop_with_a_tool(ollama_client: ollama.Client) -> None:
    asked = ollama_client.chat("demo", WEATHER, tools=[get_weather], options=GREEDY)
    (call,) = asked.message.tool_calls or ()
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert asked.done_reason == "stop"
    chunks = list(ollama_client.chat("demo", WEATHER, tools=[get_weather], options=GREEDY, stream=True))
    assert [chunk.message.tool_calls for chunk in chunks if chunk.message.tool_calls] == [asked.message.tool_calls]
    assert "".join(chunk.message.content or "" for chunk in chunks) == (asked.message.content or "")
    result = {"role": "tool", "tool_name": "get_weather", "content": '{"temperature": 12, "sky": "rain"}'}
    answer = ollama_client.chat("demo", [*WEATHER, asked.message, result], tools=[get_weather], options=GREEDY)
    assert "12" in answer.message.content


def test_logprobs_are_those_of_the_other_dialect(ollama_client: ollama.Client, client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "messages": QUESTION, "logprobs": True, "top_logprobs": 2}
    expected = client.chat.completions.create(**fields, temperature=0, max_tokens=4).choices[0].logprobs
    made = ollama_client.chat(**fields, options=GREEDY | {"num_predict": 4}).logprobs
    assert expected is not None
    assert expected.content is not None
    assert [(one.token, one.logprob) for one in made] == [(one.token, one.logprob) for one in expected.content]
    assert [[top.token for top in one.top_logprobs] for one in made] == [
        [top.token for top in one.top_logprobs] for one in expected.content
    ]
    streamed = list(ollama_client.chat(**fields, options=GREEDY | {"num_predict": 4}, stream=True))
    assert [one for chunk in streamed for one in chunk.logprobs or ()] == made


def test_what_is_said_of_the_model(ollama_client: ollama.Client) -> None:
    (listed,) = [model for model in ollama_client.list().models if model.model == "demo:latest"]
    assert len(listed.digest) == 64
    assert listed.size > 9_000_000
    assert listed.details.model_dump() == {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen3moe",
        "families": ["qwen3moe"],
        "parameter_size": "14.6M",
        "quantization_level": "Q4_K_M",
    }
    (running,) = [model for model in ollama_client.ps().models if model.model == "demo:latest"]
    assert (running.context_length, running.digest) == (2048, listed.digest)
    assert running.expires_at is not None
    assert running.expires_at > datetime.now(UTC)
    for name in ("demo", "demo:latest"):
        shown = ollama_client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking", "vision"]
        assert shown.modelinfo["general.architecture"] == "qwen3moe"
        assert shown.modelinfo["qwen3moe.context_length"] == 2048
        assert shown.modelinfo["qwen3moe.expert_count"] == 16
        assert "num_ctx" in shown.parameters
        assert "<|im_start|>" in shown.template
        assert shown.modelfile.startswith("FROM demo\n")
        assert shown.details == listed.details


def test_embeddings_are_those_of_the_other_dialect(
    ollama_client: ollama.Client, client: openai.OpenAI, http: httpx.Client
) -> None:
    texts = ["Count from one to a hundred.", "short", "Rain in Paris"]
    expected = [one.embedding for one in client.embeddings.create(model="demo", input=texts).data]
    made = ollama_client.embed("demo:latest", texts)
    assert made.model == "demo:latest"
    assert [list(one) for one in made.embeddings] == expected
    assert made.prompt_eval_count == client.embeddings.create(model="demo", input=texts).usage.prompt_tokens
    assert made.total_duration > 10_000
    assert made.load_duration == 0
    (alone,) = ollama_client.embed("demo", texts[1]).embeddings
    assert list(alone) == expected[1] == list(ollama_client.embeddings("demo", texts[1]).embedding)
    (cut,) = ollama_client.embed("demo", texts[1], dimensions=64).embeddings
    assert list(cut) == client.embeddings.create(model="demo", input=texts[1], dimensions=64).data[0].embedding
    assert ollama_client.embed("demo", "").embeddings == ollama_client.embed("demo", []).embeddings == []
    assert list(ollama_client.embeddings("demo", "").embedding) == []
    body = {"model": "demo", "input": "a", "options": {"num_ctx": 9, "seed": 1}, "foo": 1, "keep_alive": "5m"}
    assert http.post("/api/embed", json=body).headers[IGNORED] == "foo, options.num_ctx"


def test_texts_that_are_too_long_are_cut(ollama_client: ollama.Client, client: openai.OpenAI) -> None:
    long = "one " * 5000
    ids = client.post("/../tokenize", body={"prompt": long[:12000]}, cast_to=dict[str, Any])["tokens"][:2047]
    (expected,) = client.embeddings.create(model="demo", input=ids).data
    for made in (ollama_client.embed("demo", long), ollama_client.embed("demo", long, truncate=True)):
        assert list(made.embeddings[0]) == expected.embedding
        assert made.prompt_eval_count == 2047


def test_the_rate_of_one_token_is_possible(ollama_client: ollama.Client) -> None:
    answer = ollama_client.chat("demo", QUESTION, options={"num_predict": 1})
    assert answer.eval_count == 1
    assert 10_000 < answer.eval_duration <= answer.total_duration


def test_names_with_and_without_a_tag(ollama_client: ollama.Client) -> None:
    for name, answered in (("demo", "demo"), ("demo:latest", "demo:latest"), ("llama3:8b", "demo")):
        assert ollama_client.chat(name, QUESTION, options={"num_predict": 1}).model == answered


def test_to_load_and_to_unload(ollama_client: ollama.Client, http: httpx.Client) -> None:
    assert ollama_client.chat("demo").done_reason == "load"
    assert ollama_client.generate("demo", keep_alive="10m").done_reason == "load"
    for keep_alive in (0, 0.0, "0", "0s"):
        answer = http.post("/api/generate", json={"model": "demo", "keep_alive": keep_alive})
        assert answer.headers[IGNORED] == "keep_alive"
        assert answer.json()["done_reason"] == "unload"
        assert answer.json()["response"] == ""
    assert "demo:latest" in [model.model for model in ollama_client.ps().models]


def test_the_commands_of_the_documentation_name_no_content_type(http: httpx.Client) -> None:
    body = json.dumps({"model": "demo", "prompt": "What is 17 + 25?", "stream": False, "options": GREEDY})
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert "42" in http.post("/api/generate", content=body, headers=headers).json()["response"]
    assert http.post("/api/generate", content="{", headers=headers).status_code == 400


OPEN_WEBUI = {
    "model": "demo:latest",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 17 + 25?"},
    ],
    "options": {
        "temperature": 0,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0,
        "mirostat": 0,
        "mirostat_eta": 0.1,
        "mirostat_tau": 5,
        "repeat_last_n": 64,
        "repeat_penalty": 1.1,
        "tfs_z": 1,
        "typical_p": 1,
        "seed": 0,
        "stop": ["END"],
        "num_ctx": 2048,
        "num_batch": 512,
        "num_keep": 24,
        "num_predict": 128,
        "num_thread": 2,
        "num_gpu": 99,
        "use_mmap": True,
        "use_mlock": False,
    },
    "keep_alive": "5m",
    "think": False,
    "format": None,
    "template": None,
    "tools": None,
    "stream": True,
}


def test_what_open_webui_sends(http: httpx.Client) -> None:
    assert tuple(map(int, http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    (model,) = [one for one in http.get("/api/tags").json()["models"] if one["name"] == "demo:latest"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= model.keys()
    assert {"name", "model", "size", "expires_at", "size_vram"} <= http.get("/api/ps").json()["models"][0].keys()
    response = http.post("/api/chat", json=OPEN_WEBUI)
    lines = lines_of(response)
    assert "42" in "".join(line["message"]["content"] for line in lines)
    assert lines[-1]["done"] is True
    # /api/chat has no template; the penalty looks back over everything here.
    assert response.headers[IGNORED] == "options.repeat_last_n"


def test_fields_without_a_meaning_are_named(http: httpx.Client) -> None:
    body = {"model": "demo", "messages": QUESTION, "stream": False}
    options = {"num_predict": 1, "spin": 1, "num_ctx": 1 << 20, "num_thread": 3}
    response = http.post("/api/chat", json=body | {"foo": 1, "bad name": 2, "options": options, "bar": None})
    assert response.status_code == 200
    assert response.headers[IGNORED] == "foo, ?, options.spin, options.num_ctx"
    message = {"role": "user", "content": "a", "timestamp": 5, "id": "x"}
    response = http.post("/api/chat", json=body | {"messages": [message], "options": {"num_predict": 1}})
    assert response.status_code == 200
    assert IGNORED not in response.headers


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"format": "xml"}, 'format: it must be "json" or'),
    ("/api/chat", {"format": [1]}, 'format: it must be "json" or'),
    ("/api/chat", {"keep_alive": [1]}, "keep_alive: it must be a number"),
    ("/api/chat", {"options": {"mirostat": 2}}, "temperature"),
    ("/api/chat", {"options": {"typical_p": 0.5}}, "top_p"),
    ("/api/chat", {"options": {"tfs_z": 0.5}}, "min_p"),
    ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
    ("/api/chat", {"options": {"num_predict": "many"}}, "options.num_predict"),
    ("/api/chat", {"options": {"num_predict": 1.5}}, "options.num_predict"),
    ("/api/chat", {"options": []}, "options"),
    ("/api/chat", {"think": "very"}, "think: it must be true, false"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
    ("/api/chat", {"messages": [{"role": "jester", "content": "a"}]}, "jester"),
    ("/api/chat", {"top_logprobs": 3}, "logprobs"),
    ("/api/generate", {"suffix": "b"}, "suffix"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "raw"),
    ("/api/generate", {"images": ["aGk="]}, "these 2 bytes are no picture"),
    ("/api/generate", {"context": [1, 2]}, "/api/chat"),
    ("/api/generate", {"raw": True, "system": "b"}, "system"),
    ("/api/chat", {"format": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, "$ref: each value needs"),
    ("/api/embed", {}, "input: Field required"),
    ("/api/embed", {"input": 3}, "input"),
    ("/api/embed", {"input": ["a", ""]}, "prompt is empty"),
    ("/api/embed", {"input": ["a"] * 129}, "more than 128 answers"),
    ("/api/embed", {"input": "a", "dimensions": 1000}, "more than this model's embeddings have: 256"),
    ("/api/embed", {"input": "a", "dimensions": -1}, "dimensions"),
    ("/api/embed", {"input": "a " * 5000, "truncate": False}, "maximum context length is 2048 tokens"),
    ("/api/embeddings", {"prompt": ["a"]}, "prompt"),
    ("/api/pull", {"model": "llama3"}, "ktransformers pull"),
    ("/api/create", {"model": "x", "from": "demo"}, "quantize"),
    ("/api/copy", {"source": "demo", "destination": "x"}, "--model_name"),
    ("/api/push", {"model": "demo"}, "uploaded"),
]


@pytest.mark.parametrize(("path", "fields", "says"), REFUSED, ids=[f"{path} {fields}" for path, fields, _ in REFUSED])
def test_a_refusal_is_one_text(http: httpx.Client, path: str, fields: dict[str, Any], says: str) -> None:
    needed = {"/api/chat": {"messages": QUESTION}, "/api/generate": {"prompt": "a"}}.get(path, {})
    response = http.post(path, json={"model": "demo"} | needed | fields)
    assert response.status_code == 400
    assert response.json().keys() == {"error"}
    assert says in response.json()["error"]


def test_refusals_as_the_client_sees_them(ollama_client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here") as caught:
        ollama_client.show("llama3")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="delete the files"):
        ollama_client.delete("demo")
    assert ollama_client.pull("demo").status == "success"


def test_errors_elsewhere_keep_their_shape(http: httpx.Client) -> None:
    assert http.get("/api/nothing").json() == {"error": "Not Found"}
    assert http.get("/api/chat").json() == {"error": "Method Not Allowed"}
    assert http.get("/v1/nothing").json()["error"]["message"] == "Not Found"
