"""/v1/responses: what the model is shown of items, what becomes of its answers, and what is kept; scripted answers."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from ktransformers.cli.serve.command import server_parser
from ktransformers.cli.serve.serving import server_config
from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason
from ktransformers.errors import ConfigError, EngineError
from ktransformers.server.api.openai.responses.fields import TABLE
from ktransformers.server.api.openai.responses.read import begin_exchange
from ktransformers.server.api.openai.responses.schemas import ResponsesBody
from ktransformers.server.api.openai.responses.store import ResponseStore
from ktransformers.server.app import create_app
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import sort_fields
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.scripted_backend import Script, ScriptedBackend

URL = "/v1/responses"
IGNORED = "x-ktransformers-ignored"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [TOOL | {"name": "spawn"}]}

# What Codex 0.169 sends, its texts and most of its tools left out.
CODEX = {
    "model": "gpt-5-codex",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandbox."}],
        },
        {
            "type": "message",
            "id": "msg_2",
            "role": "user",
            "content": [{"type": "input_text", "text": "<cwd>/x</cwd>"}],
        },
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Say hello"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": {}},
        PATCH,
        AGENTS,
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a201ac-fe75-7d70-b2f1-150ece747888",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Service:
    """The app over scripted answers; `ask` is one request."""

    def __init__(self, *scripts: Script | str, config: Callable[..., ServerConfig] = ServerConfig, **settings: Any):
        made = [Script([one]) if isinstance(one, str) else one for one in scripts]
        self.backend = ScriptedBackend(*made)
        self._app = create_app(self.backend, config(model_names=("demo",), **settings))

    def ask(self, body: Any = None, *, method: str = "POST", path: str = URL, key: str = "") -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(main())

    def answer(self, body: Any, key: str = "") -> dict[str, Any]:
        """A response that the official client's model takes."""
        response = self.ask(body, key=key)
        assert response.status_code == 200, response.text
        Response.model_validate(response.json())
        return dict(response.json())

    def events(self, body: Any) -> list[dict[str, Any]]:
        """The events of a stream, each of which the official client's models take."""
        response = self.ask(body | {"stream": True})
        assert response.status_code == 200, response.text
        made = []
        for block in response.text.strip().split("\n\n"):
            name, data = block.split("\n")
            made.append(json.loads(data.removeprefix("data: ")))
            EVENT.validate_python(made[-1])
            assert name == f"event: {made[-1]['type']}"
        assert [event["sequence_number"] for event in made] == list(range(len(made)))
        return made

    def refusal(self, body: Any, status: int = 400) -> str:
        response = self.ask(body)
        assert response.status_code == status, response.text
        return str(response.json()["error"]["message"])


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name not in ("id", "call_id", "item_id")}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


ANSWER = "<think>hm, so</think>\nBoth: " + call("add", a=1) + "\n" + call("add", a=2)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_a_stream_tells_what_the_body_says(size: int, summary: str | None) -> None:
    pieces = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    body = {"input": "Add.", "tools": [TOOL], "reasoning": {"summary": summary}}
    service = Service(Script(pieces), Script(pieces))
    whole, events = service.answer(body), service.events(body)
    thought = {"type": "summary_text" if summary else "reasoning_text", "text": "hm, so"}
    reasoning = {"type": "reasoning", "status": "completed", "summary": [thought] if summary else []}
    text = {"type": "output_text", "text": "Both: ", "annotations": [], "logprobs": []}
    called = {"type": "function_call", "status": "completed", "name": "add"}
    assert without_ids(whole["output"]) == [
        reasoning if summary else reasoning | {"content": [thought]},
        {"type": "message", "status": "completed", "role": "assistant", "content": [text]},
        called | {"arguments": '{"a": 1}'},
        called | {"arguments": '{"a": 2}'},
    ]
    final = events[-1]["response"]
    assert (events[-1]["type"], final["status"]) == ("response.completed", "completed")
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"]["output_tokens"] == len(pieces) + 1
    assert 0 < final["usage"]["output_tokens_details"]["reasoning_tokens"] <= len(pieces)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for index, item in enumerate(final["output"]):
        of_item = [event for event in events if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[-1] == {
            "type": "response.output_item.done",
            "output_index": index,
            "item": item,
            "sequence_number": of_item[-1]["sequence_number"],
        }
        assert all(event["item_id"] == item["id"] for event in of_item[1:-1])
        told = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert told == (item.get("arguments") or ("hm, so" if index == 0 else "Both: "))
    order = [event["output_index"] for event in events if "output_index" in event]
    assert order == sorted(order)


def test_what_codex_sends() -> None:
    said = ["<think>I ", "edit</think>", call("apply_patch", input="*** Begin"), call("agents__spawn", a=1)]
    service = Service(Script(said), "Done.")
    response = service.ask(CODEX)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert set(response.headers[IGNORED].split(", ")) == {
        "tools.web_search", "tools.local_shell", "tools.custom.format", "reasoning.effort"
    }  # fmt: skip
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
    for event in events:
        EVENT.validate_python(event)
    prompt = service.backend.prompts[0]
    assert "<|im_start|>system\nYou are a coding agent.\n\nSandbox.<|im_end|>" in prompt
    assert prompt.count("<|im_start|>user\n") == 2
    for name in ("exec_command", "apply_patch", "agents__spawn", "start: /.+/"):
        assert name in prompt
    assert "web_search" not in prompt
    output = events[-1]["response"]["output"]
    assert [(item["type"], item.get("name"), item.get("namespace")) for item in output] == [
        ("reasoning", None, None), ("custom_tool_call", "apply_patch", None), ("function_call", "spawn", "agents")
    ]  # fmt: skip
    assert output[1]["input"] == "*** Begin"
    assert "".join(event["delta"] for event in events if event["type"].endswith("custom_tool_call_input.delta")) == (
        "*** Begin"
    )
    # The next turn brings everything back; of the reasoning what nobody but this server reads.
    sealed = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": output[0]["encrypted_content"]}
    outputs = [
        {"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": "patched"},
        {"type": "function_call_output", "call_id": output[2]["call_id"], "output": [
            {"type": "input_text", "text": "spawned"}]},
    ]  # fmt: skip
    service.answer(CODEX | {"stream": False, "input": [*CODEX["input"], sealed, *output[1:], *outputs]})
    ids = [item["call_id"] for item in output[1:]]
    assert service.backend.prompts[1].endswith(
        '<|im_start|>assistant [I edit]\n<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin"}}'
        '</tool_call><tool_call>{"name": "agents__spawn", "arguments": {"a": 1}}</tool_call><|im_end|>'
        f"<|im_start|>tool name=apply_patch of={ids[0]}\npatched<|im_end|>"
        f"<|im_start|>tool name=agents__spawn of={ids[1]}\nspawned<|im_end|><|im_start|>assistant\n"
    )


StrictConfig = functools.partial(ServerConfig, is_strict_on_fields=True)


def test_what_answers_must_look_like() -> None:
    schema = {"type": "object"}
    named = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    deeper = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    bodies: list[tuple[dict[str, Any], tuple[str, str], dict[str, Any]]] = [
        ({"text": {"format": named}}, ("json", '{"type": "object"}'), named),
        ({"response_format": deeper, "text": {"verbosity": "low"}}, ("json", '{"type": "object"}'), named),
        ({"text": {"format": {"type": "json_object"}}}, ("json_object", ""), {"type": "json_object"}),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+"), {"type": "text"}),
        ({"guided_choice": ["a"]}, ("choice", '["a"]'), {"type": "text"}),
    ]
    for fields, wanted, shown in bodies:
        body = ResponsesBody.model_validate(sort_fields({"input": "Hi"} | fields, TABLE).honoured)
        assert body.text_format == shown
        made = begin_exchange(body, ResponseStore(0), "", lambda names: None, str.isalpha).read().constraint
        assert made is not None
        assert (made.kind.value, made.text) == wanted


def test_unknown_fields(caplog: pytest.LogCaptureFixture) -> None:
    service, body = Service("Hello.", "Hello.", "Hello."), {"input": "Hi", "wobble": 2, "x\r\ny": 1, "z": None}
    assert [service.ask(body).headers[IGNORED] for _ in range(2)] == ["wobble, ?"] * 2
    assert sum("wobble" in record.getMessage() for record in caplog.records) == 1
    known = {"input": "Hi", "top_k": 3, "max_tool_calls": 1}
    assert IGNORED not in service.ask(known).headers
    strict = Service("Hello.", config=StrictConfig)
    assert "'wobble' has no effect here" in strict.refusal(body)
    assert "'tools.web_search'" in strict.refusal({"input": "Hi", "tools": [{"type": "web_search"}]})
    strict.answer(known)


def test_previous_response_id() -> None:
    service = Service("One.", "Two.", "Three.", "Four.")
    first = service.answer({"input": "First", "instructions": "Be brief."})
    second = service.answer({"input": "Second", "previous_response_id": first["id"]})
    assert (first["store"], second["previous_response_id"]) == (True, first["id"])
    start, of_us = "<|im_start|>", "<|im_start|>assistant\n"
    conversation = f"{start}user\nFirst<|im_end|>{of_us}One.<|im_end|>{start}user\nSecond<|im_end|>{of_us}"
    assert service.backend.prompts[1] == conversation  # instructions are of one request
    path = f"{URL}/{second['id']}"
    assert service.ask(method="GET", path=path).json() == second
    listed = service.ask(method="GET", path=f"{path}/input_items?order=asc&limit=2").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["First", "One."]
    assert listed["has_more"]
    for item in listed["data"]:
        ITEM.validate_python(item)
    rest = service.ask(method="GET", path=f"{path}/input_items?order=asc&after={listed['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["Second"]
    assert not rest["has_more"]
    # What followed it still knows what a deleted one said.
    assert service.ask(method="DELETE", path=f"{URL}/{first['id']}").json()["deleted"] is True
    assert service.ask(method="GET", path=f"{URL}/{first['id']}").status_code == 404
    service.answer({"input": "Third", "previous_response_id": second["id"], "store": False})
    assert service.backend.prompts[2].startswith(conversation + "Two.<|im_end|>")
    # An item by its id.
    service.answer({"input": [{"type": "item_reference", "id": second["output"][0]["id"]}, {"id": rest["first_id"]}]})
    assert service.backend.prompts[3] == f"{of_us}Two.<|im_end|>{start}user\nSecond<|im_end|>{of_us}"


def test_what_is_not_kept_and_for_whom() -> None:
    service = Service("One.", "Two.", "Three.", api_keys=("a", "b"))
    unkept = service.answer({"input": "Hi", "store": False}, key="a")
    kept = service.answer({"input": "Hi"}, key="a")
    assert (unkept["store"], kept["store"]) == (False, True)
    for id, key, status in ((unkept["id"], "a", 404), (kept["id"], "b", 404), (kept["id"], "a", 200)):
        assert service.ask(method="GET", path=f"{URL}/{id}", key=key).status_code == status
        if status == 404:
            for method, path in (("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                assert service.ask(method=method, path=f"{URL}/{id}{path}", key=key).status_code == 404
            follow = service.ask({"input": "x", "previous_response_id": id}, key=key)
            assert (follow.status_code, follow.json()["error"]["code"]) == (404, "not_found")
    refused = service.ask({"input": [{"id": kept["output"][0]["id"]}]}, key="b")
    assert refused.status_code == 404
    cancelled = service.ask(method="POST", path=f"{URL}/{kept['id']}/cancel", key="a")
    assert "background" in cancelled.json()["error"]["message"]
    assert service.ask(method="GET", path=f"{URL}/{kept['id']}?stream=true", key="a").status_code == 400
    assert not Service("One.", responses_store=0).answer({"input": "Hi"})["store"]


def test_the_flag_for_what_is_kept() -> None:
    def config(*flags: str) -> ServerConfig:
        args = server_parser().parse_args(["--gguf_path", str(DEMO_GGUF), *flags])
        return server_config(args, EngineConfig(gguf_path=DEMO_GGUF))

    kept = [config(*flags).responses_store for flags in ((), ("--responses_store", "2"), ("--responses_store", "0"))]
    assert kept == [64 << 20, 2 << 20, 0]
    with pytest.raises(ConfigError, match="--responses_store must be between 0 and 1073741823, got -1"):
        config("--responses_store", "-1")


def test_answers_that_end_early() -> None:
    cut = Script(["Hel", "lo"], FinishReason.LENGTH)
    service = Service(cut, cut, Script(["Hel"], error=EngineError("it broke")), Script([""], FinishReason.ABORT))
    body = {"input": "Hi", "max_output_tokens": 2}
    whole, events = service.answer(body), service.events(body)
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    assert service.backend.requests[0].params.max_tokens == 2
    broken = service.events({"input": "Hi"})
    assert [event["type"] for event in broken[-2:]] == ["error", "response.failed"]
    assert broken[-2]["message"] == broken[-1]["response"]["error"]["message"] == "it broke"
    assert service.events({"input": "Hi"})[-1]["type"] == "response.failed"
    assert service.ask(method="GET", path=f"{URL}/{broken[-1]['response']['id']}").status_code == 404


def test_blank_text_and_no_text() -> None:
    service = Service(Script(["\n\n", call("add", a=1), "\n"]), Script(["\n", " Hi"]), Script([]), Script(["  "]))
    assert [item["type"] for item in service.answer({"input": "x", "tools": [TOOL]})["output"]] == ["function_call"]
    texts = [service.answer({"input": "x"})["output"][0]["content"][0]["text"] for _ in range(3)]
    assert texts == ["\n Hi", "", "  "]


def test_one_call_and_allowed_tools() -> None:
    other = TOOL | {"name": "sub"}
    service = Service(Script([call("add", a=1), call("add", a=2)]), "No.", "No.")
    one = service.answer({"input": "x", "tools": [TOOL], "parallel_tool_calls": False})
    assert [item["arguments"] for item in one["output"]] == ['{"a": 1}']
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}
    service.answer({"input": "x", "tools": [TOOL, other], "tool_choice": allowed})
    service.answer({"input": "x", "tools": [TOOL, other], "tool_choice": "none"})
    shown = [[name for name in ("add", "sub") if f'"{name}"' in prompt] for prompt in service.backend.prompts]
    assert shown == [["add"], ["sub"], []]
    assert [request.params.constraint for request in service.backend.requests] == [None] * 3


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["add", "agents__spawn"]),
        ({"type": "function", "name": "add"}, ["add"]),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, ["agents__spawn"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, ["add"]),
    ],
)
def test_calls_that_must_be_made(choice: Any, names: list[str]) -> None:
    service = Service(call("add", a=1))
    made = service.answer({"input": "x", "tools": [TOOL, AGENTS], "tool_choice": choice})
    assert [item["type"] for item in made["output"]] == ["function_call"]
    assert made["tool_choice"] == choice
    (request,) = service.backend.requests
    assert request.params.constraint is not None
    assert re.findall(r'"name\\": \\"(\w+)', request.params.constraint.text) == names


def test_logprobs() -> None:
    service = Service(Script(["<think>a</think>", "Hi", " you"]), Script(["Hi", " you"]))
    body = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (part,) = service.answer(body)["output"][1]["content"]
    assert [(one["logprob"], len(one["top_logprobs"])) for one in part["logprobs"]] == [(-0.5, 1), (-0.5, 1)]
    deltas = [event for event in service.events(body) if event["type"] == "response.output_text.delta"]
    assert [len(event["logprobs"]) for event in deltas] == [1, 1]


@pytest.fixture(scope="module")
def silent() -> Service:
    return Service()


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input: there is nothing to answer"),
        ({"input": 3}, "input"),
        ({"input": []}, "input: there is nothing"),
        ({"input": "x", "background": True}, "background: this server does not support it; use a stream"),
        ({"input": "x", "conversation": "conv_1"}, "use previous_response_id"),
        ({"input": "x", "prompt": {"id": "p"}}, "instructions and input"),
        ({"input": "x", "n": 2}, "n: "),
        ({"input": "x", "max_tokens": 3, "max_output_tokens": 4}, "says something else than max_tokens does"),
        ({"input": "x", "mirostat": 2}, "mirostat: this server does not support it; use temperature"),
        ({"input": "x", "logit_bias": {"1": 1}}, "use /v1/chat/completions"),
        ({"input": "x", "format": "json"}, "format: this server does not support it; use text.format"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "json_schema": 3}}}, "json_schema: it must be"),
        ({"input": "x", "guided_regex": "a", "response_format": {"type": "json_object"}}, "text.format and guided"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "there is no tool 'sub'"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "all"}}, "'allowed_tools'"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice: 'web_search'"),
        ({"input": "x", "tools": [TOOL, TOOL]}, "tools[1]: there are two tools of the name 'add'"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name: "),
        ({"input": "x", "tools": [{}]}, "tools[0].type"),
        ({"input": "x", "tools": [AGENTS | {"tools": [AGENTS]}]}, "tools[0].tools[0]: a namespace"),
        (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[0].content[0].image_url"),
        (item(role="user", content=[{"type": "input_file"}]), "input[0].content[0]: files"),
        (item(role="user", content=[{"type": "hologram"}]), "'hologram'"),
        (item(role="user", content=[{"type": ["x"]}]), "input[0].content[0]: a part of type"),
        (item(type=["x"], role="user"), "input[0].type must be a string"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [3]}}, "tool_choice.tools"),
        (item(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text must be a string"),
        (item(role="user", content=3), "input[0].content: "),
        (item(type="compaction", encrypted_content="x"), "input[0]: "),
        (item(content="x"), "input[0].type must be a string"),
        (item(type="item_reference", id=3), "input[0].id"),
        ({"input": "x", "temperature": "hot"}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(silent: Service, body: dict[str, Any], words: str) -> None:
    assert words in silent.refusal(body)


def test_what_clients_send_by_habit() -> None:
    service = Service(*["Hello."] * 3)
    nulls = dict.fromkeys(("background", "conversation", "prompt", "tools", "text", "reasoning", "include", "nobody"))
    quiet = {
        "background": False, "store": True, "metadata": {"run": 3}, "service_tier": "flex", "truncation": "disabled",
        "stream_options": {"include_obfuscation": False}, "user": "me", "safety_identifier": "s", "max_tokens": 7,
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "top_p": 1.0, "stop": "", "n": 1,
        "tool_choice": "auto",
        "include": ["web_search_call.action.sources"], "prompt_cache_retention": "24h", "parallel_tool_calls": True,
    }  # fmt: skip
    for body in (nulls, quiet):
        response = service.ask({"input": "Hi"} | body)
        assert (response.status_code, response.headers.get(IGNORED)) == (200, None), response.text
    assert response.json()["metadata"] == {"run": "3"}
    assert service.backend.requests[1].params.max_tokens == 7
    history: Sequence[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "status": None},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "final_answer"},
        {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c1", "output": "a b"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a', "status": "incomplete"},
        {"type": "custom_tool_call", "call_id": "c3", "name": "f", "input": '{"a', "status": "incomplete"},
        {"role": "user", "content": "Go on"},
    ]  # fmt: skip
    response = service.ask({"input": history})
    assert response.headers[IGNORED] == (
        "input.web_search_call, input.reasoning.encrypted_content, input.function_call, input.custom_tool_call"
    )
    assert service.backend.prompts[2] == (
        "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nHi<|im_end|><|im_start|>assistant [hm]\nNo."
        '<tool_call>{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}</tool_call><|im_end|>'
        "<|im_start|>tool name=local_shell of=c1\na b<|im_end|><|im_start|>user\nGo on<|im_end|><|im_start|>assistant\n"
    )


def test_the_official_client_makes_a_tool_call(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = TOOL | {"name": "get_weather", "description": "Get the weather in a city", "parameters": parameters}
    fields: dict[str, Any] = {"model": "demo", "temperature": 0, "tools": [tool]}
    with client.responses.stream(input="What is the weather in Paris?", **fields) as stream:
        for _ in stream:
            pass
        made = stream.get_final_response()
    (called,) = made.output
    assert called.type == "function_call"
    assert json.loads(called.arguments) == {"city": "Paris"}
    output = {"type": "function_call_output", "call_id": called.call_id, "output": "sunny, 21 degrees"}
    follow = client.responses.create(previous_response_id=made.id, input=[output], **fields)
    history: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}, called.to_dict(), output]
    again = client.responses.create(input=history, store=False, **fields)
    assert follow.output_text == again.output_text != ""
    assert follow.usage is not None
    assert follow.usage.input_tokens == again.usage.input_tokens  # type: ignore[union-attr]
    assert client.responses.retrieve(follow.id).output_text == follow.output_text
    assert [one.type for one in client.responses.input_items.list(follow.id, order="asc")] == [
        "message", "function_call", "function_call_output"
    ]  # fmt: skip
    client.responses.delete(follow.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(follow.id)


def test_benchmarks_may_ask_for_answers_without_an_end() -> None:
    service = Service("So.", "So.", "So.")
    for asked, wanted in (({"ignore_eos": True}, True), ({"ignore_eos": False}, False), ({}, False)):
        response = service.ask({"input": "Hi", **asked})
        assert response.status_code == 200
        assert "x-ktransformers-ignored" not in response.headers
        assert service.backend.requests[-1].params.ignore_eos is wanted
