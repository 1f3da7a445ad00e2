"""What templates drop or refuse reaches the model in every dialect: the prompts that the backend gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.tokenizer import Tokenizer
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.models.chat_templates import FILES, Habits, template_of
from tests.support.servers.fake_backend import FakeBackend


class Listening(FakeBackend):
    """Says "so" and keeps the prompts."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.prompts: list[str] = []

    @property
    def model(self) -> ModelInfo:
        size = self.tokenizer.vocab_size
        return ModelInfo(self.tokenizer, 1 << 16, size, (), SamplingParams(temperature=0), None, "listening")

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.prompts.append(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        stats = GenerationStats(prompt_len=len(request.prompt_ids), completion_len=1)
        yield TokenEvent(7, "so", stats, finish_reason=FinishReason.STOP)


def ask(template: str, path: str, body: dict[str, Any], **config: Any) -> tuple[str, httpx.Response]:
    """The prompt, and the answer."""
    backend = Listening(byte_tokenizer(template))
    app = create_app(backend, ServerConfig(model_names=("m",), **config))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json=body)

    response = asyncio.run(send())
    assert response.status_code == 200, response.text
    return backend.prompts[-1] if backend.prompts else "", response


STEPS = [
    ("weather", {"city": "Oslo"}, "4 degrees"),
    ("clock", {"zone": "CET"}, "noon"),
    ("weather", {"city": "Rome"}, "20"),
]
SYSTEM, QUESTION = "Be brief.", "Where is it warmer?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "zone": {"type": "string"}}}


def chat() -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for index, (name, arguments, result) in enumerate(STEPS):
        call = {"name": name, "arguments": json.dumps(arguments)}
        call_id = f"call_Yp4Xk2RqVb9LmN7s{index}"
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "clock")]
    return "/v1/chat/completions", {"messages": messages, "tools": tools}


def anthropic() -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for index, (name, arguments, result) in enumerate(STEPS):
        call_id = f"toolu_01XgVtQ8m3nWcR{index}"
        messages += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": call_id, "name": name, "input": arguments}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": result}]},
        ]
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "clock")]
    return "/v1/messages", {"messages": messages, "system": SYSTEM, "tools": tools, "max_tokens": 9}


def responses() -> tuple[str, dict[str, Any]]:
    items: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for index, (name, arguments, result) in enumerate(STEPS):
        call_id = f"call_{index}0f3c5d7"
        items += [
            {"type": "function_call", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)},
            {"type": "function_call_output", "call_id": call_id, "output": result},
        ]
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "clock")]
    return "/v1/responses", {"input": items, "instructions": SYSTEM, "tools": tools}


def ollama() -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for name, arguments, result in STEPS:
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
            {"role": "tool", "tool_name": name, "content": result},
        ]
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "clock")]
    return "/api/chat", {"model": "m", "messages": messages, "tools": tools, "stream": False}


DIALECTS = [chat, anthropic, responses, ollama]
MISTRAL_STEPS = (
    '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "call00000"}]</s>'
    '[TOOL_RESULTS]{"content": 4 degrees, "call_id": "call00000"}[/TOOL_RESULTS]'
    '[TOOL_CALLS][{"name": "clock", "arguments": {"zone": "CET"}, "id": "call00001"}]</s>'
    '[TOOL_RESULTS]{"content": noon, "call_id": "call00001"}[/TOOL_RESULTS]'
    '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "call00002"}]</s>'
    '[TOOL_RESULTS]{"content": 20, "call_id": "call00002"}[/TOOL_RESULTS]'
)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_mistral_model_gets_through_three_tool_steps(dialect: Callable[[], tuple[str, dict[str, Any]]]) -> None:
    prompt, response = ask((FILES / "mistral_nemo.jinja").read_text(), *dialect())
    head, question, steps = prompt.partition(f"[INST]{SYSTEM}\n\n{QUESTION}[/INST]")
    assert head.startswith("<s>[AVAILABLE_TOOLS]")
    assert question
    assert steps == MISTRAL_STEPS
    named = {anthropic: "system", responses: "instructions"}.get(dialect, "messages.system")
    assert response.headers["x-ktransformers-ignored"] == named  # the template loses it between calls


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_kimi_model_gets_its_own_ids(dialect: Callable[[], tuple[str, dict[str, Any]]]) -> None:
    prompt, response = ask((FILES / "kimi_k2_turn.jinja").read_text(), *dialect())
    for name in ("weather", "clock"):
        assert f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>" in prompt
        assert f"## Return of functions.{name}:0\n" in prompt
    assert "x-ktransformers-ignored" not in response.headers


TURNS = [("system", "first"), ("user", "one"), ("assistant", "two"), ("developer", "late"), ("user", "three")]
QWEN35 = template_of(Habits(system="first_raises", developer="raises", needs_user=True), "chatml")
FOLDED = (
    "<|im_start|>system\nfirst<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    "<|im_start|>user\nlate\n\nthree<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize("late", ["developer", "system"])
@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/api/chat", "messages")]
)
def test_late_instructions_are_not_refused(path: str, field: str, late: str) -> None:
    turns = [{"role": late if role == "developer" else role, "content": text} for role, text in TURNS]
    prompt, response = ask(QWEN35, path, {"model": "m", field: turns, "stream": False}, is_strict_on_fields=True)
    assert prompt == FOLDED
    assert response.headers["x-ktransformers-ignored"] == f"{field}.system"


def test_streams_and_counts_say_it_too() -> None:
    messages = [{"role": role, "content": text} for role, text in TURNS]
    _, streamed = ask(QWEN35, "/v1/chat/completions", {"messages": messages, "stream": True})
    _, counted = ask(QWEN35, "/tokenize", {"messages": messages})
    assert counted.json()["count"] == len(byte_tokenizer(QWEN35).encode(FOLDED))
    body = {"messages": [message for message in messages if message["role"] != "developer"]}
    body["messages"].insert(0, {"role": "assistant", "content": "zero"})
    alternating = template_of(Habits(alternates=True), "chatml")
    _, tokens = ask(
        alternating, "/v1/messages/count_tokens", {**body, "messages": body["messages"][:1] + body["messages"][2:]}
    )
    for response, changes in ((streamed, "messages.system"), (counted, "messages.system"), (tokens, "messages.empty")):
        assert response.headers["x-ktransformers-ignored"] == changes


def test_calls_that_we_returned_ourselves_are_taken_back() -> None:
    """Two in one turn, for a template that takes one."""
    template = template_of(Habits(calls="one"), "chatml") + "{# </tool_call> #}"
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments, _) in enumerate(STEPS[:2])
    ]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_0", "content": "4 degrees"},
    ]
    prompt, response = ask(template, "/v1/chat/completions", {"messages": messages, "tools": chat()[1]["tools"]})
    turns = prompt.partition(QUESTION)[2]
    assert turns == (
        '<|im_end|>\n<|im_start|>assistant\nI look.[CALL]weather {"city": "Oslo"}[/CALL]<|im_end|>\n'
        "<|im_start|>tool\n4 degrees<|im_end|>\n"
        '<|im_start|>assistant\n[CALL]clock {"zone": "CET"}[/CALL]<|im_end|>\n'
        "<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
    )
    assert response.headers["x-ktransformers-ignored"] == "messages.tool_calls"


NO_TOOLS = template_of(Habits(system="first_raises", calls="drops", results="drops", alternates=True), "chatml")
AFTERWARDS = {
    chat: ("messages", {"role": "user", "content": "and"}, "messages.user", "messages.tool_calls", "messages.tool"),
    anthropic: (
        "messages",
        {"role": "user", "content": "and"},
        "messages.user",
        "messages.tool_use",
        "messages.tool_result",
    ),
    responses: (
        "input",
        {"role": "developer", "content": "and"},
        "input.system",
        "input.function_call",
        "input.function_call_output",
    ),
    ollama: (
        "messages",
        {"role": "system", "content": "and"},
        "messages.system",
        "messages.tool_calls",
        "messages.tool",
    ),
}


@pytest.mark.parametrize("dialect", AFTERWARDS)
def test_folds_are_named_as_the_client_knows_them(dialect: Any) -> None:
    path, body = dialect()
    field, more, *names = AFTERWARDS[dialect]
    body[field] = [*body[field], more, {"role": "user", "content": "Go on."}]
    _, response = ask(NO_TOOLS, path, body)
    named = response.headers["x-ktransformers-ignored"].split(", ")
    assert set(names) <= set(named)
    assert all(name.startswith((f"{field}.", "system", "instructions")) for name in named)


EFFORTS = [
    ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("/v1/chat/completions", {"reasoning": {"effort": "high"}}, "reasoning"),
    ("/v1/chat/completions", {"enable_thinking": True}, "enable_thinking"),
    ("/v1/chat/completions", {"thinking": {"type": "enabled"}}, "thinking"),
    ("/v1/chat/completions", {"think": True}, "think"),
    ("/v1/messages", {"output_config": {"effort": "high"}}, "output_config.effort"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ("/v1/responses", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("/api/chat", {"think": "high"}, "think"),
]


@pytest.mark.parametrize(("path", "asked", "name"), EFFORTS)
def test_what_a_template_does_not_know_is_named_as_it_was_sent(path: str, asked: dict[str, Any], name: str) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "m", "max_tokens": 2000, field: [{"role": "user", "content": "Hi"}], "stream": False, **asked}
    if path == "/api/chat":
        del body["max_tokens"]
    _, response = ask(template_of(Habits(), "chatml"), path, body)
    assert response.headers["x-ktransformers-ignored"] == name


def test_a_prompt_of_ollamas_is_named_so() -> None:
    body = {"model": "m", "prompt": "Hi", "system": "Be brief.", "stream": False}
    _, response = ask(template_of(Habits(system="raises"), "chatml"), "/api/generate", body)
    assert response.headers["x-ktransformers-ignored"] == "system"
