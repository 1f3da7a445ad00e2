"""Random requests over HTTP by OpenAI's client, of servers with draft tokens and without, through both backends: the
same answers, chunk by chunk, whatever a request asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.backend.test_balance_serve import metrics
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.servers.server_process import ServerProcess

CONTEXT_LEN = 704
FLAGS = ("--model_path", str(DEMO_CHECKPOINT), "--cache_lens", str(CONTEXT_LEN))
BACKENDS = {
    "balance_serve": (*FLAGS, "--backend_type", "balance_serve", "--max_batch_size", "4", "--no_spare_engine"),
    "ktransformers": (*FLAGS, "--backend_type", "ktransformers"),
}
QUESTIONS = (
    "Write this list backwards: beach, pocket, clock, ocean, comet, beach, pocket, clock",
    "Write this again:\ndef add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "Count: 1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3 4",
    "Find a route from Rome to Paris.",
    "What are you?",
)
TEXT = {"type": "string", "maxLength": 20}
SCHEMA = {
    "type": "object",
    "properties": {"answer": TEXT, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
ROUTE = {"type": "object", "properties": {"start": TEXT, "end": TEXT}, "required": ["start", "end"]}
TOOL = {"type": "function", "function": {"name": "find_route", "description": "Find a route", "parameters": ROUTE}}
OTHER = {"id", "created", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
"""Fields that are others in each answer, or may be where prompts are in the cache already."""


def random_request(rng: random.Random) -> dict[str, Any]:
    """Fields of a request, to either route: "messages" or "prompt" says which."""
    fields: dict[str, Callable[[], Any]] = {
        "max_tokens": lambda: rng.choice([1, 2, 3, 5, 8, 9, 17, 40, 80]),
        "ignore_eos": lambda: True,
        "min_tokens": lambda: 1,
        "frequency_penalty": lambda: rng.choice([0.4, -0.3]),
        "presence_penalty": lambda: rng.choice([0.6, -0.3]),
        "repetition_penalty": lambda: rng.choice([1.2, 0.9]),
        "logit_bias": lambda: {str(rng.randrange(3, 400)): rng.choice([-100, -3, 4]) for _ in range(4)},
        "top_p": lambda: 0.8,
        "top_k": lambda: 20,
        "n": lambda: rng.choice([2, 4]),
        "include_stop_str_in_output": lambda: True,
    }
    body = {name: value() for name, value in fields.items() if rng.random() < (0.7 if name == "max_tokens" else 0.3)}
    body |= {"temperature": rng.choice([0.0, 0.0, 0.7, 1.2]), "seed": rng.randrange(1000)}
    question = rng.choice(QUESTIONS)
    if rng.random() < 0.4:
        body |= {"prompt": question, **rng.choice([{}, {"logprobs": 2}, {"guided_regex": r"[a-z ]{5,40}\."}])}
    else:
        body["messages"] = [{"role": "user", "content": question}]
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        tools = {"tools": [TOOL], "tool_choice": rng.choice(["auto", "required"])}
        body |= rng.choice([{}, {"logprobs": True, "top_logprobs": 2}, {"response_format": format_}, tools])
    return body


def send(server: ServerProcess, body: dict[str, Any], num_chunks: int | None = None) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, or the first so many, behind which the client leaves."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        api: Any = client.completions if "prompt" in body else client.chat.completions
        asked = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}
        known = {name: body[name] for name in ("prompt", "messages") if name in body}
        chunks = []
        for chunk in api.create(**asked, **known, extra_body=body):
            chunks.append(kept(chunk.model_dump()))
            if len(chunks) == num_chunks:
                break
        return chunks


def kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: kept(one) for name, one in value.items() if name not in OTHER}
    return [kept(one) for one in value] if isinstance(value, list) else value


def by_choice(chunks: Sequence[dict[str, Any]]) -> dict[int | None, list[dict[str, Any]]]:
    """Chunks of several choices come in the order in which steps have them: as many tokens of each as are right."""
    found: dict[int | None, list[dict[str, Any]]] = {}
    for chunk in chunks:
        found.setdefault(chunk["choices"][0]["index"] if chunk["choices"] else None, []).append(chunk)
    return found


def text_of(chunks: Sequence[dict[str, Any]]) -> str:
    choices = [chunk["choices"][0] for chunk in by_choice(chunks).get(0, [])]
    return "".join((one["delta"]["content"] if "delta" in one else one["text"]) or "" for one in choices)


def completed(plain: ServerProcess, body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """With what only the answer says: a stop string over several tokens, and a prediction with an error in it."""
    text = text_of(send(plain, body))
    if len(text) > 12:
        at = rng.randrange(1, len(text) - 8)
        if rng.random() < 0.4 and text[at : at + 7].strip():
            body = body | {"stop": [text[at : at + 7]]}
        body = body | {"prediction": {"type": "content", "content": text[:at] + "zz" + text[at + 2 :]}}
    return body


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("drafter", ["ngram", pytest.param("mtp", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_without_draft_tokens(
    backend: str, drafter: str, random_cases: Callable[[int, int], int]
) -> None:
    rng, flags = random.Random(5), BACKENDS[backend]
    with ServerProcess(*flags, "--speculative", "off") as plain:
        bodies = [completed(plain, random_request(rng), rng) for _ in range(random_cases(12, 60))]
        expected = [send(plain, body) for body in bodies]
    limits = [rng.randrange(1, 30) if rng.random() < 0.2 else None for _ in bodies]
    with ServerProcess(*flags, "--speculative", drafter) as server, ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda body, limit: send(server, body, limit), bodies, limits))
        repeated = {"prompt": "1 2 3 4 " * 20, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        for _ in range(6):  # on a busy machine it may take some to find out that draft tokens pay
            send(server, repeated)
        accepted = metrics(server)["vllm:spec_decode_num_accepted_tokens_total"]
    for body, limit, want, chunks in zip(bodies, limits, expected, got, strict=True):
        for index, part in by_choice(chunks).items():
            whole = by_choice(want)[index]
            assert part == (whole if limit is None else whole[: len(part)]), body
        assert limit is not None or len(chunks) == len(want), body
    assert accepted > 0
