"""What becomes of each keyword: dropped, followed, widened or refused. Expectations are written by hand."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from ktransformers.core import Constraint
from ktransformers.tokenizer.schemas import SchemaError, core_schema
from tests.support.checks.forced_calls import grammars_of, tokenizer_of

pytest.importorskip("llguidance")

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
OBJECT = {"type": "object"}
NOISE = {
    "title": "T",
    "description": "d",
    "default": 1,
    "examples": [1],
    "deprecated": True,
    "readOnly": True,
    "$comment": "c",
    "nullable": True,
    "contentEncoding": "base64",
    "discriminator": {"propertyName": "x"},
    "x-order": 3,
    "if": {},
    "then": None,
    "required": None,
    "minimum": None,
    "enum": None,
    "markdownDescription": "m",
}


def object_of(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        **({"required": list(required)} if required else {}),
        "additionalProperties": False,
    }


SAME = [
    (NOISE, {}),
    ({"type": "string", **NOISE}, STRING),
    *(({"type": "string", "format": name}, STRING) for name in ("password", "binary", "int32", "jwt", "iri", "shoe")),
    ({"type": "string", "format": "uuid"}, {"type": "string", "format": "uuid"}),
    ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
    ({"type": "array", "contains": {}, "minContains": 2}, {"type": "array", "minItems": 2}),
    ({"type": "array", "contains": STRING, "minContains": 0}, {"type": "array"}),
    *(({**OBJECT, "propertyNames": names}, OBJECT) for names in (STRING, {}, True, {"$comment": "any"})),
    (
        {**OBJECT, "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER, "required": ["b"]},
        object_of(("b",), a=INTEGER, b=INTEGER),
    ),
    (
        {**OBJECT, "propertyNames": {"pattern": "^k"}, "additionalProperties": INTEGER},
        {**OBJECT, "patternProperties": {"^k": INTEGER}, "additionalProperties": False},
    ),
    ({**object_of(a=STRING, b={"not": {}}), "minProperties": 0}, object_of(a=STRING)),
    ({**object_of(("a",), a=STRING), "minProperties": 1, "maxProperties": 1}, object_of(("a",), a=STRING)),
    (
        {**object_of(("a",), a=STRING, b=STRING), "dependentRequired": {"a": ["b"]}},
        object_of(("a", "b"), a=STRING, b=STRING),
    ),
    ({**object_of(a=STRING, b=STRING), "dependentRequired": {"a": []}}, object_of(a=STRING, b=STRING)),
    ({**object_of(a=STRING, b=STRING), "not": {"required": ["b"]}}, object_of(a=STRING)),
    (
        {"not": {"type": ["string", "object", "array"]}},
        {"anyOf": [{"type": kind} for kind in ("number", "boolean", "null")]},
    ),
    ({"if": True, "then": STRING, "else": INTEGER}, STRING),
    ({"anyOf": [{"const": "a"}, {"const": "b"}, {"not": {}}]}, {"enum": ["a", "b"]}),
    ({"oneOf": [STRING, INTEGER]}, {"anyOf": [STRING, INTEGER]}),
    ({"allOf": [{"minimum": 1}, {"maximum": 5}], "type": "integer"}, {"type": "integer", "minimum": 1, "maximum": 5}),
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 0}),
    ({"type": "number", "maximum": 1.7976931348623157e308}, NUMBER),
    ({"type": "STRING"}, STRING),
    ({"type": ["integer", "number"]}, NUMBER),
    ({"type": "string", "enum": ["a", 1, None]}, {"enum": ["a"]}),
    ({"type": "integer", "enum": [1, 5, 9], "maximum": 6}, {"enum": [1, 5]}),
    (
        {"type": "array", "items": [STRING, INTEGER], "additionalItems": False},
        {"type": "array", "prefixItems": [STRING, INTEGER], "items": False},
    ),
    (
        {
            "allOf": [{**OBJECT, "properties": {"a": STRING}}, {"properties": {"b": INTEGER}}],
            "unevaluatedProperties": False,
        },
        object_of(a=STRING, b=INTEGER),
    ),
    (
        {**object_of(foo=INTEGER), "patternProperties": {"^f": {"type": "integer", "minimum": 3}}},
        {
            **object_of(foo={"type": "integer", "minimum": 3}),
            "patternProperties": {"^f": {"type": "integer", "minimum": 3}},
        },
    ),
    ({"$ref": "urn:t", "$defs": {"t": {"$id": "urn:t", "type": "string"}}}, STRING),
    ({"$ref": "#there", "$defs": {"t": {"$anchor": "there", "type": "string"}}}, STRING),
    ({"$ref": "#/components/schemas/T", "components": {"schemas": {"T": STRING}}}, STRING),
]


@pytest.mark.parametrize(("schema", "core"), SAME)
def test_what_can_be_said_otherwise_is(schema: dict[str, Any], core: dict[str, Any]) -> None:
    made = core_schema(schema)
    assert (made.schema, made.widened) == (core, ())


WIDER = [
    ({"type": "array", "items": STRING, "uniqueItems": True}, {"type": "array", "items": STRING}, "#/uniqueItems"),
    (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
        "#/uniqueItems",
    ),
    ({"type": "array", "contains": INTEGER}, {"type": "array", "minItems": 1}, "#/contains"),
    ({"type": "array", "maxItems": 1000000}, {"type": "array"}, "#/maxItems"),
    ({"type": "string", "pattern": "^(?!a)b+$"}, {"type": "string", "pattern": "^b+$"}, "#/pattern"),
    (
        {"type": "string", "pattern": "^(?=.*\\d)[a-z\\d]+(?<!1)$"},
        {"type": "string", "pattern": "^[a-z\\d]+$"},
        "#/pattern",
    ),
    ({"type": "string", "pattern": "\\bword\\b"}, {"type": "string", "pattern": "word"}, "#/pattern"),
    ({"type": "string", "pattern": "^(a)\\1$"}, STRING, "#/pattern"),
    ({"type": "string", "pattern": "[(?!]+(?:x(?!y))?"}, {"type": "string", "pattern": "[(?!]+(?:x)?"}, "#/pattern"),
    ({"type": "number", "multipleOf": 12345.678}, NUMBER, "#/multipleOf"),
    ({"type": "number", "minimum": -3.4e38}, NUMBER, "#/minimum"),
    ({"type": "string", "not": {"const": "x"}}, STRING, "#/not"),
    ({"oneOf": [INTEGER, NUMBER]}, {"anyOf": [INTEGER, NUMBER]}, "#/oneOf"),
    ({**object_of(a=STRING), "if": {"required": ["a"]}, "then": {"minProperties": 1}}, object_of(a=STRING), "#/if"),
    (
        {**object_of(a=STRING, b=STRING), "dependentRequired": {"a": ["b"]}},
        object_of(a=STRING, b=STRING),
        "#/dependentRequired",
    ),
    (
        {**object_of(a=STRING), "dependentSchemas": {"a": {"minProperties": 2}}},
        object_of(a=STRING),
        "#/dependentSchemas",
    ),
    ({**object_of(a=STRING), "dependencies": {"a": ["b"]}}, object_of(a=STRING), "#/dependencies"),
    ({**object_of(a=STRING, b=STRING), "minProperties": 1}, object_of(a=STRING, b=STRING), "#/minProperties"),
    ({**object_of(a=STRING, b=STRING), "maxProperties": 1}, object_of(a=STRING, b=STRING), "#/maxProperties"),
    ({**OBJECT, "propertyNames": {"format": "email"}}, OBJECT, "#/propertyNames"),
    (
        {**OBJECT, "patternProperties": {"^a": STRING, "b$": INTEGER}, "additionalProperties": False},
        {**OBJECT, "patternProperties": {"(^a)|(b$)": {}}, "additionalProperties": False},
        "#/patternProperties",
    ),
    (
        {"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False, **OBJECT},
        {**OBJECT, "properties": {"a": {}}},
        "#/unevaluatedProperties",
    ),
    ({"type": "date"}, {}, "#/type"),
    (
        {"properties": {"a/b": {"type": "array", "uniqueItems": True}}, **OBJECT},
        {**OBJECT, "properties": {"a/b": {"type": "array"}}},
        "#/properties/a~1b/uniqueItems",
    ),
]


@pytest.mark.parametrize(("schema", "core", "place"), WIDER)
def test_what_cannot_be_followed_is_left_out_and_named(schema: Any, core: Any, place: str) -> None:
    made = core_schema(schema)
    assert (made.schema, [str(one) for one in made.widened]) == (core, [place])
    text = json.dumps(schema)
    grammars_of(tokenizer_of("hermes", True)).check(Constraint.of({"json": text}))


def chained(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": STRING}}


def nested(depth: int, keyword: str) -> Any:
    schema: Any = STRING
    for _ in range(depth):
        schema = {keyword: [schema, {"type": "null"}]} if keyword.endswith("Of") else {"type": "array", keyword: schema}
    return schema


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
REFUSED = [
    (False, "#", "schema"),
    ({"not": {}}, "#", "not"),
    ({"enum": []}, "#", "enum"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "#", "maximum"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "#", "maxLength"),
    (object_of(("b",), a=STRING), "#/additionalProperties", "schema"),
    ({"allOf": [STRING, INTEGER]}, "#/allOf/1", "type"),
    ({"$ref": "#"}, "#", "$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/b", "$ref"),
    ({"anyOf": [STRING, {"$ref": "#"}]}, "#/anyOf/1", "$ref"),
    ({"allOf": [{"$ref": "#"}], "type": "string"}, "#/allOf/0", "$ref"),
    ({**OBJECT, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", "$ref"),
    ({**OBJECT, "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}, "#/$defs/node", "$ref"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#", "$ref"),
    ({"$ref": "#/$defs/gone"}, "#", "$ref"),
    ({"$ref": "https://example.org/schema"}, "#", "$ref"),
    ({**OBJECT, "properties": {f"p{i}": STRING for i in range(500)}}, "#", "properties"),
    ({"anyOf": [object_of(**{f"p{i}": STRING for i in range(400 + n)}) for n in range(4)]}, "#", "properties"),
    ({"type": "array", "minItems": 1000000}, "#", "minItems"),
    (chained(1000), "#/$defs/d200", "schema"),
    (nested(300, "items"), "#" + "/items" * 200, "schema"),
    (nested(250, "anyOf"), "#" + "/anyOf/0" * 200, "schema"),
    ({"properties": []}, "#", "properties"),
    ({"type": "object", "required": "a"}, "#", "required"),
    ({"type": "string", "pattern": 3}, "#", "pattern"),
    ({"type": "string", "maxLength": "x"}, "#", "maxLength"),
    ({"type": "number", "multipleOf": 0}, "#", "multipleOf"),
    ({"anyOf": []}, "#", "anyOf"),
    ({"items": 3, "type": "array"}, "#/items", "schema"),
]


@pytest.mark.parametrize(("schema", "at", "keyword"), REFUSED)
def test_what_has_no_answer_is_refused_with_its_place(schema: Any, at: str, keyword: str) -> None:
    with pytest.raises(SchemaError) as raised:
        core_schema(schema)
    assert raised.value.keyword == keyword
    assert raised.value.at == at
    assert len(str(raised.value)) < 600


def test_499_properties_may_be_left_out() -> None:
    names = [f"p{i}" for i in range(499)]
    grammars, tokenizer = grammars_of(tokenizer_of("hermes", True)), tokenizer_of("hermes", True)
    matcher = grammars.matcher(Constraint.of({"json": {**OBJECT, "properties": dict.fromkeys(names, STRING)}}))
    for token_id in tokenizer.encode('{"p0": "x", "p7": "y", "p498": "z", "else": 1}'):
        assert matcher.allowed()[token_id // 32] >> (token_id % 32) & 1
        matcher.consume([token_id])
    assert (matcher.allowed() & grammars.ends).any()


def test_what_only_an_instance_can_tell_is_a_superset() -> None:
    """Whatever an original takes its core takes: jsonschema over both."""
    instances: list[Any] = [
        None,
        True,
        0,
        1,
        3,
        -1,
        2.5,
        12345.678,
        "",
        "a",
        "b",
        "bb",
        "x",
        "word",
        "a@b",
        [],
        [1],
        [1, 1],
    ]
    instances += [
        [1, 2, 3, 1],
        ["a"],
        ["a", "a"],
        {},
        {"a": "x"},
        {"a": "x", "b": "y"},
        {"b": 1},
        {"ab": 1},
        {"foo": 5},
    ]
    instances += [{"k": 3}, {"a/b": [1, 1]}, {"foo": 1}, {"a": 3, "b": 1}]
    for schema, *_ in (*SAME, *WIDER):
        without_null = {key: value for key, value in schema.items() if value is not None}
        if ("type" in schema and schema["type"] in ("date", "STRING")) or schema.get("exclusiveMinimum") is True:
            continue  # no JSON Schema
        draft = jsonschema.Draft7Validator if "additionalItems" in schema else jsonschema.Draft202012Validator
        original, core = draft(without_null), jsonschema.Draft202012Validator(core_schema(schema).schema)
        for value in instances:
            assert core.is_valid(value) or not original.is_valid(value), (schema, value)
            if (schema, core_schema(schema).schema) in SAME:
                assert core.is_valid(value) == original.is_valid(value), (schema, value)


KEYWORDS = sorted({key for schema, *_ in (*SAME, *WIDER, *REFUSED) if isinstance(schema, dict) for key in schema})
KEYWORDS += ["$dynamicRef", "$recursiveRef", "$anchor", "additionalItems", "then", "else", "maxContains", "definitions"]


def junk(draw: random.Random, depth: int = 0) -> Any:
    """A schema with keywords that have any value, the right kind of one more often."""
    if depth > 3 or draw.random() < 0.2:
        return draw.choice(
            [True, False, None, 0, -1, 2.5, 1e300, "", "a", "#", "#/$defs/a", "(", [], {}, ["a"], [1, None]]
        )
    made: dict[str, Any] = {}
    for keyword in draw.sample(KEYWORDS, draw.randrange(5)):
        inner = [junk(draw, depth + 1) for _ in range(draw.randrange(3))]
        named = dict(zip(["a", "b/c", "^a"], inner, strict=False))
        made[keyword] = draw.choice([inner, named, junk(draw, depth + 1), "string", "object", ["array", "object"], 3])
    return made


def test_whatever_comes_is_followed_or_refused(random_cases: Any) -> None:
    followed = 0
    for seed in range(random_cases(600, 60_000)):
        schema = junk(random.Random(seed))
        for is_object in (False, True):
            try:
                core = core_schema(schema, is_object=is_object)
            except SchemaError:
                continue
            except Exception as error:
                error.add_note(f"seed {seed}: {json.dumps(schema)}")
                raise
            followed += 1
            assert core_schema(core.schema).widened == (), (seed, schema)
            grammars_of(tokenizer_of("hermes", True)).check(Constraint.of({"json": core.text}))
    assert followed > 100
