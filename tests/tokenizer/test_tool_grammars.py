"""Grammars of tool calls, by the library that enforces them: they take what templates write, and no other answers.

What comes out is read by the formats' own parsers, and held against the schemas by jsonschema.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tools import TOOL_FORMATS
from tests.support.checks.forced_calls import check_calls, forced, grammars_of, takes, tokenizer_of, wander
from tests.support.checks.random_tools import random_tools
from tests.support.checks.tool_answers import CALLS, CONTENT, FORMAT_OF, TOOLS, render
from tests.support.engines.fake_runner import byte_tokenizer

pytest.importorskip("llguidance")

# What calls begin with.
FIRST_TAG = {name: TOOL_FORMATS[form].tokens[0] for name, form in FORMAT_OF.items()} | {
    "llama3_json": "{",
    "harmony": "<|channel|>commentary to",
    "deepseek_v32": "<｜DSML｜",
    "deepseek_v4": "<｜DSML｜",
}
# Formats that are nothing but a shape, and those without a template in the folder.
SHAPED = [name for name, form in TOOL_FORMATS.items() if form.shape is not None]
NAMES = [*FIRST_TAG, "deepseek_r1", *SHAPED]


@pytest.mark.every(5)
@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("name", FIRST_TAG)
def test_a_grammar_takes_the_calls_that_templates_write(name: str, are_special: bool) -> None:
    tokenizer = tokenizer_of(name, are_special)
    calls = CALLS[:1] if name in ("llama3_json", "harmony") else CALLS
    text = render(name, calls)
    text = text[text.index(FIRST_TAG[name], text.find(CONTENT) + 1) :].strip()
    for left_out in ("<|call|>", "\n</answer>"):  # no part of the calls
        text = text.removesuffix(left_out)
    text = re.sub(r', "id": "call\d+"', "", text).replace("\nTrue\n", "\ntrue\n")
    if name == "llama4_pythonic":  # nested values, and strings, are written as in JSON
        text = json.dumps(CALLS[0][1]["where"], ensure_ascii=False).join(text.split(repr(CALLS[0][1]["where"])))
        for value in (CALLS[0][1]["city"], CALLS[0][1]["code"], CALLS[0][1]["tags"], "metric"):
            text = text.replace(repr(value), json.dumps(value, ensure_ascii=False))
    assert takes(tokenizer, text)
    assert not takes(tokenizer, "Hello")
    assert not takes(tokenizer, text.replace("get_weather", "forget"))
    assert takes(tokenizer, text, parallel=False) == (len(calls) == 1)


@pytest.mark.parametrize(
    ("limit", "thoughts", "does_fit"),
    [(None, "abc " * 20, True), (3, "abc", True), (3, "abcd", False), (0, "", False), (0, None, True), (3, None, True)],
)
def test_the_reasoning_that_a_grammar_knows_has_a_limit(
    limit: int | None, thoughts: str | None, does_fit: bool
) -> None:
    text = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    if thoughts is not None:
        text = f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant{text}"
    assert takes(tokenizer_of("harmony", True), text, max_thoughts=limit) == does_fit


@pytest.mark.every(5)
@pytest.mark.parametrize("are_special", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_comes_out_is_calls_that_fit(name: str, are_special: bool, random_cases: Any) -> None:
    tokenizer = tokenizer_of(name, are_special)
    for seed in range(random_cases(4, 150)):
        draw = random.Random(f"{name} {are_special} {seed}")
        tools, parallel = random_tools(draw), draw.random() < 0.5
        max_thoughts = draw.randrange(50) if are_special else 0  # harmony's tags are special wherever it is spoken
        try:
            constraint = forced(tokenizer, tools, parallel=parallel, max_thoughts=max_thoughts)
            text = wander(tokenizer, constraint, draw)
            check_calls(tokenizer, text, tools, parallel=parallel)
        except Exception as error:
            error.add_note(f"seed {seed}: {json.dumps(tools)}")
            raise


CYCLE = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("hermes", {"type": "array"}, "#: type: nothing fits"),
    ("hermes", {"x-guidance": {"lenient": True}}, "#: x-guidance: "),
    ("hermes", CYCLE, r"#/\$defs/a: \$ref: it leads back to itself"),
    ("qwen3_coder", CYCLE, r"#/\$defs/a: \$ref: it leads back to itself"),
    ("gemma4", CYCLE, r"#/\$defs/a: \$ref: it leads back to itself"),
    ("llama4_pythonic", CYCLE, r"#/\$defs/a: \$ref: it leads back to itself"),
    ("llama4_pythonic", {"properties": {"a b": {}}, "required": ["a b"]}, "'a b' has a name that is no keyword"),
    ("gemma4", {"properties": {"a": {"$ref": "#/$defs/b"}}}, r"#/properties/a: \$ref: .*leads nowhere"),
    ("gemma4", {"properties": {"a": {"$ref": "http://b"}}}, r"#/properties/a: \$ref: .*leads out of the schema"),
    ("qwen3_coder", {"properties": {"<a>": {}}}, "has a name that tags cannot hold"),
    ("qwen3_coder", {"required": ["a"], "additionalProperties": False}, "#/additionalProperties: schema: nothing fits"),
    ("qwen3_coder", {"properties": {"a": False}, "required": ["a"]}, "#/properties/a: schema: nothing fits"),
    ("qwen3_coder", {"properties": {"a": {"type": "string", "minLength": "x"}}}, "#/properties/a: minLength: it must"),
    ("qwen3_coder", {"required": [{}]}, "#: required: it must be a list of names"),
    ("gemma4", {"properties": {"a": {"type": "array", "minItems": []}}}, "#/properties/a: minItems: it must"),
    ("glm45", {"properties": {"a": {"enum": ["7", None, 8]}}, "required": ["a"]}, "look like other values"),
]


@pytest.mark.parametrize(("name", "schema", "message"), REFUSED)
def test_what_cannot_be_followed_is_named(name: str, schema: dict[str, Any], message: str) -> None:
    tokenizer = tokenizer_of(name, False)
    with pytest.raises(ConfigError, match=message):
        grammars_of(tokenizer).check(forced(tokenizer, {"f": schema}))


def test_names_that_a_format_cannot_hold() -> None:
    tools = {'do "it" #1': None}
    text = '<tool_call>\n{"name": "do \\"it\\" #1", "arguments": {}}\n</tool_call>'
    assert takes(tokenizer_of("hermes", True), text, tools)
    with pytest.raises(ConfigError, match="has a name that calls in this model's format cannot hold"):
        tokenizer_of("kimi_k2", True).tool_grammar(tools)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:f{list:{v:1,next:{v:2,next:{next:null}}}}<tool_call|>"),
        ("llama4_pythonic", '[f(list={"v": 1, "next": {"next": {"v": 3}}})]'),
        (
            "qwen3_coder",
            '<tool_call>\n<function=f>\n<parameter=list>\n{"next": {"v": 3}}\n</parameter>\n</function>\n</tool_call>',
        ),
    ],
)
def test_a_schema_may_refer_to_itself(name: str, text: str) -> None:
    inner = {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}
    node = {"type": "object", "properties": inner, "additionalProperties": False}
    tools = {"f": {"properties": {"list": {"$ref": "#/$defs/node"}}, "required": ["list"], "$defs": {"node": node}}}
    assert takes(tokenizer_of(name, True), text, tools)
    assert not takes(tokenizer_of(name, True), re.sub(r"\bv\b", "w", text), tools)


def glm(value: str) -> str:
    return f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "fits", "not_fits"),
    [
        ({}, ["", "7", "a\n<b>", '{"a": 1'], []),
        ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab", "ba"]),
        ({"type": "string", "pattern": "a(b|c)"}, ["xacx"], ["xax"]),
        ({"type": "string", "minLength": 2, "format": "uri"}, ["ab", "7\n"], ["a"]),
        ({"type": "string", "enum": ["a/b", "[c]", "7"]}, ["a/b", "[c]", "7"], ["a", "c", ""]),
        ({"type": ["string", "integer"]}, ["7", "-12", "seven", "7a", ""], ["7.5", " 1e3"]),
        ({"type": ["string", "null"]}, ["null", "7.5", "north"], ["None", " null"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 9}]}, ["9", "a1"], ["10", " 7"]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"const": 1}}]}, ["[1, 1]", "1"], ["[2]", " ["]),
        ({"type": "boolean"}, ["true", "false"], ["True", "yes"]),
        ({"enum": ["on", "off", None, 3]}, ["on", "null", "3"], ["4", "None"]),
        ({"$ref": "#/$defs/b"}, ["12"], ["x"]),
    ],
)
def test_values_without_quotes_are_what_parsers_read(
    schema: dict[str, Any], fits: list[str], not_fits: list[str]
) -> None:
    tools = {"f": {"type": "object", "properties": {"a": schema}, "$defs": {"b": {"type": "integer"}}}}
    for are_special in (False, True):
        tokenizer = tokenizer_of("glm45", are_special)
        assert [value for value in fits if not takes(tokenizer, glm(value), tools)] == []
        assert [value for value in not_fits if takes(tokenizer, glm(value), tools)] == []
        for value in fits:
            check_calls(tokenizer, glm(value), tools, parallel=False)


def test_a_tag_that_is_spelled_out_is_no_text() -> None:
    tokenizer = tokenizer_of("glm45", True)
    constraint = forced(tokenizer, {"f": {"properties": {"a": {"type": "string"}}, "required": ["a"]}})
    matcher = grammars_of(tokenizer).matcher(constraint)
    spelled = [token_id for letter in "b</arg_value" for token_id in tokenizer.encode(letter)]
    matcher.consume([*tokenizer.encode("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"), *spelled])
    allowed = matcher.allowed()
    (end,), (other,) = tokenizer.encode(">"), tokenizer.encode("x")
    assert [int(allowed[at // 32] >> (at % 32) & 1) for at in (end, other)] == [0, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", '<|tool_call>call:f{a:{x:1.5,y:[<|"|>s<|"|>,null,{}]},b:{k:[]}}<tool_call|>'),
        ("gemma4", '<|tool_call>call:f{b:{}}<tool_call|><|tool_call>call:f{a:<|"|>"\n<|"|>}<tool_call|>'),
        ("llama4_pythonic", '<|python_start|>[f(a={"x": [1.5, null]}, b={"k": []}), f()]<|python_end|>'),
        ("llama4_pythonic", "[f(b={})]"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"b": {}, "c": 1}}\n</tool_call>'),
    ],
)
def test_what_a_schema_leaves_open(name: str, text: str) -> None:
    tools = {"f": {"properties": {"a": {}, "b": {"type": "object", "additionalProperties": {"type": "array"}}}}}
    for are_special in (False, True):
        assert takes(tokenizer_of(name, are_special), text, tools)
        check_calls(tokenizer_of(name, are_special), text, tools, parallel=True)


def test_what_has_no_grammar() -> None:
    assert tokenizer_of("hermes", False).tool_grammar({}) is None
    assert byte_tokenizer(None).tool_grammar(TOOLS) is None


STRANGE: list[dict[str, Any]] = [
    {"properties": {"a": {"allOf": [{"type": "string"}, {"maxLength": 2}]}}, "required": ["a"]},
    {"allOf": [{"properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"]}]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"]}}},
    {
        "properties": {"a": {"$ref": "urn:x"}},
        "required": ["a"],
        "$defs": {"y": {"$id": "urn:x", "type": "string", "maxLength": 2}},
    },
    {
        "oneOf": [
            {"properties": {"a": {"const": "5"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
            {"properties": {"a": {"const": "true"}}, "required": ["a"]},
        ]
    },
    {
        "oneOf": [
            {"properties": {"a": {"const": 1}, "b": {"type": "string", "maxLength": 1}}, "required": ["a", "b"]},
            {"properties": {"a": {"const": 2}}, "required": ["a"]},
        ]
    },
    {"properties": {"a": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False}}},
    {"properties": {"a": {"type": "string", "pattern": "^x|y$", "maxLength": 3}}, "required": ["a"]},
    {"properties": {"a": {"type": "string", "pattern": "(^(x|yy)$)|(^z$)", "maxLength": 3}}, "required": ["a"]},
]


@pytest.mark.every(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schema", STRANGE)
def test_schemas_whose_parts_lie_elsewhere(name: str, schema: dict[str, Any], random_cases: Any) -> None:
    tokenizer, tools = tokenizer_of(name, True), {"f": {"type": "object", "unevaluatedProperties": False, **schema}}
    constraint = forced(tokenizer, tools, parallel=False, max_thoughts=0)
    for seed in range(random_cases(3, 60)):
        text = wander(tokenizer, constraint, random.Random(f"{name} {seed}"))
        check_calls(tokenizer, text, tools, parallel=False)


def test_a_pattern_means_the_same_where_it_is_not_written_as_json() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^x|y$"}}, "required": ["a"]}
    for text, does_fit in (("xa", True), ("ay", True), ("axa", False), ("yx", False)):
        call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert takes(tokenizer_of("qwen3_coder", True), call, {"f": schema}) == does_fit
        assert takes(tokenizer_of("hermes", True), call_of(text), {"f": schema}) == does_fit


def call_of(text: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {{"a": "{text}"}}}}\n</tool_call>'


def test_what_a_format_cannot_hold_is_named_where_it_may_be_left_out() -> None:
    grammar = tokenizer_of("llama4_pythonic", True).tool_grammar({"f": {"properties": {"a b": {}, "c": {}}}})
    assert grammar is not None
    assert [str(one) for one in grammar.widened["f"]] == ["#/properties/a b/properties"]
    anchored = {"properties": {"a": {"type": "string", "pattern": "^(?:(?:x|yy)$|z)"}}}
    for name, said in (("qwen3_coder", ["#/properties/a/pattern"]), ("hermes", [])):
        grammar = tokenizer_of(name, True).tool_grammar({"f": anchored})
        assert grammar is not None
        assert [str(one) for one in grammar.widened.get("f", ())] == said
