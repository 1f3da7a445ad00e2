"""What clients of other programs send: choices of tools, tools, formats, samplers, prompts; written by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from ktransformers.core import ConstraintKind, FinishReason
from ktransformers.server.app import create_app
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import IGNORED_HEADER
from tests.support.servers.scripted_backend import Script, ScriptedBackend

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
NAMES = ("look", "seek")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in NAMES],
    "/v1/responses": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
    "/v1/messages": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 50},
    "/v1/completions": {"prompt": "Hi"},
    "/tokenize": {"messages": [USER]},
    "/v1/embeddings": {"input": "Hi"},
}


class Service:
    def __init__(self, *scripts: Script):
        self.backend = ScriptedBackend(*(scripts or [Script(["Hello"])]))
        self.app = create_app(self.backend, ServerConfig(model_names=("demo",)))

    def send(self, path: str, **fields: Any) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(path, json=BODIES.get(path, {}) | fields)

        return asyncio.run(main())


CHOICES: list[tuple[Any, bool, tuple[str, ...], tuple[str, ...]]] = [
    # the choice, whether a call is forced, tools that the model is shown, names in the grammar
    *((choice, False, NAMES, ()) for choice in (
        "auto", {"type": "auto"}, {"auto": {}}, {"mode": "AUTO"}, {"function_calling_config": {"mode": "AUTO"}},
    )),
    *((choice, False, (), ()) for choice in (
        "none", {"type": "none"}, False, {"functionCallingConfig": {"mode": "NONE"}},
    )),
    *((choice, True, NAMES, NAMES) for choice in (
        "required", "any", True, {"type": "any"}, {"type": "required"}, {"any": {}}, {"mode": "ANY"},
    )),
    *((choice, True, NAMES, ("seek",)) for choice in (
        "seek",
        {"type": "tool", "name": "seek"},
        {"type": "function", "name": "seek"},
        {"type": "function", "function": {"name": "seek"}},
        {"function": {"name": "seek"}},
        {"name": "seek"},
        {"tool": {"name": "seek"}},
        {"type": "tool", "name": "seek", "disable_parallel_tool_use": True},
    )),
    *((choice, True, ("seek",), ("seek",)) for choice in (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "seek"}]},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "seek"}}]}},
        {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["seek"]}},
    )),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "seek"}]}, False, ("seek",), ()),
]  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize(("choice", "is_forced", "shown", "called"), CHOICES)
@pytest.mark.parametrize("path", TOOLS)
def test_tool_choices_of_all_programs(
    path: str, choice: Any, is_forced: bool, shown: tuple[str, ...], called: tuple[str, ...]
) -> None:
    service = Service()
    response = service.send(path, tools=TOOLS[path], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert IGNORED_HEADER not in response.headers
    head = service.backend.prompts[0].partition("<|im_start|>user")[0]
    assert [name for name in NAMES if name in head] == list(shown)
    constraint = service.backend.requests[0].params.constraint
    assert (constraint is not None) == is_forced
    if constraint is not None:
        assert constraint.kind is ConstraintKind.TOOL_CALLS
        assert [name for name in NAMES if name in constraint.text] == list(called)


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize(
    "choice", ["", {}, {"type": "odd"}, 5, ["auto"], {"type": "function"}, {"type": "tool"}, "sought"]
)
def test_choices_that_nobody_knows_are_refused(path: str, choice: Any) -> None:
    if (path, choice) == ("/v1/responses", ""):
        pytest.skip("as null there")
    response = Service().send(path, tools=TOOLS[path], tool_choice=choice)
    assert response.status_code == 400, response.text
    assert "tool_choice" in response.text


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        ("/v1/messages", {"parallel_tool_calls": False}),
        ("/v1/messages", {"parallel_tool_calls": False, "tool_choice": "auto"}),
    ],
)
def test_one_call_in_others_words(path: str, fields: dict[str, Any]) -> None:
    response = Service(Script([CALL, CALL])).send(path, tools=TOOLS[path], **fields)
    assert response.text.count('"look"') == 1


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA},
        {"name": "look", "description": "Looks.", "parameters": SCHEMA},
        {"name": "look", "description": "Looks.", "input_schema": SCHEMA},
    ],
)
def test_tools_of_other_dialects_on_chat(tool: dict[str, Any]) -> None:
    service = Service()
    assert service.send("/v1/chat/completions", tools=[tool]).status_code == 200
    assert "Looks." in service.backend.prompts[0]
    assert "city" in service.backend.prompts[0]


# Custom tools on chat completions.

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x+/"}}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": GRAMMAR}}
PATCHED = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n+x"}}</tool_call>'
BOTH = [PATCH, *TOOLS["/v1/chat/completions"]]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize("size", [3, 1000])
def test_a_custom_tools_call_on_chat(size: int) -> None:
    pieces = [(PATCHED + CALL)[at : at + size] for at in range(0, len(PATCHED + CALL), size)]
    service = Service(Script(pieces), Script(pieces))
    response = service.send("/v1/chat/completions", tools=BOTH)
    assert response.headers[IGNORED_HEADER] == "tools.custom.format"
    made = openai.types.chat.ChatCompletion.model_validate(response.json()).choices[0]
    patch, look = made.message.tool_calls or []
    assert (patch.type, look.type, made.finish_reason) == ("custom", "function", "tool_calls")
    assert (patch.custom.name, patch.custom.input) == ("patch", "*** Begin\n+x")  # type: ignore[union-attr]
    assert "must follow this lark grammar:" in service.backend.prompts[0]
    streamed = chunks(service.send("/v1/chat/completions", tools=BOTH, stream=True))
    calls = [call for choice in streamed for call in choice["delta"].get("tool_calls", ())]
    first = [call for call in calls if call["index"] == 0]
    assert (first[0]["type"], first[0]["custom"]["name"]) == ("custom", "patch")
    assert "".join(call["custom"]["input"] for call in first) == "*** Begin\n+x"
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 1) == "{}"


def test_a_custom_tools_call_that_was_cut_on_chat() -> None:
    service = Service(Script([PATCHED[:60]], FinishReason.LENGTH))
    (choice,) = service.send("/v1/chat/completions", tools=BOTH).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": "*** Beg"}


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "custom", "name": "patch"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PATCH]}},
    ],
)
def test_custom_tools_are_chosen_and_remembered(choice: Any) -> None:
    service = Service()
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}
    past = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    assert service.send("/v1/chat/completions", tools=BOTH, tool_choice=choice, messages=past).status_code == 200
    constraint = service.backend.requests[0].params.constraint
    assert constraint is not None
    assert [name for name in ("patch", *NAMES) if name in constraint.text] == ["patch"]
    assert '{"name": "patch", "arguments": {"input": "*** x"}}' in service.backend.prompts[0]


# What an answer must look like.

JSON, REGEX, GBNF = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"regex": "a+"}, REGEX, "a+"),
        ({"ebnf": 'root ::= "a"'}, GBNF, 'root ::= "a"'),
        ({"response_format": {"type": "regex", "value": "a+"}}, REGEX, "a+"),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, REGEX, "a+"),
        ({"response_format": {"type": "json", "value": SCHEMA}}, JSON, json.dumps(SCHEMA)),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, GBNF, 'root ::= "a"'),
        ({"grammar": {"type": "regex", "value": "a+"}}, REGEX, "a+"),
        ({"grammar": {"type": "json", "value": SCHEMA}}, JSON, json.dumps(SCHEMA)),
    ],
)
def test_constraints_of_other_programs(path: str, fields: dict[str, Any], kind: ConstraintKind, text: str) -> None:
    service = Service()
    response = service.send(path, **fields)
    assert response.status_code == 200, response.text
    constraint = service.backend.requests[0].params.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (kind, text)


@pytest.mark.parametrize("kind", ["regex", "grammar", "json"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_constraint_that_says_nothing_is_refused(path: str, kind: str) -> None:
    assert Service().send(path, response_format={"type": kind}).status_code == 400


DEFAULT = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


@pytest.mark.parametrize(
    ("samplers", "status"),
    [
        (DEFAULT, 200),
        ("edskypmxt", 200),
        (";".join(DEFAULT), 200),
        (["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], 200),
        (["top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"], 200),
        ([], 200),
        (None, 200),
        (DEFAULT[::-1], 400),
        (["temperature", "top_k", "top_p", "min_p"], 400),
        (["top_k"], 400),
        (["top_k", "top_p", "min_p", "temperature", "odd"], 400),
        ("kpt", 400),
        (5, 400),
    ],
)
def test_samplers_in_their_default_order(samplers: Any, status: int) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = Service().send(path, samplers=samplers)
        assert response.status_code == status, response.text
        assert IGNORED_HEADER not in response.headers


def test_names_of_samplings() -> None:
    service = Service()
    assert service.send("/v1/chat/completions", min_new_tokens=3, typ_p=1).status_code == 200
    assert service.backend.requests[0].params.min_tokens == 3
    refused = Service().send("/v1/chat/completions", typ_p=0.5)
    assert (refused.status_code, "typical_p" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((path, field) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
          for field in ("prompt_embeds", "input_ids", "instruction", "inputs_embeds", "prompt_token_ids", "images")),
        *((path, field) for path in ("/v1/chat/completions", "/v1/completions") for field in ("system", "inputs")),
        *(("/v1/embeddings", field) for field in ("prompt_name", "input_type", "task")),
        ("/v1/chat/completions", "prompt"),
        ("/tokenize", "instruction"),
    ],
)  # fmt: skip
def test_other_prompts_are_refused_not_ignored(path: str, field: str) -> None:
    refused = Service().send(path, **{field: "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
    for neutral in (None, "", []):
        assert Service().send(path, **{field: neutral}).status_code != 400 or path == "/v1/embeddings"


# Paths.


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/embeddings", "/v1/embeddings"),
        ("/responses", "/v1/responses"),
        ("/models", "/v1/models"),
        ("/models/demo", "/v1/models/demo"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/chat", "/api/chat"),
        ("/generate", "/api/generate"),
        ("/v1/api/tags", "/api/tags"),
        ("/nothing/of/the/kind", None),
    ],
)
def test_the_route_that_was_meant(path: str, meant: str | None) -> None:
    """In the shape of its dialect, whose client it is."""
    response = Service().send(path)
    body = response.json()
    assert response.status_code == 404
    if meant is not None and meant.startswith("/api/"):
        message = body["error"]
    elif meant is not None and meant.startswith("/v1/messages"):
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        message = body["error"]["message"]
    else:
        assert body["error"]["type"] == "invalid_request_error"
        message = body["error"]["message"]
    assert (f"did you mean {meant}?" in message) == (meant is not None)
    assert (path in message) == (meant is not None)
