"""Calls that were cut, and calls whose tags the model wrote twice or forgot; expectations are written by hand."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest
from pydantic_core import from_json

from ktransformers.tokenizer.tools import TOOL_FORMATS, ArgumentsPiece, CallEnded, CallStarted, ParsedEvent, TextPiece
from tests.support.checks.tool_answers import CALLS, CONTENT, FORMAT_OF, TOOLS, rendered


def read(name: str, text: str, tools: Any = TOOLS, *, is_cut: bool = False, size: int = 7) -> list[ParsedEvent]:
    parser = TOOL_FORMATS[name].parser(tools)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.flush(is_cut)]


def calls_of(events: list[ParsedEvent]) -> list[tuple[str, str, bool]]:
    """Names, arguments, whether whole."""
    calls: list[tuple[str, str, bool]] = []
    for event in events:
        match event:
            case CallStarted(name):
                calls.append((name, "", False))
            case ArgumentsPiece(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text, False)
            case CallEnded(is_whole):
                calls[-1] = (*calls[-1][:2], is_whole)
    return calls


def text_of(events: list[ParsedEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextPiece))


def is_part(part: Any, whole: Any) -> bool:
    """Whether members and elements of `part` are the first ones of `whole`, the last perhaps not complete."""
    match part, whole:
        case dict(), dict():
            return list(part) == list(whole)[: len(part)] and all(is_part(part[key], whole[key]) for key in part)
        case list(), list():
            return len(part) <= len(whole) and all(map(is_part, part, whole))
        case str(), str():
            return whole.startswith(part)
        case int() | float(), int() | float():
            return str(whole).startswith(str(part).removesuffix(".0")) or part == whole
    return bool(part == whole)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", FORMAT_OF)
def test_an_answer_may_be_cut_anywhere(name: str) -> None:
    """The object is open until the model closes it, and until then the beginning of what it would have been."""
    text, form = rendered(name), FORMAT_OF[name]
    for end in range(len(text)):
        for called, expected in zip(calls_of(read(form, text[:end], is_cut=True, size=len(text))), CALLS, strict=False):
            what, arguments, is_whole = called
            assert what == expected[0]
            if is_whole:
                assert json.loads(arguments) == expected[1], end
                continue
            with pytest.raises(ValueError, match=r".+"):
                json.loads(arguments)
            assert arguments[0] == "{"
            assert is_part(from_json(arguments, allow_partial="trailing-strings"), expected[1]), (end, arguments)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", sorted(FORMAT_OF.keys() - {"llama3_json", "llama4_pythonic", "harmony"}))
def test_what_was_begun_of_a_call_is_no_text(name: str) -> None:
    text, form = rendered(name), FORMAT_OF[name]
    opening = next(tag for tag in sorted(TOOL_FORMATS[form].tokens, key=len) if tag in text)
    assert opening
    shown = {text_of(read(form, text[:end], is_cut=True, size=len(text))) for end in range(len(text))}
    before = text[: text.index(CONTENT) + len(CONTENT)] if CONTENT in text else ""
    for one in shown:
        rest = one.removeprefix(before).strip()
        assert "get_weather" not in rest
        assert "arguments" not in rest


@pytest.mark.every(5)
@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("name", FORMAT_OF)
def test_cut_answers_do_not_depend_on_their_pieces(name: str, size: int) -> None:
    text, form = rendered(name), FORMAT_OF[name]
    for end in range(3, len(text), 17):
        whole, pieces = (
            read(form, text[:end], is_cut=True, size=len(text)),
            read(form, text[:end], is_cut=True, size=size),
        )
        assert calls_of(pieces) == calls_of(whole)
        assert text_of(pieces) == text_of(whole)


SLIP_TOOLS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": "string"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
QWEN = (
    "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
OSLO: list[tuple[str, dict[str, Any]]] = [("look", {"city": "Oslo", "days": 3})]


def without(text: str, tag: str, number: int = 0) -> str:
    """The text without this occurrence of a tag."""
    parts = text.split(tag)
    assert len(parts) > number + 1
    return tag.join(parts[: number + 1]) + tag.join(["", *parts[number + 1 :]]).removeprefix(tag)


def doubled(text: str, tag: str, joint: str = "\n") -> str:
    return text.replace(tag, f"{tag}{joint}{tag}")


MINIMAX = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
GLM = (
    "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
GLM47 = GLM.replace("\n", "")
TWICE = f"{QWEN}\n{QWEN}"

M3_MARK = "]<]minimax[>["
M3 = (
    f'{M3_MARK}<tool_call>\n{M3_MARK}<invoke name="look">{M3_MARK}<city>Oslo{M3_MARK}</city>'
    f"{M3_MARK}<days>3{M3_MARK}</days>{M3_MARK}</invoke>\n{M3_MARK}</tool_call>"
)
M3_BACK = (
    f'{M3_MARK}<tool_call>\n{M3_MARK}<invoke name="look">{M3_MARK}<days>3{M3_MARK}</days>'
    f"{M3_MARK}<city>Oslo{M3_MARK}</city>{M3_MARK}</invoke>\n{M3_MARK}</tool_call>"
)
M3_CITY, M3_DAYS, M3_CALL = (f"{M3_MARK}</{name}>" for name in ("city", "days", "invoke"))

SLIPS = [
    *((text, "minimax_m3") for m3 in (M3, M3_BACK) for text in (
        m3,
        without(m3, M3_CITY),
        without(m3, M3_DAYS),
        without(without(m3, M3_CITY), M3_DAYS),
        without(m3, M3_CALL),
        without(without(m3, M3_CALL), M3_CITY),
        m3.partition(M3_CALL)[0],
        without(m3.partition(M3_CALL)[0], M3_CITY),
        without(m3.partition(M3_CALL)[0], M3_DAYS),
    )),
    *((text, form) for text, form in ((QWEN, "qwen3_coder"), (QWEN.replace("\n", ""), "qwen3_coder"))),
    *((doubled(QWEN, "</parameter>", joint), "qwen3_coder") for joint in ("", "\n", "\n\n", " ")),
    (doubled(doubled(QWEN, "</parameter>"), "</function>"), "qwen3_coder"),
    (doubled(QWEN, "<parameter=city>"), "qwen3_coder"),
    (doubled(QWEN, "</tool_call>"), "qwen3_coder"),
    *((without(QWEN, "</parameter>", one), "qwen3_coder") for one in (0, 1)),
    (QWEN.replace("</parameter>", ""), "qwen3_coder"),
    (QWEN.replace("\n</parameter>", ""), "qwen3_coder"),
    (QWEN.replace("</parameter>", "").replace("\n", ""), "qwen3_coder"),
    (without(QWEN, "</function>"), "qwen3_coder"),
    (without(QWEN, "</tool_call>"), "qwen3_coder"),
    (QWEN.replace("</function>\n</tool_call>", ""), "qwen3_coder"),
    (QWEN.replace("\n</parameter>\n</function>\n</tool_call>", ""), "qwen3_coder"),
    (QWEN.replace("\n</parameter>\n</function>", ""), "qwen3_coder"),
    (QWEN.removeprefix("<tool_call>\n"), "qwen3_coder"),
    (QWEN.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), "qwen3_coder"),
    (QWEN.replace("<parameter=city>", "<parameter=city"), "qwen3_coder"),
    (QWEN.replace("<function=look>", "<function=look"), "qwen3_coder"),
    (QWEN.replace("<parameter=city>", '<parameter="city">'), "qwen3_coder"),
    (QWEN.replace("<parameter=days>", "And the days:\n<parameter=days>"), "qwen3_coder"),
    (doubled(MINIMAX, "</parameter>"), "minimax_m2"),
    (MINIMAX.replace("</parameter>", ""), "minimax_m2"),
    (without(MINIMAX, "</parameter>", 1), "minimax_m2"),
    (without(MINIMAX, "</invoke>"), "minimax_m2"),
    (without(MINIMAX, "</minimax:tool_call>"), "minimax_m2"),
    (doubled(DSML, "</｜DSML｜parameter>"), "deepseek_v4"),
    (without(DSML, "</｜DSML｜parameter>", 0), "deepseek_v4"),
    (without(DSML, "</｜DSML｜invoke>"), "deepseek_v4"),
    *((text, "glm45") for glm in (GLM, GLM47) for text in (
        glm,
        doubled(glm, "</arg_value>"),
        doubled(glm, "<arg_value>", ""),
        doubled(glm, "</arg_key>", ""),
        without(glm, "</arg_value>", 0),
        without(glm, "</arg_value>", 1),
        without(glm, "<arg_value>", 0),
        without(glm, "</arg_key>", 0),
        without(glm, "</tool_call>"),
        glm.replace("</arg_value>", ""),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "form"), SLIPS)
def test_tags_that_are_doubled_or_missing_lose_nothing(text: str, form: str) -> None:
    for size in (1, 4, len(text)):
        events = read(form, text, SLIP_TOOLS, size=size)
        assert [(name, {k: v.strip() if isinstance(v, str) else v for k, v in json.loads(arguments).items()}, is_whole)
                for name, arguments, is_whole in calls_of(events)] == [(*call, True) for call in OSLO]  # fmt: skip
        assert text_of(events).strip() == ""


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        (without(TWICE, "</parameter>", 1), OSLO * 2, ""),
        (without(TWICE, "</function>", 0), OSLO * 2, ""),
        (TWICE.replace("\n</parameter>\n</function>\n</tool_call>\n", "\n"), OSLO * 2, ""),
        (f"{without(QWEN, '</parameter>', 1)}\nDone.", OSLO, "\nDone."),
        (f"{QWEN.replace('</function>', '')}\nDone.", OSLO, "\nDone."),
        # A value may talk about tags.
        (
            QWEN.replace("Oslo", "Say </function> and <parameter=x>, then <tool_call>."),
            [("look", {"city": "Say </function> and <parameter=x>, then <tool_call>.", "days": 3})],
            "",
        ),
        (
            QWEN.replace("Oslo", "a\n</function>\n</tool_call>\nb"),
            [("look", {"city": "a\n</function>\n</tool_call>\nb", "days": 3})],
            "",
        ),
        (QWEN.replace("Oslo", "\nOslo\n"), [("look", {"city": "\nOslo\n", "days": 3})], ""),
        ("<function=now>\n</function>", [("now", {})], ""),
        ("<tool_call>\n<function=now>\n</tool_call>", [("now", {})], ""),
        ("Use <function=nothing\nhere", [], "Use <function=nothing\nhere"),
    ],
)
def test_slips_around_other_calls_and_texts(text: str, expected: list[Any], shown: str) -> None:
    for size in (1, 6, len(text)):
        events = read("qwen3_coder", text, SLIP_TOOLS, size=size)
        assert [(name, json.loads(arguments)) for name, arguments, _ in calls_of(events)] == expected
        assert text_of(events) == shown


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("qwen3_coder", "<tool_call>\n<function=look>\n<param", "{"),
        ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=days>\n1", '{"days": 1'),
        ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=city>\nOs", '{"city": "Os'),
        ("qwen3_coder", '<tool_call>\n<function=look>\n<parameter=tags>\n["a", "b', '{"tags": ["a", "b'),
        ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>\n", '{"city": "Oslo"'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>\n</func",
            '{"city": "Oslo"',
        ),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Os', '{"city": "Os'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="look">\n', "{"),
        (
            "minimax_m3",
            ']<]minimax[>[<invoke name="look">]<]minimax[>[<city>Os]<]minimax[>[</ci',
            '{"city": "Os',
        ),
        ("glm45", "<tool_call>look\n<arg_key>ci", "{"),
        ("glm45", "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Os", '{"city": "Os'),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n', "{"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"city": "Os', '{"city": "Os'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"city": "O\\u00', '{"city": "O'),
        ("llama4_pythonic", "[look(city='Os", '{"city": "Os'),
        ("llama4_pythonic", "[look(", "{"),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"city"', '{"city"'),
        ("kimi_k2", "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{", "{"),
        ("gemma4", '<|tool_call>call:look{city:<|"|>Os', '{"city": "Os'),
        ("gemma4", "<|tool_call>call:look{ci", '{"ci'),
        ("harmony", '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"da', '{"da'),
    ],
)
def test_what_was_cut_is_what_the_model_wrote(form: str, text: str, arguments: str) -> None:
    for size in (1, len(text)):
        assert calls_of(read(form, text, SLIP_TOOLS, is_cut=True, size=size)) == [("look", arguments, False)]


@pytest.mark.parametrize(
    ("form", "begun", "shown"),
    [
        ("seed_oss", "<seed:tool", ""),
        ("qwen3_coder", "<func", ""),
        ("minimax_m3", "]<]minimax[>[<to", ""),
        ("kimi_k3", "<|open|>to", ""),
        ("mistral", "[TOOL_C", ""),
        ("hermes", "<", "<"),
        ("mistral", "[", "["),
        ("muse_glimmer", " to", " to"),
    ],
)
def test_half_a_tag_is_no_text_where_an_answer_was_cut(form: str, begun: str, shown: str) -> None:
    for size in (1, 100):
        assert text_of(read(form, f"I am going{begun}", SLIP_TOOLS, is_cut=True, size=size)) == f"I am going{shown}"
        assert text_of(read(form, f"I am going{begun}", SLIP_TOOLS, size=size)) == f"I am going{begun}"


@pytest.mark.parametrize("form", ["hermes", "ernie", "hunyuan"])
def test_a_tag_that_was_begun_behind_a_call_takes_nothing_else_along(form: str) -> None:
    call = '{"name": "look", "arguments": {}}'
    tag = "<tool_calls>" if form == "hunyuan" else "<tool_call>"
    text = f"{tag}{call}</{tag[1:]}\n \n</"
    for size in range(1, len(text) + 1):
        events = read(form, text, SLIP_TOOLS, is_cut=True, size=size)
        assert calls_of(events) == [("look", "{}", True)]
        assert text_of(events) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (without(M3, M3_CITY) + "\n" + M3, OSLO * 2),
        (without(M3.partition(M3_CALL)[0], M3_DAYS) + "\n" + M3, OSLO * 2),
        # A value may talk about tags, even with the token in front of them.
        (
            M3.replace("Oslo", f"a {M3_MARK}</invoke> b {M3_MARK}<x>"),
            [("look", {"city": f"a {M3_MARK}</invoke> b {M3_MARK}<x>", "days": 3})],
        ),
        (
            f'{M3_MARK}<invoke name="look">{M3_MARK}<tags>{M3_MARK}<item>a{M3_MARK}</item>{M3_MARK}<item>b',
            [("look", {"tags": ["a", "b"]})],
        ),
    ],
)
def test_forgotten_tags_of_minimax_m3(text: str, expected: list[Any]) -> None:
    for size in (1, 5, len(text)):
        events = read("minimax_m3", text, SLIP_TOOLS, size=size)
        assert [(name, json.loads(arguments)) for name, arguments, _ in calls_of(events)] == expected
        assert text_of(events).strip() == ""


@pytest.mark.parametrize("text", [M3, without(M3, M3_CITY), without(M3_BACK, M3_CITY), without(M3, M3_CALL)])
def test_minimax_m3_may_be_cut_anywhere(text: str) -> None:
    for end in range(len(text)):
        for size in (3, len(text)):
            events = read("minimax_m3", text[:end], SLIP_TOOLS, is_cut=True, size=size)
            for _, arguments, is_whole in calls_of(events):
                assert M3_MARK[0] not in arguments
                assert not is_whole or json.loads(arguments) == OSLO[0][1]


def test_a_call_that_is_whole_is_no_cut_one() -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}'
    assert calls_of(read("hermes", text, SLIP_TOOLS, is_cut=True)) == [("look", '{"city": "Oslo"}', True)]
    assert calls_of(read("qwen3_coder", QWEN.removesuffix("</tool_call>"), SLIP_TOOLS, is_cut=True))[0][2]


QUOTED = [
    ('say(text="He said "hi" to me", n=1)', {"text": 'He said "hi" to me', "n": 1}),
    ('say(text="He said "hi", then left", n=1)', {"text": 'He said "hi", then left', "n": 1}),
    ('say(n=1, text="He said "hi"")', {"n": 1, "text": 'He said "hi"'}),
    ('say(text=""hi" he said")', {"text": '"hi" he said'}),
    ('say(text="f("x") is (called "g") now")', {"text": 'f("x") is (called "g") now'}),
    ("say(text='It's Tom's', n=1)", {"text": "It's Tom's", "n": 1}),
    ('say(tags=["a "b" c", "d"], n=1)', {"tags": ['a "b" c', "d"], "n": 1}),
    ('say(of={"k "x" y": "v "w" z"})', {"of": {'k "x" y': 'v "w" z'}}),
    # As it should be.
    ('say(text="a\\"b", n=1)', {"text": 'a"b', "n": 1}),
    ('say(text="" , n = 1 )', {"text": "", "n": 1}),
    ('say(text="a, b=c", n=1)', {"text": "a, b=c", "n": 1}),
    ('say(text="x",)', {"text": "x"}),
    ("say(text='\"', n=1)", {"text": '"', "n": 1}),
]


@pytest.mark.parametrize(("call", "expected"), QUOTED)
@pytest.mark.parametrize(
    ("form", "around"),
    [("lfm2", ("<|tool_call_start|>[", "]<|tool_call_end|>")), ("llama4_pythonic", ("[", "]"))],
)
def test_quotes_inside_of_strings(form: str, around: tuple[str, str], call: str, expected: dict[str, Any]) -> None:
    for count in (1, 2):
        text = f"{around[0]}{', '.join([call] * count)}{around[1]}"
        for size in (1, 4, len(text)):
            events = read(form, text, {"say": None}, size=size)
            assert [(name, json.loads(arguments), is_whole) for name, arguments, is_whole in calls_of(events)] == [
                ("say", expected, True)
            ] * count
            assert text_of(events) == ""


@pytest.mark.parametrize("call", ['say(text="a" n=1)', 'say(text="never ends', 'say(text="a" n'])
def test_what_no_quote_explains_is_no_whole_call(call: str) -> None:
    for size in (1, 100):
        ((_, arguments, is_whole),) = calls_of(read("lfm2", f"<|tool_call_start|>[{call}", {"say": None}, size=size))
        assert not is_whole
        assert arguments.startswith('{"text": "')


HOSTILE = {
    "lfm2": '<|tool_call_start|>[look(city="x" y',
    "qwen3_coder": "<tool_call><function=look><parameter=city>x</function>",
    "minimax_m2": '<minimax:tool_call><invoke name="look"><parameter name="city">x</invoke>',
    "glm45": "<tool_call>look<arg_key>city<arg_value>x</tool_call>",
    "minimax_m3": f'{M3_MARK}<invoke name="look">{M3_MARK}<city>x{M3_CALL}',
}


def num_lines(form: str, text: str) -> int:
    """Lines of Python that run for a text that comes in one piece."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read(form, text, SLIP_TOOLS, size=len(text))
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("form", HOSTILE)
@pytest.mark.parametrize(
    "tail",
    [
        "<parameter=note>",
        "</function><tool_call>",
        "</tool_call>",
        "</invoke>",
        "<arg_key>x",
        M3_CALL,
        f"{M3_MARK}<note>",
    ],
)
def test_slips_take_time_in_proportion(form: str, tail: str) -> None:
    """Whatever is looked at twice is looked at no more often, however long the text."""
    assert num_lines(form, HOSTILE[form] * 80) < 2.2 * num_lines(form, HOSTILE[form] * 40)
    assert num_lines(form, tail * 80) < 2.2 * num_lines(form, tail * 40)
