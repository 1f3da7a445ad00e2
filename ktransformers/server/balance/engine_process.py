"""The engine process: loads the model, then runs the scheduler's steps until it is sent Stop or dies.

Knows an executor, not what it computes. Steps are run in the order in which they come; others come while one runs, so
that the engine does not wait for the scheduler.

It imports what loads the engine before it reads its options: a spare has that behind it when it is needed.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import zmq

from ktransformers.errors import KTransformersError, StageLostError
from ktransformers.profiling.recorder import Recorded, record_steps
from ktransformers.scheduler.commands import ProfileOff, ProfileOn
from ktransformers.scheduler.records import StepPlan, StepResult
from ktransformers.server.balance.child import read_options
from ktransformers.server.balance.messages import (
    Anew,
    EngineFacts,
    EngineFailed,
    EngineLoading,
    EngineOptions,
    EngineReady,
    EngineWork,
    decode,
    encode,
)
from ktransformers.system.child import become, follow_parent, import_aside
from ktransformers.system.logs import set_up_logging

__all__ = ["Executor", "LoadedEngine", "main"]

logger = logging.getLogger("ktransformers.engine")

PROGRESS_SECONDS = 0.1
"""Between two reports while loading."""

_LAST_STEPS = 8
"""Of those with no more rows, half of the least time is what the next step may take to come."""

_MOST_WAIT = 2
"""Milliseconds that it may take at most: the scheduler answers within one."""


class Executor(Recorded, Protocol):
    """An object that computes steps."""

    def begin(self, plan: StepPlan) -> None:
        """Receive a step that will be executed after others: what can be done of it beside them may be begun."""
        ...

    @property
    def runs_apart(self) -> bool:
        """Whether steps are computed by GPUs, while this process has time for `meanwhile`."""
        ...

    def prepare(self, plan: StepPlan) -> None:
        """Receive the step that is executed next, from within `meanwhile`: what can be done of it is done."""
        ...

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Run the rows of `plan`, and sample where it says so. Steps are sent to the recorder, if there is one.

        meanwhile: called while it is computed, where it `runs_apart`. Raises StageLostError where `recover` helps, as
        `begin` does; any other exception is the end of this process.
        """
        ...

    def recover(self) -> None:
        """Recover after a StageLostError: steps can be computed again, over a cache that holds nothing. Raises
        EngineError.
        """
        ...


LoadedEngine = tuple[EngineFacts, Executor]


def _load(options: EngineOptions, status: zmq.Socket[bytes]) -> LoadedEngine | None:
    """The engine that options.factory builds, or None after the parent was sent the reason."""
    reported = 0.0

    def progress(done: int, total: int, name: str) -> None:
        nonlocal reported
        if time.monotonic() - reported >= PROGRESS_SECONDS or done >= total:
            reported = time.monotonic()
            status.send(encode(EngineLoading(options.epoch, done, total, name)))

    module, _, function = options.factory.partition(":")
    try:
        loaded: LoadedEngine = getattr(importlib.import_module(module), function)(options, progress)
    except KTransformersError as error:
        status.send(encode(EngineFailed(options.epoch, type(error).__name__, str(error))))
        return None
    return loaded


class _Work:
    """What the scheduler sends, in its order."""

    def __init__(self, executor: Executor, epoch: int, steps: zmq.Socket[bytes], results: zmq.Socket[bytes]) -> None:
        self._executor, self._epoch, self._steps, self._results = executor, epoch, steps, results
        self._came: deque[EngineWork] = deque()
        self._last: deque[tuple[int, float]] = deque(maxlen=_LAST_STEPS)  # rows of steps, and seconds without waiting
        self._waited = 0.0

    def run(self) -> int:
        """Does not return. Raises what the executor raises."""
        while True:
            try:
                self._do(self._next())
            except StageLostError as error:
                logger.warning("%s; running requests wait until another one is there", error)
                self._results.send(encode(StepResult(step_id=-1, results=[], recovering=True)))
                self._executor.recover()
                self._results.send(encode(StepResult(step_id=-1, results=[], recovering=False)))
                self._drop_lost()
                logger.info("all stages are there again; running requests go on")

    def _next(self) -> EngineWork:
        while not self._came or self._steps.poll(0):
            self._receive()
        return self._came.popleft()

    def _receive(self) -> None:
        self._came.append(decode(self._steps.recv(), EngineWork))
        if isinstance(self._came[-1], StepPlan):
            self._executor.begin(self._came[-1])

    def _look_ahead(self, num_rows: int) -> None:
        """While a GPU computes a step of so many rows: prepare the one behind it. The scheduler may only now be
        planning that, which is waited for, but for no longer than the step is sure to take: there may be none."""
        least = min((seconds for rows, seconds in self._last if rows <= num_rows), default=0.0)
        began = time.monotonic()
        if not self._came and self._steps.poll(min(int(500 * least), _MOST_WAIT)):
            self._receive()
        self._waited = time.monotonic() - began
        if self._came and isinstance(self._came[0], StepPlan):
            self._executor.prepare(self._came[0])

    def _do(self, work: EngineWork) -> None:
        match work:
            case StepPlan():
                look_ahead = partial(self._look_ahead, work.num_tokens) if self._executor.runs_apart else None
                result = self._executor.execute(work, look_ahead)
                self._results.send(encode(result))
                self._last.append((work.num_tokens, result.seconds - self._waited))
                self._waited = 0.0
            case ProfileOn(endpoint):
                self._record(endpoint)
            case ProfileOff():
                self._record(None)
            case Anew():
                raise AssertionError("nothing is lost")

    def _record(self, endpoint: str | None) -> None:
        record_steps(self._executor, endpoint, f"engine {self._epoch}", self._epoch)

    def _drop_lost(self) -> None:
        """Steps that were planned before the scheduler knew."""
        while True:
            work = self._came.popleft() if self._came else decode(self._steps.recv(), EngineWork)
            if isinstance(work, Anew):
                return
            if not isinstance(work, StepPlan):
                self._do(work)


def main(preload: str = "") -> int:
    """Run the engine process. Returns its exit code: 1 when the parent was sent the reason why the engine cannot start.

    preload: a module to import before it is known what to do.
    """
    become("kt-spare")
    follow_parent()
    if preload:
        import_aside(preload)
    options: EngineOptions = read_options(EngineOptions)
    become("kt-engine")
    set_up_logging(options.log_level, f"engine {options.epoch}" if options.epoch else "engine", with_time=True)
    context = zmq.Context()
    status = context.socket(zmq.PUSH)
    status.setsockopt(zmq.SNDHWM, 0)
    status.connect(options.status)
    loaded = _load(options, status)
    if loaded is None:
        context.destroy(linger=5000)  # the report has to get out
        return 1
    facts, executor = loaded
    steps, results = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, endpoint in ((steps, options.steps), (results, options.results)):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
    status.send(encode(EngineReady(options.epoch, facts)))
    return _Work(executor, options.epoch, steps, results).run()


if __name__ == "__main__":
    sys.exit(main())
