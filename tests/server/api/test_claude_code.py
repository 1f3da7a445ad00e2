"""The requests of Claude Code, as it sends them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers.server_process import ServerProcess

HEADERS = {
    "accept": "application/json",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,mid-conversation-system-2026-04-07",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "user-agent": "claude-cli/2.1.197 (external, cli)",
    "x-api-key": "sk-local",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
}
EPHEMERAL = {"type": "ephemeral"}
SCHEMA = "http://json-schema.org/draft-07/schema#"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "$schema": SCHEMA,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name}.", "input_schema": schema}


STRING = {"type": "string"}
TOOLS = [
    tool("Task", description=STRING, prompt=STRING),
    tool("Bash", command=STRING, timeout={"type": "number"}),
    tool("Read", file_path=STRING),
    tool("Edit", file_path=STRING, old_string=STRING, new_string=STRING, replace_all={"type": "boolean"}),
    tool("TodoWrite", todos={"type": "array", "items": {"type": "object", "properties": {"content": STRING}}}),
    {**tool("mcp__weather__get", city=STRING), "defer_loading": True, "eager_input_streaming": True},
]


def body(nonce: str = "eb6c6", **fields: Any) -> dict[str, Any]:
    account = f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={nonce};"
    return {
        "model": "claude-sonnet-4-5-20250929",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>\n"},
                    {"type": "text", "text": "What is 17 + 25?", "cache_control": EPHEMERAL},
                ],
            },
            {"role": "system", "content": "Available agent types for the Task tool:\n- claude"},
        ],
        "system": [
            {"type": "text", "text": account},
            {"type": "text", "text": "You are a command line tool.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "\nHelp with software.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "tools": TOOLS,
        "metadata": {"user_id": "user_0123_account__session_4567"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **fields,
    }


@pytest.fixture
def cli(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as made:
        yield made


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    made = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        parsed = json.loads(data.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        made.append(parsed)
    return made


def test_a_turn(cli: httpx.Client) -> None:
    assert cli.head("/").status_code == 200
    response = cli.post("/v1/messages?beta=true", json=body(temperature=1))
    events = events_of(response)
    types = [event["type"] for event in events]
    assert types[:2] == ["message_start", "ping"]
    assert types[-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] in ("end_turn", "tool_use", "max_tokens", "model_context_window_exceeded")
    assert response.headers["request-id"].startswith("req_")
    assert response.headers["x-ktransformers-ignored"] == "output_config.effort"  # the demo's template knows no levels


def test_billing_does_not_spoil_the_cache(cli: httpx.Client) -> None:
    usages = []
    for nonce in ("11111", "22222"):
        sent = body(nonce, stream=False, max_tokens=1, temperature=0)
        usages.append(cli.post("/v1/messages?beta=true", json=sent).json()["usage"])
    prompt_len = usages[1]["input_tokens"] + usages[1]["cache_read_input_tokens"]
    assert (
        usages[1]["cache_read_input_tokens"] == (prompt_len - 1) // 16 * 16
    )  # whole pages; the last token is computed
    counted = {name: body("33333")[name] for name in ("model", "messages", "system", "tools", "thinking")}
    count = cli.post("/v1/messages/count_tokens?beta=true", json=counted).json()
    assert count == {"input_tokens": prompt_len}


def test_small_requests(cli: httpx.Client) -> None:
    quota = {
        "model": "claude-haiku-4-5-20251001",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "quota"}],
        "metadata": {"user_id": "user_0123"},
    }
    answer = cli.post("/v1/messages?beta=true", json=quota).json()
    assert (answer["type"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ("message", "max_tokens", 1)
    foo = {"model": "claude-haiku-4-5-20251001", "messages": [{"role": "user", "content": "foo"}], "tools": []}
    assert cli.post("/v1/messages/count_tokens?beta=true", json=foo).json()["input_tokens"] > 0


def test_fields_without_an_effect_are_named(cli: httpx.Client) -> None:
    edits = {"edits": [{"type": "compact_20260112"}]}
    sent = body(stream=False, max_tokens=1, context_management=edits, made_up=1, other=None, service_tier="auto")
    response = cli.post("/v1/messages", json=sent)
    assert response.status_code == 200
    ignored = "made_up, context_management.edits.compact_20260112, output_config.effort"
    assert response.headers["x-ktransformers-ignored"] == ignored
    response = cli.post("/v1/messages/count_tokens", json=sent)
    assert response.headers["x-ktransformers-ignored"] == ignored
    quiet = {"model": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "container": None}
    assert "x-ktransformers-ignored" not in cli.post("/v1/messages", json=quiet).headers
