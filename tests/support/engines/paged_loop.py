"""The real scheduler and the real executor in one process, pipelined as the processes run them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ktransformers.core import FinishReason, SamplingParams, TokenLogprobs
from ktransformers.engine.load.builder import Engine
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.records import Request, RequestUpdate, StepPlan, StepResult
from ktransformers.scheduler.scheduler import Scheduler


class Answer:
    """What one request was told."""

    def __init__(self, prompt_len: int) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * prompt_len
        self.last: RequestUpdate | None = None

    def hear(self, update: RequestUpdate) -> None:
        assert self.last is None, "news after the end"
        if update.prompt_logprobs is not None:
            scored = update.prompt_logprobs
            self.prompt_logprobs[scored.start : scored.start + len(scored.entries)] = scored.entries
        if update.token_id is not None:
            self.token_ids.append(update.token_id)
            self.logprobs.append(update.logprobs)
        if update.finish_reason is not None:
            self.last = update

    @property
    def reason(self) -> FinishReason | None:
        return None if self.last is None else self.last.finish_reason


class PagedLoop:
    """make_executor: a fresh engine, with an empty cache, as after a restart."""

    def __init__(self, config: SchedulerConfig, make_executor: Callable[[], PagedExecutor]):
        self.config, self.scheduler = config, Scheduler(config)
        self._make = make_executor
        self.executor = make_executor()
        self.results: deque[StepResult] = deque()
        self.answers: dict[str, Answer] = {}
        self.num_steps = 0
        self._names = itertools.count()

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, **fields: object) -> str:
        name = f"r{next(self._names)}"
        self.answers[name] = Answer(len(prompt_ids))
        self.scheduler.add(Request(request_id=name, prompt_ids=list(prompt_ids), params=params, **fields))  # type: ignore[arg-type]
        return name

    def step(self) -> bool:
        """Plan up to two steps ahead and take in one result. False when there is nothing to do."""
        while len(self.results) < 2:
            plan = self.scheduler.schedule()
            self.scheduler.check_integrity()
            if plan is None:
                break
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
            self.results.append(self.executor.execute(sent))
            self.num_steps += 1
        if not self.results:
            assert not self.scheduler.has_work, "requests wait and nothing is planned"
            return False
        result = msgspec.msgpack.decode(msgspec.msgpack.encode(self.results.popleft()), type=StepResult)
        for update in self.scheduler.commit(result):
            self.answers[update.request_id].hear(update)
        self.scheduler.check_integrity()
        return True

    def abort(self, name: str) -> None:
        update = self.scheduler.finish(name, FinishReason.ABORT)
        if update is not None:
            self.answers[name].hear(update)
        self.scheduler.check_integrity()

    def crash(self) -> None:
        self.results.clear()
        self.scheduler.engine_lost()
        self.scheduler.check_integrity()
        self.executor = self._make()

    def disturb(self, rng: random.Random) -> None:
        """Run to the end, while requests are suspended and resumed at any step, and now and then the engine dies."""
        while names := [name for name, answer in self.answers.items() if answer.last is None]:
            self.step()
            name, kind = rng.choice(names), rng.randrange(50)
            if kind < 10:
                self.scheduler.suspend(name)
            elif kind < 25:
                self.scheduler.resume(name)
            elif kind < 27:
                self.crash()
            self.scheduler.check_integrity()

    def drain(self) -> None:
        while self.step():
            pass


def scheduler_config(engine: Engine, **changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "num_pages": engine.cache.num_pages,
        "page_size": engine.cache.page_size,
        "num_states": engine.cache.num_states,
        "chunk_size": 16,
        "max_batch_size": 4,
        "vocab_size": engine.model.vocab_size,
        "eos_token_ids": engine.model.eos_token_ids,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]
