"""Schemas as zod 4, pydantic 2, msgspec and TypeBox wrote them: each is followed, in answers and in forced calls.

written.jsonl was made by these programs (`z.toJSONSchema`, `model_json_schema`, `msgspec.json.schema`), which took the
valid instances beside each schema; where answers are not held to all of it was looked up by hand. jsonschema judges.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ktransformers.core import Constraint, ConstraintKind
from ktransformers.tokenizer.schemas import core_schema
from tests.support.checks.forced_calls import called, grammars_of, takes, tokenizer_of

pytest.importorskip("llguidance")

WRITTEN = [
    json.loads(line) for line in Path(__file__).with_name("written.jsonl").read_text(encoding="utf-8").splitlines()
]
NAMES = [one["name"] for one in WRITTEN]
FORMATS = ["hermes", "qwen3_coder", "gemma4", "llama4_pythonic"]
BY_OPENAPI = "zod nullable openapi-3.0"  # where `nullable` says more than JSON Schema's keywords


def validator(case: dict[str, Any]) -> Any:
    """By the draft that the program writes where it does not say it."""
    old = {"openapi-3.0": jsonschema.Draft4Validator, "tuple": jsonschema.Draft7Validator}
    default = old.get(case["name"].split()[-1], jsonschema.Draft202012Validator)
    return jsonschema.validators.validator_for(case["schema"], default=default)


def tool_of(schema: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Parameters that have the schema, or a value of it, and where it is in them."""
    core = core_schema(schema).schema
    core = core["$defs"]["n0"] if "$ref" in core else core
    if all(one.get("type") == "object" for one in core.get("anyOf", [core])):
        return schema, "#"
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in (*shared, "$schema")}
    return {"type": "object", "properties": {"value": inner}, "required": ["value"], **shared}, "#/properties/value"


def spellings(value: Any) -> Iterator[Any]:
    """The value with the keys of objects in every order."""
    if isinstance(value, dict):
        for names in permutations(value):
            for inner in product(*(list(islice(spellings(value[name]), 6)) for name in names)):
                yield dict(zip(names, inner, strict=True))
    elif isinstance(value, list):
        yield from map(list, product(*(list(islice(spellings(one), 6)) for one in value)))
    else:
        yield value


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def drawn(constraint: Constraint, name: str, draw: random.Random) -> str | None:
    """An answer of a model that knows nothing but likes to end things; None for one that got too long."""
    tokenizer = tokenizer_of(name, True)
    matcher, ids, ends = grammars_of(tokenizer).matcher(constraint), list[int](), tokenizer.eos_token_ids
    while len(ids) < 500:
        words = matcher.allowed()
        may = [at for at in range(tokenizer.vocab_size) if words[at // 32] >> (at % 32) & 1]
        closing = [at for at in may if at in ends or tokenizer.token_bytes(at) in (b'"', b"]", b"}", b"<", b"\n", b")")]
        plain = [at for at in may if tokenizer.token_bytes(at).isalnum()]
        token_id = draw.choice(closing if closing and draw.random() < 0.6 else plain if plain else may)
        if token_id in ends:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token_id)
        matcher.consume([token_id])
    return None


def test_there_are_enough_of_each_program() -> None:
    assert len(WRITTEN) >= 88
    for program in ("zod", "pydantic", "msgspec", "typebox"):
        assert sum(name.startswith(program) for name in NAMES) >= 15


@pytest.mark.every(5)
@pytest.mark.parametrize("case", WRITTEN, ids=NAMES)
def test_answers_follow_it(case: dict[str, Any], random_cases: Any) -> None:
    core = core_schema(case["schema"])
    assert [str(one) for one in core.widened] == case["widened"]
    assert core_schema(core.schema).widened == ()  # what is left can all be followed
    tokenizer, constraint = tokenizer_of("hermes", True), Constraint.of({"json": case["schema"]})
    for value in case["valid"]:
        matchers = [(text, grammars_of(tokenizer).matcher(constraint)) for text in map(written, spellings(value))]
        for text, matcher in matchers:
            matcher.consume(tokenizer.encode(text))
        assert any(_accepts(matcher, tokenizer) for _, matcher in matchers), value
    check = validator(case)(case["schema"])
    for seed in range(random_cases(2, 40)):
        text = drawn(constraint, "hermes", random.Random(f"{case['name']} {seed}"))
        if text is not None and not case["widened"] and case["name"] != BY_OPENAPI:
            check.validate(json.loads(text))


def _accepts(matcher: Any, tokenizer: Any) -> bool:
    try:
        return bool((matcher.allowed() & grammars_of(tokenizer).ends).any())
    except Exception:  # noqa: BLE001  # not this order of keys
        return False


@pytest.mark.every(5)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", WRITTEN, ids=NAMES)
def test_forced_calls_follow_it(case: dict[str, Any], name: str, random_cases: Any) -> None:
    schema, at = tool_of(case["schema"])
    tokenizer = tokenizer_of(name, True)
    grammar = tokenizer.tool_grammar({"f": schema}, parallel=False)
    assert grammar is not None
    constraint = Constraint(ConstraintKind.TOOL_CALLS, grammar.text)
    grammars_of(tokenizer).check(constraint)
    said = [str(one) for one in grammar.widened.get("f", ())]
    expected = [place.replace("#", at, 1) if "#/$defs" not in place else place for place in case["widened"]]
    assert said[: len(expected)] == expected
    assert name != "hermes" or said == expected
    for value in case["valid"]:
        arguments = value if at == "#" else {"value": value}
        if name == "hermes":
            texts = (
                f'<tool_call>\n{{"name": "f", "arguments": {written(one)}}}\n</tool_call>'
                for one in spellings(arguments)
            )
            assert any(takes(tokenizer, text, {"f": schema}) for text in texts), value
    check = validator(case)(schema)
    for seed in range(random_cases(1, 20)):
        text = drawn(constraint, name, random.Random(f"{case['name']} {name} {seed}"))
        if text is not None and not said and case["name"] != BY_OPENAPI:
            ((_, made),) = called(tokenizer, text, {"f": schema})
            check.validate(made)
