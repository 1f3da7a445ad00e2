"""context_management of /v1/messages: what is cleared, when, and what responses say of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from ktransformers.server.api.anthropic.context_edits import CLEARED
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import DROPPED_HEADER, IGNORED_HEADER
from tests.support.servers.scripted_backend import Script, ScriptedBackend

NUM_USES = 6
USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def conversation() -> list[dict[str, Any]]:
    """Six steps, each with a thought, a call and a long result; then a question."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read them."}]
    for step in range(NUM_USES):
        name = "look" if step % 2 == 0 else "read"
        use = {"type": "tool_use", "id": f"t{step}", "name": name, "input": {"at": f"place{step}"}}
        thought = {"type": "thinking", "thinking": f"thought{step}", "signature": "s"}
        result = {"type": "tool_result", "tool_use_id": f"t{step}", "content": f"result{step} " + "long " * 20}
        messages += [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]
        if step == 2:
            messages += [{"role": "assistant", "content": "Half."}, {"role": "user", "content": "Go on."}]
    return messages


TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("look", "read")]
BODY: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": conversation(), "tools": TOOLS}


def ask(body: dict[str, Any], path: str = "/v1/messages", **config: Any) -> tuple[httpx.Response, str]:
    """The response, and the prompt that the model got."""
    backend = ScriptedBackend(Script(["so"]))
    app = create_app(backend, ServerConfig(model_names=("demo",), **config))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, json=body)

    response = asyncio.run(send())
    return response, backend.prompts[0] if backend.requests else ""


def edits(*some: dict[str, Any]) -> dict[str, Any]:
    return BODY | {"context_management": {"edits": list(some)}}


def seen(prompt: str, what: str) -> list[int]:
    return [step for step in range(NUM_USES) if f"{what}{step}" in prompt]


NOW = {"type": "tool_uses", "value": 0}


@pytest.mark.parametrize(
    ("edit", "results", "inputs", "num_cleared"),
    [
        ({"type": USES}, range(6), range(6), 0),  # 100,000 tokens are far
        ({"type": USES, "trigger": NOW}, [3, 4, 5], range(6), 3),
        ({"type": USES, "trigger": NOW, "keep": {"type": "tool_uses", "value": 1}}, [5], range(6), 5),
        ({"type": USES, "trigger": NOW, "keep": {"type": "tool_uses", "value": 0}}, [], range(6), 6),
        ({"type": USES, "trigger": NOW, "keep": {"type": "tool_uses", "value": 9}}, range(6), range(6), 0),
        ({"type": USES, "trigger": {"type": "tool_uses", "value": 6}}, range(6), range(6), 0),
        ({"type": USES, "trigger": {"type": "tool_uses", "value": 5}}, [3, 4, 5], range(6), 3),
        ({"type": USES, "trigger": {"type": "input_tokens", "value": 100}}, [3, 4, 5], range(6), 3),
        ({"type": USES, "trigger": NOW, "exclude_tools": ["look"]}, [0, 2, 3, 4, 5], range(6), 1),
        ({"type": USES, "trigger": NOW, "clear_tool_inputs": True}, [3, 4, 5], [3, 4, 5], 3),
        ({"type": USES, "trigger": NOW, "clear_tool_inputs": ["read"]}, [3, 4, 5], [0, 2, 3, 4, 5], 3),
        (
            {"type": USES, "trigger": NOW, "clear_at_least": {"type": "input_tokens", "value": 99999}},
            range(6),
            range(6),
            0,
        ),
    ],
)
def test_uses_of_tools_are_cleared(edit: dict[str, Any], results: Any, inputs: Any, num_cleared: int) -> None:
    response, prompt = ask(edits(edit), is_strict_on_fields=True)
    assert response.status_code == 200, response.text
    assert seen(prompt, "result") == list(results)
    assert seen(prompt, "place") == list(inputs)
    assert prompt.count(CLEARED) == num_cleared
    applied = response.json()["context_management"]["applied_edits"]
    assert [one["cleared_tool_uses"] for one in applied] == ([num_cleared] if num_cleared else [])
    plain, whole = ask(BODY)
    lengths = [one.json()["usage"]["input_tokens"] for one in (plain, response)]
    assert sum(one["cleared_input_tokens"] for one in applied) == lengths[0] - lengths[1]
    assert (prompt == whole) == (not applied)
    assert "context_management" not in plain.json()


@pytest.mark.parametrize(
    ("keep", "thoughts", "num_turns"),
    [
        (None, [3, 4, 5], 1),  # one turn has three steps
        ({"type": "thinking_turns", "value": 1}, [3, 4, 5], 1),
        ({"type": "thinking_turns", "value": 2}, range(6), 0),
        ({"type": "all"}, range(6), 0),
        ("all", range(6), 0),
    ],
)
def test_thoughts_are_cleared(keep: Any, thoughts: Any, num_turns: int) -> None:
    edit = {"type": THINKING} | ({} if keep is None else {"keep": keep})
    response, prompt = ask(edits(edit))
    assert seen(prompt, "thought") == list(thoughts)
    assert seen(prompt, "result") == list(range(6))
    found = response.json().get("context_management", {"applied_edits": []})["applied_edits"]
    assert [(one["type"], one["cleared_thinking_turns"]) for one in found] == [(THINKING, num_turns)] * bool(num_turns)


def test_edits_add_up_and_are_streamed_and_counted() -> None:
    both = edits({"type": THINKING}, {"type": USES, "trigger": NOW})
    whole, prompt = ask(both)
    applied = whole.json()["context_management"]["applied_edits"]
    assert [one["type"] for one in applied] == [THINKING, USES]
    streamed, again = ask(both | {"stream": True})
    assert again == prompt
    lines = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    (delta,) = [line for line in lines if line["type"] == "message_delta"]
    assert delta["context_management"] == {"applied_edits": applied}
    counted = ask({key: value for key, value in both.items() if key != "max_tokens"}, "/v1/messages/count_tokens")[0]
    plain = ask({key: value for key, value in BODY.items() if key != "max_tokens"}, "/v1/messages/count_tokens")[0]
    original = plain.json()["input_tokens"]
    cleared = sum(one["cleared_input_tokens"] for one in applied)
    assert counted.json() == {
        "input_tokens": original - cleared,
        "context_management": {"original_input_tokens": original},
    }


def test_what_cannot_be_done_is_named() -> None:
    compact = edits({"type": "compact_20260112"})
    response, prompt = ask(compact)
    assert response.headers[IGNORED_HEADER] == "context_management.edits.compact_20260112"
    assert response.json()["context_management"] == {"applied_edits": []}
    assert prompt == ask(BODY)[1]
    refused, _ = ask(compact, is_strict_on_fields=True)
    assert refused.status_code == 400
    for wrong in ({"type": USES, "trigger": {"type": "turns", "value": 1}}, {"type": USES, "keep": -1}, {}):
        assert ask(edits(wrong))[0].status_code == 400


class Small(ScriptedBackend):
    """A context that the whole conversation does not fit."""

    max_len = 0

    @property
    def model(self) -> ModelInfo:
        return replace(super().model, max_len=self.max_len)


def test_a_full_context() -> None:
    """Old turns leave where that is asked for; edits are done, though fewer tokens than the trigger says fit."""

    async def send(max_len: int, body: dict[str, Any]) -> httpx.Response:
        backend = Small(Script(["so"]))
        backend.max_len = max_len
        app = create_app(backend, ServerConfig(model_names=("demo",)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/v1/messages", json=body)

    small = ask(BODY)[0].json()["usage"]["input_tokens"] - 100
    assert asyncio.run(send(small, BODY)).status_code == 400
    assert asyncio.run(send(small, BODY | {"truncation": "disabled"})).status_code == 400
    fitted = asyncio.run(send(small, BODY | {"truncation": "auto"}))
    assert fitted.status_code == 200, fitted.text
    assert int(fitted.headers[DROPPED_HEADER]) > 0
    cleared = asyncio.run(send(small, edits({"type": USES})))
    assert cleared.status_code == 200, cleared.text
    assert cleared.json()["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 3
    assert DROPPED_HEADER not in cleared.headers


def test_the_official_client_reads_it() -> None:
    backend = ScriptedBackend(Script(["so"]))
    app = create_app(backend, ServerConfig(model_names=("demo",)))

    async def main() -> Any:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        async with anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", http_client=http) as client:
            return await client.beta.messages.create(
                **edits({"type": USES, "trigger": NOW}), betas=["context-management-2025-06-27"]
            )

    made = asyncio.run(main())
    (one,) = made.context_management.applied_edits
    assert (one.type, one.cleared_tool_uses) == (USES, 3)
