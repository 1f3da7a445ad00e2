"""The effect of a prompt that arrives on a stream: time between its tokens, alone and beside it.

The scheduler and the engine of balance_serve in this process, a step in flight and the next one planned, without the
way to a client. Tokens are drawn by the model, at temperature 1: greedy ones would run in circles.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np

from ktransformers.core import FinishReason, SamplingParams
from ktransformers.engine.load.builder import Engine
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.prefill_throttle import FEWEST_ROWS
from ktransformers.scheduler.records import Request, StepPlan
from ktransformers.scheduler.scheduler import Scheduler

__all__ = ["StreamFigure", "StreamWork", "slots_of_stream", "stream_beside_prompt"]

_ALONE = 32
"""Tokens of the stream before the prompt comes."""

_LEARNING_ROUNDS, _ROUNDS = 1, 3


@dataclass(frozen=True, slots=True)
class StreamWork:
    """The stream to measure, which begins behind stream_len tokens, and a prompt of prompt_len beside it.

    max_itl_ratio: see SchedulerConfig.
    """

    prompt_len: int
    max_itl_ratio: float
    stream_len: int

    @property
    def most_tokens(self) -> int:
        """The most tokens that the stream can have, those that it begins behind included."""
        return self.stream_len + _ALONE + self.prompt_len // FEWEST_ROWS + 16


@dataclass(frozen=True, slots=True)
class StreamFigure:
    """The milliseconds between tokens of a stream, alone and while a prompt of prompt_len tokens is computed.

    Alone it is the median, beside the prompt the mean (short steps follow long ones), and the worst of each. ratio: of
    mean to median, worst_ratio: of the worst beside it to the median alone. first_token_ms: of the prompt beside the
    stream. chunk: rows of the prompt in a step that has any, the median.
    """

    prompt_len: int
    max_itl_ratio: float
    alone_ms: float
    alone_worst_ms: float
    beside_ms: float
    beside_worst_ms: float
    ratio: float
    worst_ratio: float
    first_token_ms: float
    chunk: float


def slots_of_stream(work: StreamWork, page_size: int) -> int:
    """Return the slots of a cache that holds the stream and the prompt."""
    return sum(-(-count // page_size) * page_size for count in (work.most_tokens, work.prompt_len + 1))


@dataclass(slots=True)
class _Times:
    """Seconds."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)


class _Loop:
    """Steps of requests, two planned; notes when the stream's tokens come."""

    def __init__(self, engine: Engine, config: SchedulerConfig):
        self.scheduler, self._executor, self._vocab_size = Scheduler(config), engine.executor, engine.model.vocab_size
        self._planned: deque[StepPlan] = deque()
        self._rng = np.random.default_rng(0)

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        prompt_ids = self._rng.integers(0, self._vocab_size, prompt_len).tolist()
        params = SamplingParams(temperature=1.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(request_id=name, prompt_ids=prompt_ids, params=params))

    def step(self) -> tuple[set[str], int]:
        """Whose tokens came, and the most rows that one sequence had."""
        while (plan := self.scheduler.schedule()) is not None:  # as many as may be in flight
            self._planned.append(plan)
        plan = self._planned.popleft()
        result = self._executor.execute(plan)
        updates = self.scheduler.commit(result)
        return {one.request_id for one in updates if one.token_id is not None}, max(row.num_tokens for row in plan.rows)

    def end(self, name: str) -> None:
        """Leave a request, with its steps in flight."""
        self.scheduler.finish(name, FinishReason.ABORT)
        while self._planned:
            self.step()

    def round(self, work: StreamWork, times: _Times) -> None:
        """Run one stream, and one prompt beside it."""
        self.add("stream", work.stream_len, work.most_tokens)
        while "stream" not in self.step()[0]:
            pass
        at = time.perf_counter()
        for _ in range(_ALONE):
            self.step()
            at, before = time.perf_counter(), at
            times.alone.append(at - before)
        arrived = at
        self.add("prompt", work.prompt_len, 1)
        came: set[str] = set()
        while "prompt" not in came:
            came, rows = self.step()
            at, before = time.perf_counter(), at
            if rows > 1 or times.chunks:  # steps that were planned before the prompt came are the stream's alone
                times.beside.append(at - before)
            if rows > 1:
                times.chunks.append(rows)
        times.first_tokens.append(at - arrived)
        self.end("stream")


def stream_beside_prompt(engine: Engine, work: StreamWork) -> StreamFigure:
    """Measure a stream beside a prompt; whatever else the engine has run is forgotten.

    It must be built for at least two sequences.
    """
    engine.executor.reset()
    loop = _Loop(
        engine,
        SchedulerConfig(
            num_pages=engine.cache.num_pages,
            page_size=engine.cache.page_size,
            chunk_size=engine.config.chunk_size,
            max_batch_size=2,
            vocab_size=engine.model.vocab_size,
            max_model_len=engine.model.context_len,
            has_prefix_cache=False,
            num_states=engine.cache.num_states,
            max_itl_ratio=work.max_itl_ratio,
        ),
    )
    for _ in range(_LEARNING_ROUNDS):
        loop.round(work, _Times())
    times = _Times()
    for _ in range(_ROUNDS):
        loop.round(work, times)
    alone, beside = 1e3 * median(times.alone), 1e3 * mean(times.beside)
    worst = 1e3 * max(times.beside)
    return StreamFigure(
        prompt_len=work.prompt_len,
        max_itl_ratio=work.max_itl_ratio,
        alone_ms=alone,
        alone_worst_ms=1e3 * max(times.alone),
        beside_ms=beside,
        beside_worst_ms=worst,
        ratio=beside / alone,
        worst_ratio=worst / alone,
        first_token_ms=1e3 * median(times.first_tokens),
        chunk=median(times.chunks),
    )
