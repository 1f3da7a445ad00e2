"""What clients send by habit, field by field, and what becomes of it. Written by hand, not from the table it tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ktransformers.server.api.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from ktransformers.server.api.openai.responses.fields import TABLE as RESPONSES
from ktransformers.server.api.openai.responses.schemas import ResponsesBody
from ktransformers.server.api.openai.schemas import ChatBody, CompletionBody
from ktransformers.server.http.fields import IGNORED_HEADER
from tests.support.servers.server_process import ServerProcess

USER = {"role": "user", "content": "What is 17 + 25?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def after(*messages: dict[str, Any]) -> dict[str, Any]:
    """A conversation in which these come before the question."""
    return {"messages": [*messages, USER]}


def assistant(**fields: Any) -> dict[str, Any]:
    return after({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"} | fields)


TAKEN: list[dict[str, Any]] = [
    *({name: None} for name in (*CHAT_FIELDS, "never_heard_of") if name != "messages"),
    *({"store": one} for one in (True, False)),
    {"metadata": {"a": "b", "run": 5}},
    *({"service_tier": one} for one in ("auto", "default", "flex", "priority")),
    *({"verbosity": one} for one in ("low", "high")),
    {"prediction": {"type": "content", "content": "42"}},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"},
    *({"stream": True, "stream_options": one} for one in ({"include_usage": True}, {"continuous_usage_stats": True})),
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
    {"stream_options": {}},
    {"return_token_ids": True},
    {"request_id": "r", "rid": "r", "cache_prompt": True, "id_slot": -1},
    {"timings_per_token": True, "return_progress": True},
    {"separate_reasoning": True, "include_reasoning": True, "stream_tool_calls": True},
    {"api_key": "k", "session_id": "s", "provider": {"order": []}, "transforms": [], "extra_body": {}},
    {"lora": [], "keep_alive": "5m"},
    {"modalities": ["text"], "response_format": {"type": "text"}},
    # Parts of a conversation.
    assistant(refusal="no"),
    assistant(content=[{"type": "refusal", "refusal": "no"}]),
    assistant(annotations=[{"type": "url_citation"}], id="msg_1", timestamp=3.5, audio=None),
    assistant(cache_control={"type": "ephemeral"}, reasoning_details=[{}], thinking_blocks=[{"type": "thinking"}]),
    assistant(reasoning="hm", reasoning_content="hm"),
    assistant(content=[{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello"}]),
    assistant(content=None, tool_calls=[CALL | {"cache_control": {}}]),
    assistant(content=None, tool_calls=[CALL | {"function": {"name": "add", "arguments": {"a": 1}}}]),
    assistant(content=None, function_call={"name": "add", "arguments": "{}"}),
    assistant(tool_calls=[], function_call=None),
    after({"role": "function", "name": "add", "content": "42"}),
    after({"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]}),
    {"messages": [USER | {"content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]},
    {"tools": [{"type": "function", "function": FUNCTION | {"strict": True, "x": 1}, "cache_control": {}}]},
    {"tools": [], "functions": [], "parallel_tool_calls": False},
    # Values that change nothing.
    {"min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"include_stop_str_in_output": False, "bad_words": [], "length_penalty": 1, "use_beam_search": False},
    {"length_penalty": 1.0, "truncate_prompt_tokens": -1},
    {"n_probs": 0, "mirostat": 0, "typical_p": 1, "tfs_z": 1, "dynatemp_range": 0, "xtc_probability": 0},
    {"dry_multiplier": 0, "best_of": 1, "echo": False, "logprobs": False, "top_logprobs": 0},
    *({"stop": one} for one in ("", [""], [])),
    {"max_completion_tokens": -1, "top_k": 40.0, "n": 1.0},
    # Other programs' names.
    {"repeat_penalty": 1.1, "repeat_last_n": -1, "num_predict": 2},
    {"n_predict": 2, "max_tokens": 2.0},
    {"options": {"temperature": 0, "num_predict": 2, "num_thread": 4}},
    *({"think": one} for one in (True, False)),
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"reasoning": {"enabled": False}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"top_p": 0},
]


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def ask(http: httpx.Client, fields: dict[str, Any]) -> httpx.Response:
    limit = {} if "n_predict" in fields or "num_predict" in str(fields) else {"max_tokens": 2}
    return http.post("/v1/chat/completions", json={"messages": [USER], "temperature": 0} | limit | fields)


@pytest.mark.every(5)
@pytest.mark.parametrize("fields", TAKEN, ids=lambda fields: ",".join(fields))
def test_what_is_harmless_is_taken(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = ask(http, fields)
    assert answer.status_code == 200, answer.text
    assert IGNORED_HEADER not in answer.headers


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"never_heard_of": 1, "nor_of": {}}, "never_heard_of, nor_of"),
        ({"num_ctx": 4096}, "num_ctx"),
        ({"options": {"num_ctx": 4096, "odd": 1}}, "num_ctx, odd"),
        ({"repeat_last_n": 64}, "repeat_last_n"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"odd": 1}}, "chat_template_kwargs.odd"),
        ({"stream": True, "odd": 1}, "odd"),
    ],
)
def test_what_has_no_effect_is_named(http: httpx.Client, fields: dict[str, Any], named: str) -> None:
    answer = ask(http, fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == named


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"mirostat": 2}, "mirostat", "use temperature"),
        ({"bad_words": ["x"]}, "bad_words", "use logit_bias"),
        ({"length_penalty": 2}, "length_penalty", "use repetition_penalty"),
        ({"modalities": ["audio"]}, "modalities", "use text"),
        ({"audio": {"voice": "x"}}, "audio", "use text"),
        ({"web_search_options": {}}, "web_search_options", "a tool of your own"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"structural_tag": "x"}, "structural_tag", "use structured_outputs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name", "required"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.3}, "repetition_penalty", "says something else"),
        ({"repeat_penalty": "1"}, "repeat_penalty", "number"),
        ({"think": 5}, "think", "true, false"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "no tool"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str | None, said: str
) -> None:
    answer = ask(http, fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(("kind", "word"), [("input_audio", "audio"), ("file", "files")])
def test_parts_that_are_no_text_say_so(http: httpx.Client, kind: str, word: str) -> None:
    answer = ask(http, {"messages": [USER | {"content": [{"type": kind, kind: {"url": "data:,"}}]}]})
    assert answer.status_code == 400
    assert f"no support for {word}" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [{"n_predict": 2, "stop": [""]}, {"n_probs": 0, "suffix": ""}, {"best_of": 1, "echo": False}, {"max_tokens": 0}],
)
def test_completions_take_them_too(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text


def test_the_tables_are_those_of_the_models() -> None:
    for body, table in ((ChatBody, CHAT_FIELDS), (CompletionBody, COMPLETION_FIELDS)):
        others = {name for name, rule in table.items() if rule.to or rule.nearest or rule.is_hint or rule.is_ignored}
        assert table.keys() - others == set(body.model_fields)
    others = {name for name, rule in RESPONSES.items() if rule.to or rule.nearest or rule.is_hint or rule.is_ignored}
    # Of the fields that it shares with chat completions one is called text.format here.
    assert RESPONSES.keys() - others == set(ResponsesBody.model_fields) - {"response_format"}


@pytest.mark.parametrize("field", [{"truncate_prompt_tokens": -1}, {"transforms": ["middle-out"]}, {"transforms": []}])
def test_responses_may_be_cut_in_other_programs_words(http: httpx.Client, field: dict[str, Any]) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", "temperature": 0, "max_output_tokens": 2} | field)
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == ("disabled" if field == {"transforms": []} else "auto")


def test_responses_are_not_cut_to_a_number(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", "truncate_prompt_tokens": 5})
    assert answer.status_code == 400
    assert 'truncation "auto"' in answer.json()["error"]["message"]
