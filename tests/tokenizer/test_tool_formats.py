"""Parsers of answers: what each family's template writes is read back, however it is cut; hostile text does no harm."""

from __future__ import annotations

import itertools
import json
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.answer_parser import AnswerParser
from ktransformers.tokenizer.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import (
    TOOL_FORMATS,
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    ParsedEvent,
    ReasoningPiece,
    TextPiece,
    find_tool_format,
    tool_format_named,
)
from tests.support.checks.tool_answers import CALLS, CONTENT, FORMAT_OF, REASONING, TEMPLATES, TOOLS, render, rendered
from tests.support.engines.fake_runner import byte_tokenizer


def joined(events: list[ParsedEvent]) -> list[ParsedEvent]:
    """Neighbouring pieces of a kind as one."""
    made: list[ParsedEvent] = []
    for event in events:
        if made and isinstance(event, TextPiece | ReasoningPiece | ArgumentsPiece) and type(made[-1]) is type(event):
            made[-1] = type(event)(made[-1].text + event.text)
        else:
            made.append(event)
    return made


def read(parser: AnswerParser, pieces: list[str]) -> list[ParsedEvent]:
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.flush()])


def calls_of(events: list[ParsedEvent]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case CallStarted(name):
                calls.append((name, ""))
            case ArgumentsPiece(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return calls


def texts_of(events: list[ParsedEvent], kind: type[TextPiece | ReasoningPiece] = TextPiece) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def cut_at(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    """One for each template; that is all that they know of the family."""
    return {name: byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text()) for name in FORMAT_OF}


@pytest.mark.parametrize("name", FORMAT_OF)
def test_what_a_template_writes_is_read_back(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.tool_format == FORMAT_OF[name]
    calls = CALLS[:1] if name == "llama3_json" else CALLS
    text = render(name, calls)
    for size in (1, 3, len(text)):
        events = read(tokenizer.answer_parser([], TOOLS), [text[at : at + size] for at in range(0, len(text), size)])
        assert [(one, json.loads(arguments)) for one, arguments in calls_of(events)] == calls
        assert texts_of(events).strip() == (CONTENT if CONTENT in text else "")
        if REASONING in text:
            assert texts_of(events, ReasoningPiece).strip() == REASONING
    without = read(tokenizer.answer_parser([], None), [text])
    assert not calls_of(without)
    assert "get_weather" in texts_of(without) or name == "harmony"  # the head of a message is no text


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(sorted(FORMAT_OF)), st.lists(st.integers(0, 10**6), max_size=12), st.integers(0, 10**6))
def test_results_do_not_depend_on_the_cut(name: str, places: list[int], end: int) -> None:
    text = rendered(name)
    text = text[: end % (len(text) + 1)] if end % 2 else text
    form = TOOL_FORMATS[FORMAT_OF[name]]
    assert read(form.parser(TOOLS), cut_at(text, places)) == read(form.parser(TOOLS), [text])


FRAGMENTS = [
    *{tag for form in TOOL_FORMATS.values() for tag in form.tokens},
    *("{", "}", "[", "]", ",", ":", '"', "'", "\\", "(", ")", "=", ">", "<", "/", "\n", " ", "1", "-", ".", "e", "\\u"),
    *("add", "now", "name", "arguments", '{"name": "add", ', '"arguments": {', '"a": ', "true", "None", "```json\n"),
    *("<function=add>", "<parameter=a>", "</parameter>", "</function>", "call:add{", "add(", "functions.add:0"),
    *('<invoke name="add">', '<parameter name="a">', "</invoke>", "<｜DSML｜", "<｜tool", "<tool_", "é"),
    "<minimax:tool_call>",
]  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25),
    st.lists(st.integers(0, 10**6), max_size=20),
)
def test_any_text_is_read_the_same_and_no_text_is_lost(name: str, fragments: list[str], places: list[int]) -> None:
    text = (TOOL_FORMATS[name].tokens[0] if places else "") + "".join(fragments)
    events = read(TOOL_FORMATS[name].parser(TOOLS), cut_at(text, places))
    assert events == read(TOOL_FORMATS[name].parser(TOOLS), list(text))
    if name != "harmony" and not calls_of(events):
        assert texts_of(events) == text
    started = [type(event) for event in events if isinstance(event, CallStarted | CallEnded)]
    assert started == [CallStarted, CallEnded] * (len(started) // 2)


def test_arguments_come_while_they_are_written() -> None:
    parser = TOOL_FORMATS["hermes"].parser(TOOLS)
    assert parser.feed('<tool_call>\n{"name": "add", "arguments": {"te') == [CallStarted("add"), ArgumentsPiece('{"te')]
    assert parser.feed('xt": "long') == [ArgumentsPiece('xt": "long')]
    xml = TOOL_FORMATS["qwen3_coder"].parser(TOOLS)
    assert xml.feed("<tool_call>\n<function=get_weather>\n<par") == [CallStarted("get_weather")]
    assert xml.feed("ameter=code>\nx = ") == [ArgumentsPiece('{"code": "x = ')]
    assert xml.feed("1\n") == [ArgumentsPiece("1")]  # the line break may belong to the closing tag
    assert xml.feed("</parameter>\n<parameter=days>\n1") == [ArgumentsPiece('", "days": ')]
    assert xml.feed("2\n</parameter>") == [ArgumentsPiece("12")]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": "</x>"}}\n</tool_call>'
ADD = ("add", '{"a": 17, "b": "</x>"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I will add.\n{HERMES}", ("I will add.\n", [ADD])),
        (f"{HERMES}\n{HERMES}\n", ("", [ADD, ADD])),
        (f"{HERMES}\ndone", ("\ndone", [ADD])),
        (HERMES.removesuffix("</tool_call>"), ("", [ADD])),
        ("<tool_call>{bad</tool_call>", None),
        ("<tool_call>[1]</tool_call> x", None),
        ("<tool_call><tool_call>" + HERMES, ("<tool_call><tool_call>", [ADD])),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("f", '{"x": 1}')])),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', ("", [("f", '{"x": 1}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', None),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"arguments": {"x": 1}}</tool_call>', None),
        # Too late to take it back: the call ends where it stops being JSON, and what follows is text.
        ('<tool_call>{"name": "f", "arguments": {"x": oh}}</tool_call>', ("}}", [("f", '{"x": ')])),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}}\n</tool_call>', ("}\n", [("f", '{"x": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {"x": "cut', ("", [("f", '{"x": "cut')])),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}</tool_call>', ("", [("f", '{"x": "a\\nb"}')])),
        ("a < b and <tool", None),
        ("", None),
    ],
)  # fmt: skip
def test_hermes(text: str, expected: tuple[str, list[tuple[str, str]]] | None) -> None:
    for pieces in ([text], list(text)):
        events = read(TOOL_FORMATS["hermes"].parser({}), pieces)
        assert (texts_of(events), calls_of(events)) == (expected or (text, []))


@pytest.mark.parametrize(
    ("name", "text", "shown", "calls"),
    [
        ("qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", "", [("add", '{"a": 1}')]),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\nx\n</parameter>", "", [("add", '{"a": "x"}')]),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1", "", [("add", '{"a": 1}')]),
        ("qwen3_coder", "<tool_call>\n<function=x>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\nNaN\n</parameter>\n"
         "</function>", "", [("x", '{"n": 1, "s": "NaN"}')]),
        ("glm45", "<tool_call>now</tool_call>", "", [("now", "{}")]),
        ("glm45", "<tool_call>a b</tool_call>", "<tool_call>a b</tool_call>", []),
        ("kimi_k2", '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}', "",
         [("add", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ("mistral", "say [TOOL_CALLS] now", "say [TOOL_CALLS] now", []),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ("llama3_json", '{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', "",
         [("add", '{"a": 1}'), ("now", "{}")]),
        ("llama4_pythonic", "[1, 2]", "[1, 2]", []),
        ("llama4_pythonic", "[add(a=1), now(x='it\\'s\\n', y=[None, {'k': True}])]", "",
         [("add", '{"a": 1}'), ("now", '{"x": "it\'s\\n", "y": [null, {"k": true}]}')]),
        ("harmony", '<|channel|>analysis to=functions.add code<|message|>{"a": 1}<|call|>', "", [("add", '{"a": 1}')]),
        ("harmony", "<|channel|>final<|message|>Hi<|return|>", "Hi", []),
        ("harmony", "Hi", "Hi", []),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>oops", "<｜tool▁calls▁begin｜>oops", []),
    ],
)  # fmt: skip
def test_what_models_make_of_their_formats(name: str, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        events = read(TOOL_FORMATS[name].parser(TOOLS), pieces)
        assert (texts_of(events), calls_of(events)) == (shown, calls)


def test_depth_is_no_danger() -> None:
    deep = '{"a": ' * 20_000 + "1" + "}" * 20_000
    events = read(TOOL_FORMATS["hermes"].parser({}), [f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>'])
    assert calls_of(events) == [("f", deep)]
    xml = f"<function=f><parameter=o>\n{deep}\n</parameter></function>"
    events = read(TOOL_FORMATS["qwen3_coder"].parser({"f": {"properties": {"o": {"type": "object"}}}}), [xml])
    assert json.loads(calls_of(events)[0][1]) == {"o": deep}  # too deep to be read: a string
    quoted = json.dumps({"name": "f", "arguments": deep})
    events = read(TOOL_FORMATS["hermes"].parser({}), [f"<tool_call>{quoted}</tool_call>"])
    assert texts_of(events) == f"<tool_call>{quoted}</tool_call>"


HOSTILE = {
    "hermes": '<tool_call>{"name": "<tool_call>',
    "qwen3_coder": "<tool_call><function=a><parameter=",
    "llama3_json": '<|python_tag|>{"name":{',
    "mistral": "[TOOL_CALLS][[TOOL_CALLS]x",
    "harmony": "<|channel|><|start|> ",
    "gemma4": "<|tool_call>call:a{a:{",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_time_in_proportion(name: str) -> None:
    """Lines of Python that run for twice the text are at most about twice as many."""

    def lines(count: int) -> int:
        num_lines = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal num_lines
            num_lines += event == "line"
            return trace

        parser, before = TOOL_FORMATS[name].parser(TOOLS), sys.gettrace()
        sys.settrace(trace)
        try:
            read(parser, list(HOSTILE[name] * count))
        finally:
            sys.settrace(before)
        return num_lines

    assert lines(40) < 2.2 * lines(20)


def test_formats_have_names() -> None:
    assert tool_format_named("kimi_k2") is TOOL_FORMATS["kimi_k2"]
    with pytest.raises(ConfigError, match="'nope' is not one of auto, none, harmony, deepseek_v4, "):
        tool_format_named("nope")
    assert tool_format_named("none") is None
    assert find_tool_format("{{ messages }}") is None


def test_a_format_that_was_asked_for_wins() -> None:
    tokenizer = byte_tokenizer((TEMPLATES / "hermes.jinja").read_text())
    tokenizer.use_tool_format("mistral")
    events = read(tokenizer.answer_parser([], TOOLS), ['[TOOL_CALLS]add[ARGS]{"a": 1}'])
    assert calls_of(events) == [("add", '{"a": 1}')]
    with pytest.raises(ConfigError):
        tokenizer.use_tool_format("nope")
    assert Tokenizer(None).tool_format is None


def test_tags_of_the_format_are_seen_although_they_are_special() -> None:
    """Kimi's tags are special tokens, which decoded text leaves out otherwise."""
    backend = byte_tokenizer((TEMPLATES / "kimi_k2.jinja").read_text()).backend
    tags = [*TOOL_FORMATS["kimi_k2"].tokens, "<|im_user|>"]
    backend.backend_tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer = Tokenizer(backend)
    text = render("kimi_k2")
    assert tokenizer.decode(tokenizer.encode(text + "<|im_user|>")) == text
    tokenizer.use_tool_format("hermes")
    assert "<|tool_call_begin|>" not in tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("name", "prompt", "opens"),
    [
        ("hermes", "assistant\n<think>\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("harmony", "<|start|>assistant", False),
        ("mistral", "[/INST][THINK]", True),
    ],
)
def test_a_prompt_may_open_the_reasoning(name: str, prompt: str, opens: bool, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(prompt)
    assert tokenizer.opens_reasoning(ids) == opens
    tags = tokenizer.reasoning_tags
    assert tags is not None
    events = read(tokenizer.answer_parser(ids, None), list(f"hm{tags[1]}"))
    assert texts_of(events, ReasoningPiece) == ("hm" if opens else "")


def test_calls_inside_of_the_reasoning_are_none(tokenizers: dict[str, Tokenizer]) -> None:
    text = f"<think>I could {HERMES}</think>{HERMES}"
    events = read(tokenizers["hermes"].answer_parser([], TOOLS), list(text))
    assert events == [ReasoningPiece(f"I could {HERMES}"), CallStarted("add"), ArgumentsPiece(ADD[1]), CallEnded()]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<think>\na\n</think>\n<answer>\nHi\n\nyou\n</answer>", "Hi\n\nyou"),
        ("<answer>Hi</answer>\n", "Hi\n"),
        ("<answer>\n", ""),
        ("<ans", "<ans"),
        ("Hi <answer>x</answer>", "Hi <answer>x</answer>"),
        ("<answer>cut\n", "cut\n"),
    ],
)
def test_tags_around_an_answer_are_taken_off(text: str, shown: str, tokenizers: dict[str, Tokenizer]) -> None:
    for pieces in ([text], list(text)):
        assert texts_of(read(tokenizers["hunyuan"].answer_parser([], None), pieces)) == shown


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "reasoning_content": {"open": "<r>", "close": "</r>"},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{content.n}", "arguments": "{content.a}"}},
        },
    },
}


@pytest.fixture
def own_parser() -> Tokenizer:
    """A tokenizer whose files say how answers are read, beside a template with other tags; `<c>` is special."""
    backend = byte_tokenizer((TEMPLATES / "hermes.jinja").read_text()).backend
    backend.response_template = RESPONSE_TEMPLATE
    backend.backend_tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("<c>", "<other>")])
    return Tokenizer(backend)


def test_a_checkpoints_own_response_template_comes_first(own_parser: Tokenizer) -> None:
    assert own_parser.tool_format == "response_template"
    text = 'hm</r>Hi<c>{"n": "add", "a": {"a": "1"}}</c>'
    ids = own_parser.encode("<|im_start|>assistant\n<r>")
    assert own_parser.decode(own_parser.encode(text + "<other>")) == text
    for pieces in ([text], list(text)):
        events = read(own_parser.answer_parser(ids, TOOLS), pieces)
        assert events == [
            ReasoningPiece("hm"),
            TextPiece("Hi"),
            CallStarted("add"),
            ArgumentsPiece('{"a": 1}'),
            CallEnded(),
        ]
    own_parser.use_tool_format("hermes")
    assert own_parser.tool_format == "hermes"


def test_a_response_template_that_is_wrong_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    backend = byte_tokenizer((TEMPLATES / "hermes.jinja").read_text()).backend
    backend.response_template = RESPONSE_TEMPLATE | {"fields": {"content": {"open_pattern": "("}}}
    assert Tokenizer(backend).tool_format == "hermes"
    assert "response_template cannot be used: Field 'content': invalid open_pattern" in caplog.text


def test_what_a_response_template_cannot_read_is_text(own_parser: Tokenizer) -> None:
    text = "Hi<c>{oh</c> and so on"
    for pieces in ([text], list(text)):
        events = read(own_parser.answer_parser([], TOOLS), pieces)
        assert [type(event) for event in events] == [TextPiece]
        shown = texts_of(events)
        assert shown.startswith("Hi")
        assert "{oh" in shown
        assert shown.endswith(" and so on")
