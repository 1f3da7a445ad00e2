"""Engines without a model, for the processes of balance_serve: what the scheduler's tests use, in a child process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ktransformers.config import DEFAULT_CHUNK_SIZE
from ktransformers.core import Progress
from ktransformers.errors import CapacityError, ConfigError
from ktransformers.profiling.messages import StepRecord
from ktransformers.profiling.recorder import Recorder
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.records import NewSequence, StepPlan, StepResult
from ktransformers.server.balance.engine_process import LoadedEngine
from ktransformers.server.balance.messages import EngineFacts, EngineOptions
from tests.support.engines.fake_runtime import FakeRuntime
from tests.support.servers.fake_engine import EOS, VOCAB_SIZE, FakeEngine, make_config

PAGE_SIZE = 4
POISON = 13  # as the first token of a prompt
MODEL_LEN = 6000


class Executor:
    """step_seconds: what a step pretends to compute for."""

    def __init__(self, options: EngineOptions, step_seconds: float = 0.001, dies_of_poison: bool = False):
        config = make_config(
            num_pages=facts(options).scheduler.num_pages, page_size=PAGE_SIZE, max_batch_size=1000, chunk_size=10**6
        )
        self._engine = FakeEngine(config, lambda request_id: "")
        self._seconds, self._dies_of_poison = step_seconds, dies_of_poison
        self.recorder: Recorder | None = None
        self._starts: dict[int, NewSequence] = {}

    def new_runtime(self) -> FakeRuntime:
        return FakeRuntime()

    def begin(self, plan: StepPlan) -> None:
        pass

    def recover(self) -> None:
        raise AssertionError("it has no stages")

    runs_apart = False

    def prepare(self, plan: StepPlan) -> None:
        raise AssertionError("its steps do not run apart")

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        self._starts |= {start.run_id: start for start in plan.starts}
        began, recorder = time.monotonic_ns(), self.recorder
        ends = list(itertools.accumulate(row.num_tokens for row in plan.rows))
        sampled = [
            (self._starts[row.run_id].request_id, end - 1)
            for row, end in zip(plan.rows, ends, strict=True)
            if row.is_sampled
        ]
        if recorder is not None:
            recorder.begin_step(plan.step_id, plan.num_tokens, [row for _, row in sampled])
        result = self._run(plan)
        if recorder is not None:
            recorder.end_step(
                StepRecord(
                    epoch=recorder.epoch,
                    step_id=plan.step_id,
                    began_ns=began,
                    ended_ns=time.monotonic_ns(),
                    num_rows=plan.num_tokens,
                    prefill_rows=sum(row.num_tokens for row in plan.rows if row.num_tokens > 1),
                    num_seqs=len(plan.rows),
                    sampled=sampled,
                )
            )
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        if self._dies_of_poison and any(start.token_ids[0] == POISON for start in plan.starts):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._seconds)
        return StepResult(step_id=plan.step_id, results=self._engine.run(plan), seconds=self._seconds)


def facts(options: EngineOptions, **changes: object) -> EngineFacts:
    limits = {
        "num_pages": options.config.cache_lens // PAGE_SIZE,
        "page_size": PAGE_SIZE,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "max_model_len": MODEL_LEN,
        "chunk_size": options.config.chunk_size or DEFAULT_CHUNK_SIZE,
        "max_batch_size": options.max_batch_size,
        "has_prefix_cache": options.config.prefix_cache,
    }
    return EngineFacts(scheduler=SchedulerConfig(**(limits | changes)))  # type: ignore[arg-type]


def load(options: EngineOptions, progress: Progress) -> LoadedEngine:
    for done in range(3):
        progress(done, 2, f"module {done}")
    return facts(options), Executor(options)


def load_slow(options: EngineOptions, progress: Progress) -> LoadedEngine:
    return facts(options), Executor(options, step_seconds=0.01)


def load_drafting(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """Rows cost nothing beside the time of a step, so that draft tokens pay."""
    return facts(options, max_drafts=3), Executor(options, step_seconds=0.003)


def load_mortal(options: EngineOptions, progress: Progress) -> LoadedEngine:
    return facts(options), Executor(options, dies_of_poison=True)


def load_never(options: EngineOptions, progress: Progress) -> LoadedEngine:
    raise CapacityError("this model does not fit; take a smaller one")


def load_once(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """The first engine works; the ones after it die while they load."""
    if options.epoch:
        os.kill(os.getpid(), signal.SIGKILL)
    return load(options, progress)


def load_killed_twice(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """Somebody kills the first two engines while they load."""
    progress(1, 2, "layers.7")
    if options.epoch < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return load(options, progress)


def load_faulty(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """Ends by a fault of its own."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
    return load(options, progress)


def load_by_free_memory(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """As many pages as it is told, else as many as fit; and every engine finds less free memory than the one before."""
    free, asked = max(1000 >> 6 * options.epoch, 1), options.config.cache_lens // PAGE_SIZE
    made = facts(options, num_pages=asked or free, chunk_size=options.config.chunk_size or free)
    told = msgspec.structs.replace(options, config=replace(options.config, cache_lens=made.scheduler.total_len))
    return made, Executor(told, step_seconds=0.01)


def load_smaller(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """The second engine has fewer pages, whatever it is told."""
    made = facts(options)
    if options.epoch == 1:
        made = facts(options, num_pages=made.scheduler.num_pages // 2)
    return made, Executor(options, step_seconds=0.01)


def load_without_memory(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """Somebody else has the memory for a while."""
    if options.epoch == 1:
        raise CapacityError("this model does not fit at the moment")
    if options.epoch == 2:
        raise ConfigError("nor is its folder there")
    return load_slow(options, progress)


class Hanging(Executor):
    """Never finishes its sixth step."""

    num_steps = 0

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        self.num_steps += 1
        if self.num_steps == 6:
            threading.Event().wait()
        return super().execute(plan)


def load_hanging(options: EngineOptions, progress: Progress) -> LoadedEngine:
    return facts(options), (Executor if options.epoch else Hanging)(options)


def load_stuck(options: EngineOptions, progress: Progress) -> LoadedEngine:
    """Every other engine never gets beyond half of its weights."""
    progress(1, 2, "layers.7")
    if options.epoch % 2 == 0:
        threading.Event().wait()
    return facts(options), Executor(options, step_seconds=0.01)


class ManualClock:
    """Stands still. Whoever sleeps on it is woken by the test."""

    def __init__(self) -> None:
        self.sleeping: dict[float, asyncio.Future[None]] = {}  # by the seconds asked for

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        sleeper = self.sleeping[seconds] = asyncio.get_running_loop().create_future()
        try:
            await sleeper
        finally:
            if self.sleeping.get(seconds) is sleeper:  # cancelled
                del self.sleeping[seconds]

    def wake(self, seconds: float) -> None:
        self.sleeping.pop(seconds).set_result(None)


def load_crash(options: EngineOptions, progress: Progress) -> LoadedEngine:
    os._exit(3)
