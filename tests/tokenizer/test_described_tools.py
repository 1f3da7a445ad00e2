"""Tools for chat templates that write none: described in a turn that the template keeps, called in a form it shows."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ktransformers.errors import ConfigError
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import ArgumentsPiece, CallStarted, TextPiece
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.models.chat_templates import FAMILIES, conversation, names_of, template_of, texts_of

ORIGINAL = (Path(__file__).parent / "templates" / "no_tools" / "deepseek_v3_original.jinja").read_text()
WRITES_TOOLS = "{%- for tool in tools or [] %}"
ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}</s>\n"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}</s>\n"
    "{% elif m.role == 'system' %}<|system|>\n{{ m.content }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REFUSES = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + ZEPHYR
LOOKS_AWAY = "{% if tools %}{% set n = tools | length %}{% endif %}" + ZEPHYR


WANTS_LIST = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + ZEPHYR
WANTS_FIELDS = (
    "{% for tool in tools or [] %}// {{ tool.function.description + ' ' + tool.function.name }}("
    "{% for name, one in tool.function.parameters.properties.items() %}{{ one.description + name }}: "
    "{{ one.type + ', ' }}{% endfor %}){% endfor %}"
) + ZEPHYR


def without_tools(family: str) -> str:
    source = template_of(FAMILIES[family], "chatml")
    begin = source.index(WRITES_TOOLS)
    end = source.index("{% endfor -%}", begin) + len("{% endfor -%}")
    return source[:begin] + source[end:]


TEMPLATES = {
    **{family: without_tools(family) for family in FAMILIES},
    "deepseek": ORIGINAL,
    "zephyr": ZEPHYR,
    "refuses": REFUSES,
    "looks_away": LOOKS_AWAY,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Über {name}.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
    for name in ("look_up_00", "look_up_01", "bake")
]
WORDS = ["U", "SU", "SUAU", "DU", "SUCTA", "SUCTAU", "UCTCT", "SUBTTAU", "UXT", "SUCTSU"]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: byte_tokenizer(template) for name, template in TEMPLATES.items()}


def description(tokenizer: Tokenizer) -> str:
    """The shortest prompt's part about tools."""
    plain, shown = (tokenizer.render_chat_template(conversation("U"), tools) for tools in (None, TOOLS))
    assert len(shown) > len(plain)
    begin = shown.index("# Functions")
    return shown[begin : shown.index("without a call.") + len("without a call.")]


@pytest.mark.every(5)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_lost_and_tools_are_told_once(tokenizers: dict[str, Tokenizer], name: str, word: str) -> None:
    tokenizer, messages = tokenizers[name], conversation(word)
    text = tokenizer.render_chat_template(messages, TOOLS)
    told = description(tokenizer)
    assert text.count(told) == 1
    rest = text.replace(told, "")
    for one in (*texts_of(messages), *names_of(messages)):
        assert one in rest
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in told


@pytest.mark.every(5)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_as_it_is_described_is_read(tokenizers: dict[str, Tokenizer], name: str) -> None:
    """The example is in the form in which the parser reads calls and the grammar makes them."""
    tokenizer = tokenizers[name]
    shown = description(tokenizer).partition("written like this:\n")[2].partition("\nWrite several")[0]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    text = shown.replace("FUNCTION_NAME", "bake").replace("PARAMETER", "q").replace("VALUE", "bread")
    parser = tokenizer.answer_parser(tokenizer.encode("x"), schemas)
    events = [*parser.feed(text), *parser.flush()]
    assert [event.name for event in events if isinstance(event, CallStarted)] == ["bake"]
    assert not any(isinstance(event, TextPiece) for event in events)
    arguments = "".join(event.text for event in events if isinstance(event, ArgumentsPiece))
    assert json.loads(arguments) == {"q": "bread"}
    assert tokenizer.tool_grammar(schemas) is not None


@pytest.mark.parametrize("name", ["chatml", "deepseek", "zephyr", "gemma2", "refuses"])
def test_conversations_that_go_on_begin_the_same(tokenizers: dict[str, Tokenizer], name: str) -> None:
    whole = conversation("SUCTAUCTA")
    texts = [
        tokenizers[name].render_chat_template(whole[:end], TOOLS, add_generation_prompt=False)
        for end in range(2, len(whole) + 1)
        if whole[end - 1]["role"] in ("user", "assistant") and not whole[end - 1].get("tool_calls")
    ]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter.rstrip())


def test_deepseeks_own_form_is_used(tokenizers: dict[str, Tokenizer], caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(ORIGINAL)
    assert tokenizer.tool_format in ("deepseek_v3", "deepseek_r1", "deepseek_v31")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            text = tokenizer.render_chat_template(conversation("SUCTU"), TOOLS)
    assert "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>FUNCTION_NAME\n```json\n" in text
    assert "<｜tool▁sep｜>look_up_00\n```json\n" in text
    assert text.startswith("text 00.\n\n# Functions\n")
    assert [record.getMessage() for record in caplog.records if "(tools)" in record.getMessage()] == [
        "the chat template: it does not write these tools: a system turn describes them, and how to call them (tools)"
    ]
    assert tokenizers["zephyr"].tool_format == "json"


def test_templates_that_write_tools_are_left_alone() -> None:
    tokenizer = byte_tokenizer(template_of(FAMILIES["qwen25"], "chatml"))
    changes: list[str] = []
    ids = tokenizer.apply_chat_template(conversation("SU"), TOOLS, note_changes=changes.extend)
    assert "# Functions" not in tokenizer.decode(ids, skip_special_tokens=False)
    assert changes == []
    described = byte_tokenizer(ZEPHYR)
    described.apply_chat_template(conversation("SU"), TOOLS, note_changes=changes.extend)
    assert changes == ["tools"]


def test_a_first_turn_in_parts_stays_in_parts() -> None:
    parts = [{"type": "text", "text": "Be brief."}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "Hi"}]
    text = byte_tokenizer(ZEPHYR).render_chat_template(messages, TOOLS)
    assert text.index("Be brief.") < text.index("# Functions") < text.index("Hi")
    assert parts == [{"type": "text", "text": "Be brief."}]


def test_none_is_a_format() -> None:
    tokenizer = byte_tokenizer(ZEPHYR)
    tokenizer.use_tool_format("none")
    assert not tokenizer.has_tool_calls
    with pytest.raises(ConfigError, match="auto, none, harmony"):
        tokenizer.use_tool_format("nope")


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ({"name": "bake"}, "//  bake()"),
        ({"name": "bake", "description": None, "parameters": {}}, "//  bake()"),
        ({"name": "bake", "parameters": {"properties": {"q": {"type": "string"}}}}, "//  bake(q: string, )"),
        ({"name": "bake", "parameters": {"properties": {"q": {"anyOf": [{"type": "string"}]}}}}, None),
        ({"name": "bake", "parameters": {"properties": {"q": True}}}, None),
    ],
)
def test_tools_that_a_template_refuses_are_written_all_the_same(function: dict[str, Any], shown: str | None) -> None:
    """With empty fields where these were missing, else in words."""
    tokenizer, changes = byte_tokenizer(WANTS_FIELDS), list[str]()
    tools = [{"type": "function", "function": function}]
    ids = tokenizer.apply_chat_template(conversation("SU"), tools, note_changes=changes.extend)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert changes == ([] if shown else ["tools"])
    assert text.startswith(shown) if shown else json.dumps(function) in text
    assert tokenizer.render_chat_template(conversation("SU"), TOOLS).startswith("// Über look_up_00. look_up_00(")


def test_a_template_for_tools_alone_takes_conversations_without() -> None:
    assert byte_tokenizer(WANTS_LIST).render_chat_template(conversation("UAU")) == byte_tokenizer(
        ZEPHYR
    ).render_chat_template(conversation("UAU"))
    with pytest.raises(ConfigError, match="no tools here"):
        byte_tokenizer("{{ raise_exception('no tools here') }}").render_chat_template(conversation("U"))
