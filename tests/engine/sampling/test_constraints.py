"""Answers that must look like something: they do, whatever the logits say, and others in the batch do not notice."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktransformers.cache.paged import PagedCache
from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.core import Constraint, ConstraintKind, FinishReason, ReasoningSpec, SamplingParams, TokenEvent
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.sampling.constraints import AnswerMask, mask_of
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.executor_parts import ExecutorParts
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import ConfigError
from ktransformers.tokenizer import Tokenizer, load_tokenizer
from ktransformers.tokenizer.grammars import MAX_CONSTRAINT_CHARS, Grammars, Matcher
from ktransformers.weights.gguf.file import open_gguf
from tests.support.engines.fake_runner import FakeRunner, ngram_logits
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.sequential import Session

DEMO = EngineConfig(gguf_path=sorted(DEMO_MODEL_PATH.glob("*.gguf"))[0], cpu_infer=1)
VOCAB, END = 2560, 2553
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    assert DEMO.gguf_path is not None
    return load_tokenizer(None, open_gguf(DEMO.gguf_path).metadata)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return tokenizer.grammars(VOCAB, (END,))


def wander(tokenizer: Tokenizer, params: SamplingParams, bias: int | None = None) -> list[TokenEvent]:
    """The answer of a model that knows nothing. bias: a token that it would always choose."""
    hashed = ngram_logits(VOCAB)

    def logits(prefix: list[int]) -> np.ndarray:
        row = hashed(prefix)
        if bias is not None:
            row[bias] = 1000.0
        return row

    session = Session(FakeRunner(logits, VOCAB, 4096), chunk_size=64, eos_token_ids=(END,), tokenizer=tokenizer)
    return list(session.generate([1, 2, 3], params))


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def bounded(low: int, high: int, least: str, most: str) -> st.SearchStrategy[dict[str, int]]:
    pair = st.tuples(st.integers(low, high), st.integers(0, 6))
    return pair.map(lambda drawn: {least: drawn[0], most: drawn[0] + drawn[1]})


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.dictionaries(st.sampled_from(["a", "b c", "ä", 'q"', "n\\", "0"]), inner, max_size=4)

    def made(drawn: tuple[dict[str, Any], list[bool]]) -> dict[str, Any]:
        properties, wanted = drawn
        required = [name for name, is_wanted in zip(properties, wanted, strict=False) if is_wanted]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    # Nothing without an end: a model of random weights would go on to the end of its context.
    return st.tuples(names, st.lists(st.booleans(), min_size=4, max_size=4)).map(made)


LEAVES = st.one_of(
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"const": "x"}, {"enum": [1, "two", None, ["3"], {"4": 5}]}]
    ),
    bounded(0, 8, "minLength", "maxLength").map(lambda bounds: {"type": "string", **bounds}),
    bounded(-1000, 1000, "minimum", "maximum").map(lambda bounds: {"type": "integer", **bounds}),
    bounded(-9, 9, "minimum", "maximum").map(lambda bounds: {"type": "number", **bounds}),
    st.sampled_from(["^[a-c]{2,5}$", "^\\d+-\\w$", "^(x|yz){0,5}!$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"]).map(lambda f: {"type": "string", "format": f}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, bounded(0, 3, "minItems", "maxItems")).map(lambda d: {"type": "array", "items": d[0], **d[1]}),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@given(schema=SCHEMAS, is_referred=st.booleans(), seed=st.integers(0, 1 << 30))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_to_random_schemas_validate(
    tokenizer: Tokenizer, schema: dict[str, Any], is_referred: bool, seed: int
) -> None:
    if is_referred:
        schema = {"$ref": "#/$defs/it", "$defs": {"it": schema}}
    events = wander(tokenizer, SamplingParams(seed=seed, constraint={"json": schema}, max_tokens=3000))  # type: ignore[arg-type]
    assert events[-1].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(text_of(events)), schema)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"\d{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"regex": "(a/b|\\n|\n/)x"}, "(a/b|\n|\n/)x"),
        ({"choice": ["yes", 'no é"\n', "start: x"]}, 'yes|no é"\n|start: x'),
        ({"grammar": 'root ::= "a" [0-9]{1,3} "."'}, r"a[0-9]{1,3}\."),
        ({"grammar": 'start: "a" /[0-9]{1,3}/ "."'}, r"a[0-9]{1,3}\."),
    ],
)
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"top_p": 0.5, "top_k": 5, "logprobs": 3},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {7: 100.0}, "ignore_eos": True},
    ],
)
def test_every_way_of_sampling_keeps_to_it(
    tokenizer: Tokenizer, constraint: dict[str, Any], pattern: str, how: dict[str, Any]
) -> None:
    events = wander(tokenizer, SamplingParams(seed=1, constraint=constraint, max_tokens=200, **how))  # type: ignore[arg-type]
    assert re.fullmatch(pattern, text_of(events))
    assert (events[-1].finish_reason, events[-1].stop) == (FinishReason.STOP, END)


def test_an_end_comes_where_the_grammar_accepts(tokenizer: Tokenizer) -> None:
    """The model wants to end at once, and a control token, and text that looks like one."""
    params = SamplingParams(temperature=0, constraint={"regex": "ab{2,9}"}, max_tokens=50)  # type: ignore[arg-type]
    assert text_of(wander(tokenizer, params, bias=END)) == "abb"
    assert text_of(wander(tokenizer, replace(params, ignore_eos=True), bias=END)) == "abbbbbbbbb"
    tag = tokenizer.token_id("<tool_call>")
    wanted = replace(params, constraint=Constraint(ConstraintKind.REGEX, "x[<>_a-z]{12,14}"))
    assert tag not in [event.token_id for event in wander(tokenizer, wanted, bias=tag)]


def test_nothing_left_is_an_error_of_the_request(tokenizer: Tokenizer) -> None:
    params = SamplingParams(constraint={"regex": "ab"}, allowed_token_ids=(5,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exclude each other: no answer could begin"):
        wander(tokenizer, params)
    with pytest.raises(ConfigError, match="exclude each other: name an end token"):
        wander(tokenizer, replace(params, allowed_token_ids=tuple(tokenizer.encode("ab"))))
    # What comes later in an answer shows only then.
    begins = (*tokenizer.encode("a", add_special_tokens=False), END)
    with pytest.raises(ConfigError, match=r"no token may come next: .* exclude each other"):
        wander(tokenizer, replace(params, allowed_token_ids=begins))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": {"not": {}}}, "#: not: nothing fits this"),
        ({"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "no answer would end"),
        ({"json": {"$ref": "http://localhost/x"}}, "leads out of the schema"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"json": "{"}, "is no JSON"),
        ({"json": "3"}, "must be an object"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "no JSON"),
        ({"json": {"$ref": "#/$defs/d", "$defs": {"d": {"$ref": "#/$defs/d"}}}}, r"\$ref: it leads back to itself"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 100_000 + "a"}, "cannot be followed"),
        ({"grammar": "start: (((("}, "cannot be followed"),
        ({"grammar": "root ::= undefined"}, "grammar"),
        ({"grammar": "root ::= " + "(" * 50_000}, "grammar"),
        ({"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} /a/" for i in range(5000))}, "within each other"),
        ({"grammar": "\n".join(f"r{i} ::= r{i + 1} [a]" for i in range(5000))}, "within each other"),
        (
            {"json": {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}}},
            "leads too far",
        ),
        ({"regex": "a" * (MAX_CONSTRAINT_CHARS + 1)}, "at most"),
        ({"regex": r"[^\s\S]"}, "no answer can follow the regular expression any further: nothing fits it$"),
        ({"regex": "(a{1000}){1000}"}, "regular expression any further: .* too many expressions"),
        ({"grammar": 'start: "a" start'}, "no answer can follow the grammar any further: .*Too many items"),
        ({"grammar": 'root ::= "a" root'}, "no answer can follow the grammar any further: .*Too many items"),
        ({"json": {}, "regex": "a"}, "exactly one of"),
        ({"choice": []}, "must not be empty"),
        ({"regex": 3}, "must be text"),
    ],
)
def test_what_cannot_be_followed_is_named(grammars: Grammars, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        grammars.check(Constraint.of(wanted))
    assert len(str(raised.value)) < 600


def test_constraints_need_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="no vocabulary"):
        Tokenizer(None).grammars(10, (1,)).check(Constraint(ConstraintKind.JSON_OBJECT))


class Walk:
    """A mask that is told tokens by their text."""

    def __init__(self, grammars: Grammars, **fields: Any):
        self.grammars = grammars
        made = mask_of(grammars, SamplingParams(**fields))
        assert made is not None
        self.mask: AnswerMask = made

    def add(self, *texts: str) -> Walk:
        for text in texts:
            for token_id in self.grammars.tokenizer.encode(text, add_special_tokens=False):
                self.mask.commit(token_id)
        return self

    def texts(self) -> set[str] | None:
        words = self.mask.allowed()
        if words is None:
            return None
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB])
        return {self.grammars.tokenizer.decode([int(i)], skip_special_tokens=False) for i in ids}


CLOSED = {"end": "</think>", "closing": "</think>", "drops_breaks": True}


def test_a_constraint_begins_behind_the_reasoning(grammars: Grammars) -> None:
    walk = Walk(grammars, constraint={"choice": ["7", "8"]}, reasoning=ReasoningSpec(is_open=True, **CLOSED))
    reasoning = walk.add("Well, ").texts()
    assert reasoning is not None
    assert len(reasoning) > 2000
    assert "<|im_end|>" not in reasoning
    assert walk.add("</think>").texts() == {"7", "8", "\n", "\n\n", "\r"}
    assert walk.add("\n").texts() >= {"7", "8"}  # type: ignore[operator]
    assert walk.add("7").texts() == {"<|im_end|>"}


def test_an_answer_may_open_its_reasoning_or_not(grammars: Grammars) -> None:
    rules = ReasoningSpec(open_id=grammars.tokenizer.token_id("<think>"), **CLOSED)
    params: dict[str, Any] = {"constraint": {"choice": ["7"]}, "reasoning": rules}
    assert Walk(grammars, **params).texts() == {"7", "<think>"}
    assert Walk(grammars, **params).add("7").texts() == {"<|im_end|>"}
    assert "7" in (Walk(grammars, **params).add("<think>", "hm", "</think>").texts() or ())
    assert len(Walk(grammars, **params).add("<think>", "hm").texts() or ()) > 2000
    none = replace(rules, max_tokens=0)
    assert Walk(grammars, **(params | {"reasoning": none})).texts() == {"7"}


def test_reasoning_that_is_too_long_is_ended(grammars: Grammars) -> None:
    rules = ReasoningSpec(is_open=True, max_tokens=2, **CLOSED)
    walk = Walk(grammars, reasoning=rules)
    assert walk.add("a").texts() is None
    assert walk.add("b").texts() == {"</think>"}
    assert walk.add("</think>").texts() is None
    assert Walk(grammars, reasoning=replace(rules, max_tokens=0)).texts() == {"</think>"}
    spelled = replace(rules, end="E N D", closing="E N D", max_tokens=1)
    walk = Walk(grammars, reasoning=spelled, constraint={"choice": ["7"]}).add("a")
    for _ in range(9):
        left = walk.texts()
        if left == {"7"} or left is None or len(left) > 1:
            break
        walk.add(*left)
    assert "7" in (walk.texts() or ())


def test_harmony_ends_its_reasoning_with_the_header_of_another_channel(grammars: Grammars) -> None:
    end = r"<\|channel\|>final[^<]*(<\|constrain\|>[^<]*)?<\|message\|>"
    rules = ReasoningSpec(end, "<|channel|>final<|message|>", is_open=True)
    for header in ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"):
        walk = Walk(grammars, constraint={"choice": ["7"]}, reasoning=rules)
        assert len(walk.add("<|channel|>analysis<|message|>So").texts() or ()) > 2000
        assert walk.add(header).texts() == {"7"}


def test_a_call_of_a_tool_is_free(grammars: Grammars) -> None:
    tag = grammars.tokenizer.token_id("<tool_call>")
    assert tag is not None
    walk = Walk(grammars, constraint=Constraint(ConstraintKind.CHOICE, '["7"]', exit_ids=(tag,)))
    assert walk.texts() == {"7", "<tool_call>"}
    assert walk.add("<tool_call>").texts() is None
    walk = Walk(grammars, constraint=Constraint(ConstraintKind.CHOICE, '["77"]', exit_ids=(tag,)))
    assert "<tool_call>" not in (walk.add("7").texts() or ())


class Engines:
    """The demo model twice: alone on a static cache, and paged."""

    def __init__(self) -> None:
        self.single: StaticEngine = static_engine(replace(DEMO, cache_lens=512))
        self.paged: Engine = build_engine(replace(DEMO, cache_lens=400 * 8), page_size=8, max_batch_size=8)

    def executor(self) -> PagedExecutor:
        paged = self.paged
        cache = PagedCache(paged.cache.shapes, 60, 8)
        runner = ModelRunner(ForwardPass(paged.executor.runner.model, paged.pool))  # type: ignore[attr-defined]
        grammars = paged.model.tokenizer.grammars(VOCAB, (END,))
        parts = ExecutorParts(mask_of=lambda start: mask_of(grammars, start.params))
        return PagedExecutor(runner, cache, paged.pool, VOCAB, parts)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.single.close()
    made.paged.close()


def test_a_batch_of_both_kinds_survives_preemption_and_loss(engines: Engines) -> None:
    """Each answer is what it is alone on the single engine, bit by bit, also when the engine dies on the way."""
    rules: list[dict[str, Any]] = [
        {"constraint": {"json": PERSON}},
        {},
        {"constraint": {"json_object": True}, "logprobs": 2, "repetition_penalty": 1.2},
        {"temperature": 0.0, "constraint": {"regex": "(ab|c)*d"}, "ignore_eos": True},
        {"temperature": 0.0},
        {
            "reasoning": ReasoningSpec("</think>", "</think>", is_open=True, max_tokens=7),
            "constraint": {"json": PERSON},
        },
    ]
    cases = [([5 + i] * (9 + i), SamplingParams(**{"seed": i, "max_tokens": 60, **one})) for i, one in enumerate(rules)]
    session = Session.of(engines.single)
    alone = [list(session.generate(prompt, params)) for prompt, params in cases]
    loop = PagedLoop(scheduler_config(engines.paged, num_pages=60, max_batch_size=8), engines.executor)
    names = [loop.add(prompt, params) for prompt, params in cases]
    for at in (9, 14):
        for _ in range(at):
            loop.step()
        loop.crash()
    loop.disturb(random.Random(1))
    for name, events in zip(names, alone, strict=True):
        assert loop.answers[name].token_ids == [event.token_id for event in events]
        assert loop.answers[name].logprobs == [event.logprobs for event in events]
        assert loop.answers[name].reason is events[-1].finish_reason
    jsonschema.validate(json.loads(text_of(alone[0])), PERSON)
    assert alone[0][-1].finish_reason is FinishReason.STOP


@dataclass
class StructuredOutputsParams:
    """As vLLM has it."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    disable_fallback: bool = True
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = False


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ({"constraint": {"regex": "ab"}}, {"regex": "ab"}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json": {"type": "object"}}),
        ({"structured_outputs": StructuredOutputsParams(choice=["a", "b"])}, {"choice": ["a", "b"]}),
        ({"guided_decoding": StructuredOutputsParams(regex="ab")}, {"regex": "ab"}),
        ({"guided_json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"guided_regex": "ab"}, {"regex": "ab"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"', "guided_json": None}, {"grammar": 'start: "a"'}),
    ],
)
def test_names_of_a_constraint(names: dict[str, Any], wanted: dict[str, Any]) -> None:
    params = SamplingParams(**names)
    assert params.constraint == Constraint.of(wanted)
    assert params == SamplingParams(constraint=Constraint.of(wanted))
    assert replace(params, seed=5).constraint == params.constraint
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice both"),
        ({"constraint": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "constraint and structured_out"),
        ({"guided_choice": []}, "guided_choice: choice must not be empty"),
        ({"guided_json": 3}, "guided_json: json must be text, or a dict"),
        ({"structured_outputs": 3}, "structured_outputs: a constraint has exactly one"),
        ({"structured_outputs": {"shape": 3}}, "structured_outputs: a constraint has exactly one"),
        (
            {"guided_decoding": StructuredOutputsParams(regex="a", disable_additional_properties=True)},
            "guided_decoding: disable_additional_properties is not supported",
        ),
        ({"constraint": 3}, "constraint must be a Constraint or a dict"),
    ],
)
def test_what_is_no_constraint(names: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**names)


def test_patterns_beside_properties_that_they_do_not_match(grammars: Grammars) -> None:
    grammars.check(Constraint.of({"json": {"properties": {"a": {}}, "patternProperties": {"^x-": {}, "^b": {}}}}))
    apart = {"properties": {"foo": {"type": "array"}}, "allOf": [{"patternProperties": {"f.o": {"minItems": 2}}}]}
    grammars.check(Constraint.of({"json": apart}))


class SlowGrammars(Grammars):
    """Reads no grammar before it is told to."""

    may_read = threading.Event()

    def matcher(self, constraint: Constraint) -> Matcher:
        self.may_read.wait()
        return super().matcher(constraint)


def test_grammars_that_are_being_read_hold_up_no_other_answer(grammars: Grammars, tokenizer: Tokenizer) -> None:
    slow = SlowGrammars(tokenizer, VOCAB, (END,))
    begun = Walk(grammars, constraint=Constraint(ConstraintKind.REGEX, "ab*"))
    assert "a" in (begun.texts() or ())  # its grammar is read
    waiting = [Walk(slow, constraint=Constraint(ConstraintKind.REGEX, "x")) for _ in range(8)]
    for walk in waiting:
        walk.mask.begin()
    found: list[set[str] | None] = []
    asking = threading.Thread(target=lambda: found.append(begun.add("a").texts()), daemon=True)
    asking.start()
    asking.join(timeout=30)
    were_answered = len(found)
    slow.may_read.set()
    assert were_answered == 1
    assert all("x" in (walk.texts() or ()) for walk in waiting)
