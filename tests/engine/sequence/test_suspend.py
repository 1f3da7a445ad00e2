"""Answers of one sequence that are left before a forward and taken up later, others having used the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from ktransformers.engine.sequence.generate import Control

from ktransformers.config import EngineConfig
from ktransformers.core import Pooling, ReasoningSpec, SamplingParams, TokenEvent
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.sequential import Session
from tests.support.models.demo import DEMO_GGUF

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"constraint": {"json": SCHEMA}},
    {"reasoning": ReasoningSpec("</think>", "</think>", is_open=True, max_tokens=5), "constraint": {"json": SCHEMA}},
    {"temperature": 1.0, "stop": ("a",), "min_tokens": 6, "ignore_eos": True},
    {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0.0, "pooling": Pooling.MEAN, "max_tokens": 1},
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    engine = static_engine(EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=256, chunk_size=16))
    yield Session.of(engine)
    engine.close()


def said(events: list[TokenEvent]) -> list[tuple[object, ...]]:
    return [(e.token_id, e.text, e.logprobs, e.finish_reason, e.stop, e.prompt_logprobs, e.embedding) for e in events]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_suspended_anywhere(session: Session, kind: dict[str, Any]) -> None:
    """After every forward of the prompt and of the answer, with another conversation in between."""
    prompt = [5 + i % 90 for i in range(40)]
    params = SamplingParams(**{"seed": 3, "max_tokens": 14, **kind})
    session.clear()
    expected = said(list(session.generate(prompt, params)))
    others = SamplingParams(temperature=0, max_tokens=2)
    session.clear()
    answer, events, rounds = session.begin(prompt, params), list[TokenEvent](), 0
    while not events or events[-1].finish_reason is None:
        allowed, forwards = rounds // 3 + 1, itertools.count()  # more and more: a prompt that is lost must come through
        events += session.run(answer, Control(should_suspend=lambda n=allowed, f=forwards: next(f) >= n))
        assert answer.is_suspended == (not events or events[-1].finish_reason is None)
        rounds += 1
        if rounds % 2:
            list(session.generate([9, 9, rounds], others))
    assert rounds > 2
    assert said(events) == expected
    assert events[-1].stats.completion_len == len([event for event in events if event.token_id is not None])
