"""Answers that are suspended after any step, half prefilled or half done, and go on when others have used the cache.

The oracle is one sequence without a scheduler.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import Pooling, ReasoningSpec, SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.scheduler.records import Request
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.engines.sequential import Session
from tests.support.engines.stepping import Stepping
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.recurrent_models import recurrent_model

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
PROMPT = [5 + i % 90 for i in range(40)]
OTHERS = SamplingParams(temperature=0, max_tokens=2, seed=1)
CHUNK_SIZE = 16
DEMO = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=256, chunk_size=CHUNK_SIZE)


@pytest.fixture(scope="module")
def single() -> Iterator[StaticEngine]:
    engine = static_engine(DEMO)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[BatchLoop[Engine]]:
    loop = BatchLoop(lambda report: build_engine(DEMO))
    yield loop
    loop.close()


def said(events: Sequence[TokenEvent]) -> list[tuple[object, ...]]:
    return [(e.token_id, e.text, e.logprobs, e.finish_reason, e.stop, e.prompt_logprobs, e.embedding) for e in events]


class Asked:
    """An answer by a callback."""

    def __init__(self, loop: BatchLoop[Engine], prompt: Sequence[int], params: SamplingParams, name: str | None = None):
        self._loop, self._heard, self.events = loop, queue.SimpleQueue[object](), list[TokenEvent]()
        self.request = EngineRequest(Request(prompt_ids=prompt, params=params), self._heard.put, name)
        loop.check(prompt, params)
        loop.submit([self.request])

    @property
    def is_over(self) -> bool:
        """As far as it has been heard."""
        while not self._heard.empty():
            self._hear(self._heard.get())
        return bool(self.events) and self.events[-1].finish_reason is not None

    def _hear(self, event: object) -> None:
        assert isinstance(event, TokenEvent), event
        self.events.append(event)

    def all(self) -> list[TokenEvent]:
        """All events, the last one too."""
        while not self.is_over:
            self._hear(self._heard.get(timeout=60))
        self._loop.abort([self.request])
        return self.events


def after_each_step(loop: BatchLoop[Engine], prompt: list[int], params: SamplingParams) -> tuple[list[TokenEvent], int]:
    """The events of an answer that is suspended after one more step, twice, then after two more ...; and how often."""
    asked, rounds = None, 0
    while asked is None or not asked.is_over:
        rounds += 1
        with pytest.MonkeyPatch.context() as patch:
            count = (rounds + 1) // 2
            steps = Stepping(patch, count)  # more and more: a prompt that is lost must come through
            if asked is None:
                asked = Asked(loop, prompt, params, "it")
            else:
                assert loop.resume("it")
            while steps.num_taken < count and not asked.is_over:
                loop.stats()
            is_there = loop.suspend("it")
            assert is_there != asked.is_over
            steps.go_on()
            assert loop.stats().num_suspended == is_there
            if rounds % 2:
                Asked(loop, [9, 9, rounds] * 70, OTHERS).all()
    return asked.all(), rounds


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_suspended_anywhere(single: StaticEngine, loop: BatchLoop[Engine], kind: dict[str, Any]) -> None:
    """After steps of the prompt and of the answer, while another conversation needs most of the cache."""
    params = SamplingParams(**{"seed": 3, "max_tokens": 14, **kind})
    expected = said(list(Session.of(single).generate(PROMPT, params)))
    events, rounds = after_each_step(loop, PROMPT, params)
    assert rounds > 2
    assert said(events) == expected
    assert events[-1].stats.completion_len == len([event for event in events if event.token_id is not None])


@pytest.mark.parametrize("model_type", ["qwen3_next", pytest.param("mamba2", marks=pytest.mark.exhaustive)])
def test_recurrent_layers(model_type: str, tmp_path: Path) -> None:
    recurrent_model(model_type).save_pretrained(tmp_path)
    config = EngineConfig(model_path=tmp_path, cpu_infer=1, cache_lens=256, chunk_size=16, self_check=False)
    prompt, params = [5 + i % 90 for i in range(150)], SamplingParams(seed=2, max_tokens=10, ignore_eos=True)
    single, loop = static_engine(config), BatchLoop(lambda report: build_engine(config))
    expected = said(list(Session.of(single).generate(prompt, params)))
    events, rounds = after_each_step(loop, prompt, params)
    assert rounds > 2
    assert said(events) == expected
    loop.close()
    single.close()


def test_two_that_take_turns(single: StaticEngine, loop: BatchLoop[Engine]) -> None:
    """A step each, prompts too, in an engine for one sequence."""
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)
    prompts = {"a": PROMPT[::-1], "b": [7, 8, 9] * 20}
    asked = dict[str, Asked]()
    with pytest.MonkeyPatch.context() as patch:
        steps, num_turns = Stepping(patch, 0), 0
        for name in itertools.cycle("ab"):
            if asked and all(one.is_over for one in asked.values()):
                break
            if name in asked and not loop.resume(name):
                assert asked[name].is_over
                continue
            if name not in asked:
                asked[name] = Asked(loop, prompts[name], params, name)
            steps.more(1)
            num_turns += 1
            while steps.num_taken < num_turns:
                loop.stats()
            loop.suspend(name)
        assert num_turns == 2 + 12 + 3 + 12  # chunks that give no token, and tokens
    for name, prompt in prompts.items():
        assert said(asked[name].all()) == said(list(Session.of(single).generate(prompt, params)))
