"""Schemas by the official clients of three dialects: a real process, the bundled model, pydantic as the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import httpx
import ollama
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.servers.server_process import ServerProcess

ASKED = "Think step by step: what is 12 + 30 + 7?"
UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
TURN: list[Any] = [{"role": "user", "content": ASKED}]


class Report(BaseModel):
    """Nothing that the model would write by itself."""

    model_config = ConfigDict(extra="forbid")

    mood: Literal["glad", "sad"]
    marks: Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(max_length=3)]


class Feeling(BaseModel):
    """Without what Anthropic's client leaves out of a schema and then looks for in the answer: numbers of items."""

    model_config = ConfigDict(extra="forbid")

    mood: Literal["glad", "sad"]
    marks: tuple[Literal[1, 2], ...]


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def llama(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as made:
        yield made


def test_ollama(llama: ollama.Client) -> None:
    schema, options = Report.model_json_schema(), {"temperature": 2, "seed": 3}
    whole = llama.chat("demo", TURN, format=schema, options=options).message.content
    Report.model_validate_json(whole or "")
    chunks = llama.chat("demo", TURN, format=schema, options=options, stream=True)
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole
    for more in ({}, {"raw": True}):
        made = llama.generate("demo", ASKED, format=schema, options=options, **more)
        Report.model_validate_json(made.response)
    thought = llama.chat("demo", TURN, format=schema, think=True, options=options).message
    assert thought.thinking
    Report.model_validate_json(thought.content or "")
    an_object = llama.chat("demo", TURN, format="json", options={"temperature": 0, "num_predict": 60}).message.content
    assert (an_object or "").startswith("{")
    with pytest.raises(ollama.ResponseError, match=r"format: .*#: \$ref: it leads back to itself"):
        llama.chat("demo", TURN, format={"$ref": "#"})


def test_responses(client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "input": ASKED, "temperature": 2, "extra_body": {"seed": 3}}
    made = client.responses.parse(text_format=Report, **fields)
    assert made.output_parsed is not None
    assert made.text is not None
    shown: Any = made.text.format
    assert (shown.type, shown.name, shown.strict) == ("json_schema", "Report", True)
    assert shown.schema_["required"] == ["mood", "marks"]
    with client.responses.stream(text_format=Report, **fields) as stream:
        assert stream.until_done().get_final_response().output_parsed == made.output_parsed
    schema = Report.model_json_schema()
    for form in (
        {"type": "json_schema", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        again = client.responses.create(text={"format": form}, **fields)  # type: ignore[call-overload]
        assert Report.model_validate_json(again.output_text) == made.output_parsed
    kind: Any = {"format": {"type": "json_object"}}
    assert client.responses.create(text=kind, max_output_tokens=40, **fields).output_text.startswith("{")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema", "name": "x"}, "text.format.schema is missing"),
        ({"type": "json_schema", "name": "x", "schema": UNIQUE, "strict": True}, "'x' is strict.*#/uniqueItems"),
        ({"type": "json_schema", "name": "x", "schema": {"$ref": "#/$defs/gone"}}, r"#: \$ref: .* leads nowhere"),
    ],
)
def test_responses_refuses(client: openai.OpenAI, form: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(model="demo", input=ASKED, text={"format": form})  # type: ignore[call-overload]


def test_responses_names_what_it_does_not_know_of_a_format(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "text", "colour": "red", "size": None}, "tone": "warm"}
    made = client.responses.with_raw_response.create(model="demo", input="Hi", max_output_tokens=1, text=form)
    assert made.headers["x-ktransformers-ignored"] == "text.tone, text.format.colour"


def test_anthropic(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "demo", "messages": TURN, "max_tokens": 300}
    extra = {"temperature": 2, "seed": 4}
    made = claude.messages.parse(output_format=Feeling, output_config={"effort": "low"}, extra_body=extra, **fields)
    assert made.parsed_output is not None
    with claude.messages.stream(output_format=Feeling, extra_body=extra, **fields) as stream:
        assert stream.get_final_message().parsed_output is not None
    schema = {"type": "json_schema", "schema": Feeling.model_json_schema()}
    extra_body = {"output_format": schema, "output_config": {"effort": "low"}} | extra
    older = claude.messages.create(extra_body=extra_body, **fields)
    text = "".join(block.text for block in older.content if block.type == "text")
    assert set(json.loads(text)) == {"mood", "marks"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"output_format": {"type": "json_schema"}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": {}, "must": 1}}, "output_config.format.must"),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "#: not: nothing fits"),
        ({"output_format": {"type": "json_schema", "schema": UNIQUE, "strict": True}}, "strict.*#/uniqueItems"),
        ({"messages": [*TURN, {"role": "assistant", "content": "{"}]}, "begins the answer already"),
    ],
)
def test_anthropic_refuses(claude: anthropic.Anthropic, body: dict[str, Any], says: str) -> None:
    schema = {"output_format": {"type": "json_schema", "schema": {"type": "object"}}}
    with pytest.raises(anthropic.BadRequestError, match=says):
        claude.messages.create(model="demo", messages=TURN, max_tokens=9, extra_body=schema | body)


HEADER = "x-ktransformers-ignored"
SECRET = {
    "type": "object",
    "properties": {"my secret": UNIQUE},
    "required": ["my secret"],
    "additionalProperties": False,
}
SAID = "#/properties/*/uniqueItems"


def test_what_answers_are_not_held_to_is_named(
    client: openai.OpenAI, claude: anthropic.Anthropic, llama: ollama.Client, server: ServerProcess
) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SECRET}}
    asked: Any = {"model": "demo", "messages": TURN, "max_tokens": 60, "extra_body": {"enable_thinking": False}}
    chat = client.chat.completions.with_raw_response
    whole = chat.create(response_format=named, **asked)
    assert whole.headers[HEADER] == f"response_format{SAID}"
    assert set(json.loads(whole.parse().choices[0].message.content or "")) == {"my secret"}
    assert chat.create(response_format=named, stream=True, **asked).headers[HEADER] == f"response_format{SAID}"
    for field in ("guided_json", "json_schema"):
        text = client.completions.with_raw_response.create(
            model="demo", prompt="x", max_tokens=60, extra_body={field: SECRET}
        )
        assert text.headers[HEADER] == f"{field}{SAID}"
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SECRET}}
    answer = client.responses.with_raw_response.create(model="demo", input=ASKED, text=form, max_output_tokens=60)
    assert answer.headers[HEADER] == f"text.format{SAID}"
    extra = {"output_format": {"type": "json_schema", "schema": SECRET}}
    message = claude.messages.with_raw_response.create(model="demo", messages=TURN, max_tokens=60, extra_body=extra)
    assert message.headers[HEADER] == f"output_config.format{SAID}"
    plain = httpx.post(
        f"{server.url}/api/chat",
        json={"model": "demo", "messages": TURN, "stream": False, "format": SECRET, "options": {"num_predict": 60}},
        timeout=60,
    )
    assert (plain.status_code, plain.headers[HEADER]) == (200, f"format{SAID}")
    log = "".join(server.log)
    assert "schemas with response_format#/properties/*/uniqueItems" in log
    assert log.count("schemas with response_format#/properties/*/uniqueItems") == 1
    assert "my secret" not in log


@pytest.mark.parametrize("form", ["chat", "responses"])
def test_strict_is_the_whole_schema_or_a_400(client: openai.OpenAI, form: str) -> None:
    strict = {"name": "plan", "schema": SECRET, "strict": True}
    asked: Any = {"model": "demo", "messages": TURN, "response_format": {"type": "json_schema", "json_schema": strict}}
    text: Any = {"format": {"type": "json_schema", **strict}}

    def ask() -> Any:
        if form == "chat":
            return client.chat.completions.create(**asked)
        return client.responses.create(model="demo", input=ASKED, text=text)

    with pytest.raises(openai.BadRequestError, match=r"'plan' is strict.*#/properties/my secret/uniqueItems"):
        ask()
