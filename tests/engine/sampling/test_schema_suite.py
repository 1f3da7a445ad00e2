"""The JSON Schema Test Suite against constraints: what is taken is held to; where it is widened no instance is lost.

A constraint has one way to write a value: numbers that are whole without a fraction, keys in the order of the schema.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.core import Constraint, FinishReason, SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.tokenizer import Tokenizer, load_tokenizer
from ktransformers.tokenizer.grammars import Grammars
from ktransformers.tokenizer.schemas import core_schema
from ktransformers.weights.gguf.file import open_gguf
from tests.support.engines.fake_runner import FakeRunner, ngram_logits
from tests.support.engines.sequential import Session
from tests.support.servers.schema_suite import Case, suite

VOCAB, END = 2560, 2553
MAX_TOKENS = 120  # most schemas of the suite leave room for answers of any length; those that get so long are cut off


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(None, open_gguf(sorted(DEMO_MODEL_PATH.glob("*.gguf"))[0]).metadata)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[Case]:
    return suite(request.config.cache.mkdir("schema_suite"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return tokenizer.grammars(VOCAB, (END,))


@pytest.fixture(scope="module")
def taken(cases: list[Case], grammars: Grammars) -> list[Case]:
    return [case for case in cases if is_taken(grammars, case.schema)]


def is_taken(grammars: Grammars, schema: Any) -> bool:
    try:
        grammars.check(Constraint.of({"json": schema}))
    except ConfigError:
        return False
    return True


def spellings(value: Any) -> Iterator[Any]:
    """The value with its keys in every order, whole numbers as integers."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for inner in itertools.product(*(list(spellings(value[name])) for name in names)):
                yield dict(zip(names, inner, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(spellings(one)) for one in value)))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value


def follows(grammars: Grammars, schema: Any, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = grammars.matcher(Constraint.of({"json": schema}))
    matcher.consume(grammars.tokenizer.encode(text, add_special_tokens=False))
    try:
        return bool((matcher.allowed() & grammars.ends).any())
    except ConfigError:
        return False


def test_instances_are_told_apart_as_the_suite_does(
    cases: list[Case], taken: list[Case], grammars: Grammars, random_cases: Callable[[int, int], int]
) -> None:
    print(f"{len(taken)} schemas of the suite are taken, {len(cases) - len(taken)} refused")
    assert len(taken) > 320  # fewer would say that much is refused which was not
    whole = [case for case in taken if not core_schema(case.schema).widened]
    assert len(whole) > 220  # and fewer here that much is not held to which was
    step = random_cases(4, 1)
    wrong = []
    for case in taken[::step]:
        for value, is_valid in case.instances:
            # For the suite a format is a remark; here it is followed.
            is_left_out = is_valid and case.name.startswith("format:")
            texts = [json.dumps(one, ensure_ascii=False) for one in spellings(value)]
            is_left_out = is_left_out or case.name.startswith("vocabulary:") or (not is_valid and case not in whole)
            if any(follows(grammars, case.schema, text) for text in texts) != is_valid and not is_left_out:
                wrong.append((case.name, value, is_valid))
    assert not wrong


def test_answers_validate(taken: list[Case], tokenizer: Tokenizer, random_cases: Callable[[int, int], int]) -> None:
    step, num_seeds = random_cases(4, 1), random_cases(1, 4)
    num_whole = num_all = 0
    for number, case in enumerate(taken[::step]):
        for seed in range(num_seeds):
            text, reason = answer(tokenizer, case.schema, 1000 * number + seed)
            num_all += 1
            if reason is FinishReason.STOP and not core_schema(case.schema).widened:
                num_whole += 1
                jsonschema.Draft202012Validator(case.schema).validate(json.loads(text))
    print(f"{num_whole} of {num_all} answers came to their end")
    assert num_whole > num_all // 4


def answer(tokenizer: Tokenizer, schema: Any, seed: int) -> tuple[str, FinishReason | None]:
    """Of a model that knows nothing."""
    hashed = ngram_logits(VOCAB)

    def logits(prefix: list[int]) -> np.ndarray:
        row: np.ndarray = hashed(prefix)
        return row

    session = Session(FakeRunner(logits, VOCAB, 4096), chunk_size=64, eos_token_ids=(END,), tokenizer=tokenizer)
    params = SamplingParams(seed=seed, constraint={"json": schema}, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]
    events = list(session.generate([1, 2, 3], params))
    return "".join(event.text for event in events), events[-1].finish_reason
