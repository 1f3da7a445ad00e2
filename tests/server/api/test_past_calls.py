"""Histories with calls that are wrong and results that are no text: no turn is refused for them, in any dialect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from ktransformers.server.app import create_app
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import IGNORED_HEADER
from tests.support.checks.tool_answers import FORMAT_OF, render
from tests.support.servers.scripted_backend import Script, ScriptedBackend

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
DEEP = '{"a": ' * 200 + "1" + "}" * 200

ARGUMENTS: list[tuple[Any, dict[str, Any], bool]] = [
    # as sent, as the model is told, whether the header names it
    ('{"city": "Oslo"}', {"city": "Oslo"}, False),
    ("{}", {}, False),
    (None, {}, False),
    ("", {}, False),
    (" \n", {}, False),
    ("null", {}, True),
    ('{"city": "O', {"invalid_arguments": '{"city": "O'}, True),
    ("{", {"invalid_arguments": "{"}, True),
    ("[]", {"invalid_arguments": "[]"}, True),
    ('"x"', {"invalid_arguments": '"x"'}, True),
    ("17", {"invalid_arguments": "17"}, True),
    ("true", {"invalid_arguments": "true"}, True),
    ("Oslo, please", {"invalid_arguments": "Oslo, please"}, True),
    ("{'city': 'Oslo'}", {"invalid_arguments": "{'city': 'Oslo'}"}, True),
    ('{"city": "Oslo"}{"city": "Rome"}', {"invalid_arguments": '{"city": "Oslo"}{"city": "Rome"}'}, True),
    (DEEP, {"invalid_arguments": DEEP}, True),
    (json.dumps('{"city": "Oslo"}'), {"city": "Oslo"}, True),
    ([], {"invalid_arguments": "[]"}, True),
    ([1, "é"], {"invalid_arguments": '[1, "é"]'}, True),
    (17, {"invalid_arguments": "17"}, True),
    (False, {"invalid_arguments": "false"}, True),
    ({"city": "Oslo"}, {"city": "Oslo"}, False),
    # Half of a character, as models write it where they break off inside of an emoji.
    ('{"city": "a\\ud83d"}', {"city": "a\ufffd"}, True),
    ({"city": ["\udc00", "\ud83d\ude00"]}, {"city": ["\ufffd", "😀"]}, True),
    ('{"city": "\\ud83d', {"invalid_arguments": '{"city": "\\ud83d'}, True),
]


def chat(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "error"}
    return "/v1/chat/completions", {"messages": [*messages, result, USER]}, "messages.tool_calls.function.arguments"


def functions(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": arguments}}
    result = {"role": "function", "name": "look", "content": "error"}
    return "/v1/chat/completions", {"messages": [USER, call, result]}, "messages.function_call.arguments"


def responses(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments, "status": "incomplete"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "error"}
    return "/v1/responses", {"input": [USER, call, result, USER]}, "input.function_call.arguments"


def claude(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "error", "is_error": True}
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return "/v1/messages", {"max_tokens": 5, "messages": messages}, "messages.tool_use.input"


def ollama(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    result = {"role": "tool", "tool_name": "look", "content": "error"}
    field = "messages.tool_calls.function.arguments"
    return "/api/chat", {"model": "demo", "messages": [USER, call, result], "stream": False}, field


DIALECTS = [chat, functions, responses, claude, ollama]


def ask(path: str, body: dict[str, Any], **settings: Any) -> tuple[httpx.Response, str]:
    """The response, and the prompt that the model got."""
    backend = ScriptedBackend(Script(["Hello"]))
    app = create_app(backend, ServerConfig(model_names=("demo",), **settings))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})

    response = asyncio.run(main())
    assert response.status_code == 200, response.text
    return response, backend.prompts[0] if backend.requests else ""


@pytest.mark.every(5)
@pytest.mark.parametrize(("sent", "told", "is_named"), ARGUMENTS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_arguments_of_any_kind_are_taken(dialect: Any, sent: Any, told: dict[str, Any], is_named: bool) -> None:
    path, body, field = dialect(sent)
    response, prompt = ask(path, body)
    call = prompt.partition("<tool_call>")[2].partition("</tool_call>")[0]
    assert json.loads(call) == {"name": "look", "arguments": told}
    assert response.headers.get(IGNORED_HEADER) == (field if is_named else None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_strict_requests_take_them_too(dialect: Any) -> None:
    path, body, field = dialect('{"city": "O')
    response, _ = ask(path, body, is_strict_on_fields=True)
    assert response.headers[IGNORED_HEADER] == field


@pytest.mark.parametrize("dialect", [chat, claude])
def test_counting_takes_them_too(dialect: Any) -> None:
    _, body, field = dialect('{"city": "O')
    path = "/tokenize" if dialect is chat else "/v1/messages/count_tokens"
    response, _ = ask(path, {name: one for name, one in body.items() if name != "max_tokens"})
    assert response.headers[IGNORED_HEADER] == field


@pytest.mark.parametrize("name", FORMAT_OF)
def test_every_family_template_writes_them(name: str) -> None:
    text = render(name, [("look", {"invalid_arguments": '{"city": "O'})])
    assert "invalid_arguments" in text
    assert "city" in text


def called(**call: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}, USER]}


LOOK = {"name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            ("/v1/chat/completions", body)
            for body in (
                called(function=LOOK),
                called(id=None, type=None, function=LOOK),
                called(id="", function=LOOK),
                called(id=7, function=LOOK),
                called(id="a", type="function", function={"name": "", "arguments": "{}"}),
                called(id="a", type="function", function={"name": None}),
                called(id="a", type="function", function={"arguments": "{}"}),
                called(id="a", type="function", function={"name": "look"}),
                called(id="a", type="function"),
                called(id="a", type="odd", function=LOOK),
                called(id="a", type="custom", custom={"name": "patch", "input": "x"}),
                called(id="a", type="custom", custom={"name": "patch", "input": {"x": 1}}),
            )
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": LOOK}, {"id": "a", "function": LOOK}]},
                    {"role": "tool", "tool_call_id": "a", "content": "1"},
                    {"role": "tool", "tool_call_id": "nobody", "content": "2"},
                ]
            },
        ),
        *(
            ("/v1/responses", {"input": [USER, item, {"type": "function_call_output", "call_id": "z", "output": "x"}]})
            for item in (
                {"type": "function_call", "name": "look", "arguments": "{}"},
                {"type": "function_call", "id": "fc", "name": "look", "arguments": "{}"},
                {"type": "function_call", "call_id": "a", "arguments": "{}"},
                {"type": "function_call", "call_id": "a", "name": ""},
                {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{", "status": "incomplete"},
                {"type": "custom_tool_call", "call_id": "a", "name": "patch"},
                {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": ["x"]},
            )
        ),
        *(
            (
                "/v1/messages",
                {
                    "max_tokens": 5,
                    "messages": [
                        USER,
                        {"role": "assistant", "content": [{"type": "tool_use"} | call]},
                        {"role": "user", "content": [{"type": "tool_result"} | result]},
                    ],
                },
            )
            for call, result in (
                ({"id": "a", "name": "look"}, {"tool_use_id": "b", "content": "x"}),
                ({"name": "look", "input": {}}, {"content": "x"}),
                ({"id": "", "name": "", "input": None}, {"tool_use_id": "", "content": None}),
                ({"id": "a", "input": "x"}, {"tool_use_id": "a"}),
            )
        ),
        *(
            (
                "/api/chat",
                {"model": "demo", "stream": False, "messages": [
                    USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}
                ]},
            )
            for call in (
                {"function": {"name": "look"}},
                {"function": {"name": "", "arguments": {}}},
                {"function": {"arguments": {}}},
                {"id": 3, "function": {"name": "look", "arguments": None}},
                {},
            )
        ),
    ],
)  # fmt: skip
def test_calls_and_results_that_lack_something_are_taken(path: str, body: dict[str, Any]) -> None:
    _, prompt = ask(path, body)
    assert prompt.endswith("<|im_start|>assistant\n")


IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PICTURE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF: dict[str, Any] = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
}


def of_chat(content: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [USER, {"role": "tool", "tool_call_id": "a", "content": content}]}


def of_responses(output: Any, kind: str = "function_call_output") -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": [USER, {"type": kind, "call_id": "a", "output": output}]}


def of_claude(content: Any) -> tuple[str, dict[str, Any]]:
    block = {"type": "tool_result", "tool_use_id": "a", "content": content}
    return "/v1/messages", {"max_tokens": 5, "messages": [USER, {"role": "user", "content": [block]}]}


def of_ollama(**message: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"model": "demo", "stream": False, "messages": [USER, {"role": "tool"} | message]}


@pytest.mark.parametrize(
    ("asked", "told", "named"),
    [
        (of_chat([{"type": "text", "text": "a"}, IMAGE]), "a\n[picture left out: ", "messages.content.image_url"),
        (of_chat([{"type": "file", "file": {}}]), "[file left out: ", "messages.content.file"),
        (of_chat([{"type": "resource", "resource": {}}]), "[resource left out: ", "messages.content.resource"),
        (of_chat({"degrees": 3}), '{"degrees": 3}', "messages.content"),
        (of_chat(["a", "b"]), '["a", "b"]', "messages.content"),
        (of_chat(3), "3", "messages.content"),
        (of_responses([{"type": "input_image", "image_url": "x"}]), "[picture left out: ",
         "input.function_call_output.output.input_image"),
        (of_responses([{"type": "input_file", "file_data": "x"}], "custom_tool_call_output"), "[file left out: ",
         "input.custom_tool_call_output.output.input_file"),
        (of_responses({"degrees": 3}), '{"degrees": 3}', "input.function_call_output.output"),
        (of_claude([{"type": "text", "text": "a"}, PICTURE]), "a\n[picture left out: ", "messages.tool_result.image"),
        (of_claude([PDF]), "[document left out: ", "messages.tool_result.document"),
        (of_claude([{"type": "audio"}]), "[audio left out: ", "messages.tool_result.audio"),
        (of_ollama(content="a", images=["AAAA"]), "[picture left out: only text can be read here]\na",
         "messages.images"),
        (of_ollama(content={"degrees": 3}), '{"degrees": 3}', "messages.content"),
    ],
)  # fmt: skip
def test_what_is_no_text_in_a_result_is_named_in_its_place(
    asked: tuple[str, dict[str, Any]], told: str, named: str
) -> None:
    response, prompt = ask(*asked)
    assert f"\n{told}" in prompt.rpartition("<|im_start|>tool")[2]
    assert response.headers[IGNORED_HEADER] == named


USE = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "x"}]}


@pytest.mark.parametrize(
    ("role", "blocks", "named", "told"),
    [
        ("assistant", [USE, FOUND], "messages.server_tool_use, messages.web_search_tool_result", ""),
        ("assistant", [{"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}},
                       {"type": "mcp_tool_result", "tool_use_id": "m", "content": []}],
         "messages.mcp_tool_use, messages.mcp_tool_result", ""),
        ("assistant", [{"type": "bash_code_execution_tool_result", "tool_use_id": "s"}],
         "messages.bash_code_execution_tool_result", ""),
        ("user", [{"type": "container_upload", "file_id": "f"}], "messages.container_upload", ""),
        ("assistant", [{"type": "compaction", "content": "They spoke of Oslo.", "signature": "x"}], None,
         "They spoke of Oslo."),
        ("user", [{"type": "compaction", "content": "They spoke of Oslo."}], None, "They spoke of Oslo."),
        ("assistant", [{"type": "compaction", "content": None}], "messages.compaction", ""),
    ],
)  # fmt: skip
def test_what_ran_on_anthropics_servers_is_left_out(role: str, blocks: list[Any], named: str | None, told: str) -> None:
    messages = [USER, {"role": role, "content": [{"type": "text", "text": "So. "}, *blocks]}, USER]
    response, prompt = ask("/v1/messages", {"max_tokens": 5, "messages": messages})
    assert response.headers.get(IGNORED_HEADER) == named
    assert "So. " in prompt
    assert told in prompt


OWN = {"name": "look", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "type", ["web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset"]
)
def test_tools_of_anthropics_servers_are_left_out_beside_others(type: str) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "messages": [USER]}
    response, prompt = ask("/v1/messages", body | {"tools": [{"type": type, "name": "web_search"}, OWN]})
    assert response.headers[IGNORED_HEADER] == f"tools.{type}"
    assert "look" in prompt
    assert "web_search" not in prompt
    _, shaped = ask("/v1/messages", body | {"tools": [{"type": "function", "function": {"name": "seek"}}]})
    assert "seek" in shaped
