"""A picture through the official clients of every dialect, on both engines: each answers what the offline API does."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from ktransformers import LLM, SamplingParams
from tests.engine.api.test_chat_with_pictures import drawing, folder_of, png
from tests.support.pictures.speaking import let_speak
from tests.support.servers.server_process import ServerProcess

PNG = png(drawing())
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"
QUESTION = "What is in this picture?"
NUM_TOKENS = 24
SIZES = ("--cache_lens", "2048")

Client = Callable[[str, str, bool], str]


def of_many(url: str, number: int) -> str:
    """The answer to the request of a number: every third is about pictures of its own."""
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures_of(number)]
    content = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    question = {"type": "text", "text": f"Question {number}. " * (number + 1)}
    asked = {"messages": [{"role": "user", "content": [*content, question]}], "max_tokens": 40, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def pictures_of(number: int) -> list[bytes]:
    if number % 3:
        return []
    images = [drawing(60 + 20 * number, 90 + 10 * number), drawing(100, 100, "blue")]
    return [png(image) for image in images[: 1 + number % 2]]


def of_chat(url: str, model: str, is_streamed: bool) -> str:
    content = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": QUESTION}]
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        if is_streamed:
            chunks = client.chat.completions.create(stream=True, **asked)
            return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        return client.chat.completions.create(**asked).choices[0].message.content or ""


def of_responses(url: str, model: str, is_streamed: bool) -> str:
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
    asked: dict[str, Any] = {
        "model": model,
        "input": [{"role": "user", "content": content}],
        "max_output_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        if is_streamed:
            events = client.responses.create(stream=True, **asked)
            return "".join(event.delta for event in events if event.type == "response.output_text.delta")
        return client.responses.create(**asked).output_text


def of_messages(url: str, model: str, is_streamed: bool) -> str:
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS,
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        if is_streamed:
            with client.messages.stream(**asked) as stream:
                return "".join(stream.text_stream)
        return "".join(block.text for block in client.messages.create(**asked).content if block.type == "text")


def of_ollama_chat(url: str, model: str, is_streamed: bool) -> str:
    messages = [{"role": "user", "content": QUESTION, "images": [PNG]}]
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    with ollama.Client(url) as client:
        if is_streamed:
            chunks = client.chat(model, messages, options=options, stream=True)
            return "".join(chunk.message.content or "" for chunk in chunks)
        return client.chat(model, messages, options=options).message.content or ""


def of_ollama_generate(url: str, model: str, is_streamed: bool) -> str:
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    with ollama.Client(url) as client:
        if is_streamed:
            chunks = client.generate(model, QUESTION, images=[PNG], options=options, stream=True)
            return "".join(chunk.response for chunk in chunks)
        return client.generate(model, QUESTION, images=[PNG], options=options).response


CLIENTS: tuple[Client, ...] = (of_chat, of_responses, of_messages, of_ollama_chat, of_ollama_generate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return let_speak(folder_of("qwen3_vl", tmp_path_factory.mktemp("seeing") / "tiny")[0])


@pytest.fixture(scope="module")
def offline(folder: Path) -> tuple[str, int]:
    """The answer, and how many positions its prompt has."""
    content = [{"type": "image", "image": PNG}, {"type": "text", "text": QUESTION}]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with LLM(folder, cache_lens=2048, cpu_infer=1, self_check=False) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params)
    return output.text, len(output.prompt_token_ids)


@pytest.fixture(scope="module", params=["balance_serve", "ktransformers"])
def seeing(request: pytest.FixtureRequest, folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(folder), "--backend_type", request.param, *SIZES) as process:
        yield process


@pytest.mark.parametrize("is_streamed", [False, True])
def test_all_clients_get_the_offline_answer(seeing: ServerProcess, offline: tuple[str, int], is_streamed: bool) -> None:
    answers = {client.__name__: client(seeing.url, "tiny", is_streamed) for client in CLIENTS}
    assert answers == dict.fromkeys(answers, offline[0])
    assert offline[0]


def test_usage_counts_pictures_and_a_second_turn_finds_the_first(seeing: ServerProcess, folder: Path) -> None:
    content: list[Any] = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": QUESTION * 12}]
    turns: list[Any] = [{"role": "user", "content": content}]
    turns_after = [*turns, {"role": "assistant", "content": "A."}, {"role": "user", "content": "And now?"}]
    usages, answers = [], []
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        for messages in (turns, turns_after):
            asked = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
            answers.append(asked.choices[0].message.content)
            assert asked.usage is not None
            usages.append(asked.usage.model_dump()["prompt_tokens_details"])
    assert [usage["image_tokens"] for usage in usages] == [6, 6]  # of 90 x 70 pixels, in squares of 32
    assert usages[0]["cached_tokens"] < 64  # the prompts of other tests begin alike
    assert usages[1]["cached_tokens"] >= 256  # a page of balance_serve
    with LLM(folder, cache_lens=2048, cpu_infer=1, self_check=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        assert answers == [llm.chat(messages, params)[0].text for messages in (turns, turns_after)]


def test_mixed_requests_at_once_get_what_each_gets_alone(seeing: ServerProcess) -> None:
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(partial(of_many, seeing.url), range(12)))
    assert together == [of_many(seeing.url, number) for number in range(12)]
    assert len(set(together)) > 3
