"""How requests name constraints, and where in an answer they begin."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.core import Constraint, ConstraintKind
from ktransformers.errors import ConfigError
from ktransformers.server.answers.constraints import beside_tools, constraint_of, reasoning_of
from ktransformers.tokenizer import Tokenizer, load_tokenizer
from ktransformers.weights.gguf.file import open_gguf

SCHEMA = {"type": "object"}
OF_SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
ANY_OBJECT = Constraint(ConstraintKind.JSON_OBJECT)
GRAMMAR = Constraint(ConstraintKind.GRAMMAR, 'start: "a"')
CHOICE = Constraint(ConstraintKind.CHOICE, '["a", "b"]')
REGEX = Constraint(ConstraintKind.REGEX, "a+")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(None, open_gguf(sorted(DEMO_MODEL_PATH.glob("*.gguf"))[0]).metadata)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OF_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, OF_SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, OF_SCHEMA),
        ({"text.format": {"type": "text"}}, None),
        ({"text.format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}, OF_SCHEMA),
        ({"output_config.format": {"type": "json_schema", "schema": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_fallback": True}}, OF_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, REGEX),
        ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GRAMMAR),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {}}, None),
        ({"guided_json": SCHEMA, "guided_regex": None}, OF_SCHEMA),
        ({"guided_regex": "a+"}, REGEX),
        ({"guided_choice": ["a", "b"]}, CHOICE),
        ({"guided_grammar": 'start: "a"'}, GRAMMAR),
        ({"json_schema": SCHEMA}, OF_SCHEMA),
        ({"grammar": 'start: "a"'}, GRAMMAR),
        ({"grammar": ""}, None),
        ({"format": "json"}, ANY_OBJECT),
        ({"format": SCHEMA}, OF_SCHEMA),
        ({"format": ""}, None),
        ({"temperature": 1, "response_format": None}, None),
    ],
)
def test_every_name_means_the_same(body: dict[str, Any], wanted: Constraint | None) -> None:
    assert constraint_of(body) == wanted


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json and guided_regex both"),
        ({"response_format": {"type": "json_object"}, "format": "json"}, "response_format and format both"),
        ({"response_format": {"type": "json_schema"}}, "schema is missing"),
        ({"text.format": {"type": "json_schema", "name": "x"}}, "^text.format.schema is missing"),
        ({"response_format": {"type": "structural_tag"}}, "must be text, json_object or json_schema"),
        ({"response_format": "json"}, "must be text, json_object or json_schema"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs: .*exactly one"),
        ({"structured_outputs": {"shape": "a"}}, "structured_outputs: .*exactly one"),
        ({"structured_outputs": []}, "must be an object"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "whitespace_pattern is not supported"),
        ({"guided_choice": []}, "guided_choice: .*empty"),
        ({"guided_choice": "ab"}, "guided_choice: .*list of strings"),
        ({"format": 3}, "format: .*text, or a dict"),
    ],
)
def test_what_is_no_constraint_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        constraint_of(body)


def test_where_reasoning_ends(tokenizer: Tokenizer) -> None:
    def of(prompt: str, max_tokens: int | None = None) -> Any:
        return reasoning_of(tokenizer, tokenizer.encode(prompt), max_tokens)

    inside, before = of("<|im_start|>assistant\n<think>\n"), of("<|im_start|>assistant\n", 9)
    assert (inside.is_open, inside.open_id, inside.closing, inside.max_tokens) == (True, None, "</think>", None)
    assert (before.is_open, before.open_id, before.max_tokens) == (False, tokenizer.token_id("<think>"), 9)
    assert re.search(inside.end, inside.closing)
    assert of("<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    begun = tokenizer.encode("<|im_start|>assistant\n<think>\nFirst")
    assert reasoning_of(tokenizer, begun, is_inside=True) == inside
    assert reasoning_of(Tokenizer(None), [1]) is None


def test_a_call_is_told_by_its_first_token(tokenizer: Tokenizer) -> None:
    assert beside_tools(tokenizer, REGEX).exit_ids == (tokenizer.token_id("<tool_call>"),)
