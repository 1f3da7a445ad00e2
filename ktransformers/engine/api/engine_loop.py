"""A scheduler and its engine in this process, on one thread of their own: commands in, news out, as over sockets.

    any thread                   the loop's thread
    post(Add, Finish, ...) ───> driver.obey ── plan ── engine.execute ── commit ─┐
    deliver(driver) <──────────── whenever something may be new ─────────────────┘
    notify() <─────────────────── in the next step, once its layers leave Python to others, or when none follows
    call(function) ───────────> between two steps, with the driver and the engine

Everything that the scheduler and the engine hold is touched by that thread alone, so an exception that reaches a caller
(Ctrl-C, a cancelled task) never meets a half-done step. Knows no text.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from ktransformers.engine.api.home import OwnerProcess
from ktransformers.engine.load.loaded import LoadedModel
from ktransformers.errors import EngineError, KTransformersError, StageLostError
from ktransformers.profiling.recorder import record_steps
from ktransformers.scheduler.commands import ProfileOff, ProfileOn, RequestCommand
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.driver import SchedulerDriver
from ktransformers.scheduler.records import StepPlan, StepResult

__all__ = ["Build", "EngineLoop", "EngineT"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSED = "this model is closed: make a new LLM, or keep the `with` block open for as long as it is used"


EngineT = TypeVar("EngineT", bound=LoadedModel, covariant=True)

Build = Callable[[Callable[..., None]], EngineT]
"""Builds the engine on the loop's thread. Given a function to report progress to, which raises when nobody waits."""


@dataclass(slots=True)
class _Call:
    """Something to be done between two steps. answer: what it returns or raises."""

    run: Callable[[], object]
    answer: queue.SimpleQueue[tuple[object, BaseException | None]] = field(default_factory=queue.SimpleQueue)


_Command = RequestCommand | ProfileOn | ProfileOff


class EngineLoop(Generic[EngineT]):
    """A scheduler and an engine on their own thread; `close` closes and drops the engine. All methods may be called on
    any thread of its own process. In one that was forked from it they raise EngineError, but for `close`.

    The engine is built where it runs, on the loop's thread (some of what GPUs need belongs to a thread). The
    constructor waits for it and raises what that raises; an interrupt meanwhile gives the loading up.

    Callbacks, all on the loop's thread, where steps (of tiers that list their files) may run before the constructor has
    returned; none may block. deliver: given the driver whenever there may be news. notify: called later, when
    readers may be woken: woken at once, they would want Python while the loop plans the next step. planned: given each
    step before it runs. ended: called once, when nothing more will come. progress: called while the engine is built.
    """

    engine: EngineT
    config: SchedulerConfig
    driver: SchedulerDriver
    failure: Exception | None = None
    """What the step raised, if it failed, while `deliver` is given what came of it."""
    _next: StepPlan | None = None  # planned and prepared
    _done: StepResult | None = None  # not taken in yet
    _plans_ahead = True

    def __init__(
        self,
        build: Build[EngineT],
        *,
        deliver: Callable[[SchedulerDriver], None],
        notify: Callable[[], None] = lambda: None,
        planned: Callable[[StepPlan], None] = lambda plan: None,
        ended: Callable[[], None] = lambda: None,
        progress: Callable[..., None] | None = None,
    ):
        self.home = OwnerProcess()
        self._deliver, self._notify = deliver, notify
        self._planned, self._ended = planned, ended
        self._inbox: queue.SimpleQueue[tuple[_Command, ...] | _Call | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()  # between a post and a close: nobody is left waiting for a thread that is gone
        self.is_closed = False
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def report(*done: object) -> None:
            if self.is_closed:  # the only way to end a long load early
                raise EngineError("loading was given up")
            if progress is not None:
                progress(*done)

        def run() -> None:
            try:
                self._prepare(build, report)
            except BaseException as error:  # noqa: BLE001 - the constructor raises it
                started.put(error)
                return
            started.put(None)
            self._run()

        self._thread = threading.Thread(target=run, name="ktransformers-engine", daemon=True)
        self._thread.start()
        try:
            error = started.get()
        except BaseException:
            self.close()
            raise
        if error is not None:
            raise error

    def _prepare(self, build: Build[EngineT], report: Callable[..., None]) -> None:
        self.engine = engine = build(report)
        try:
            self.config = engine.scheduler_config
        except KTransformersError:
            engine.close()
            raise
        self.driver = SchedulerDriver(self.config)
        engine.executor.notify = self._notify
        engine.executor.counts_experts = False  # the driver would keep them for news that nobody takes here

    # For any thread.

    def post(self, *commands: _Command) -> None:
        """Have commands obeyed, together, before the next step. Raises EngineError when closed."""
        self._put(commands)

    def call(self, run: Callable[[], T]) -> T:
        """Run a function on the loop's thread, between two steps. Returns what it returns; raises what it raises, and
        EngineError when closed."""
        call = _Call(run)
        self._put(call)
        made, error = call.answer.get()
        if error is not None:
            raise error
        return cast("T", made)

    def call_soon(self, run: Callable[[], object]) -> None:
        """Have a function run there as `call` does, without waiting for it. Raises EngineError when closed."""
        self._put(_Call(run))

    def _put(self, command: tuple[_Command, ...] | _Call) -> None:
        self.home.require()
        with self._lock:
            if self.is_closed:
                raise EngineError(_CLOSED)
            self._inbox.put(command)

    def require_open(self) -> None:
        """Raise EngineError when it is closed, or in another process."""
        self.home.require()
        if self.is_closed:
            raise EngineError(_CLOSED)

    def close(self) -> None:
        """End the loop, close the engine and drop it. Safe to call twice."""
        if not self.home.is_here:
            return  # the thread and the engine are the parent's
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:  # a garbage collection may run anywhere
            self._thread.join()

    # On the loop's thread.

    def _run(self) -> None:
        try:
            while self._obey_all():
                self.step()
        finally:
            self._end()

    def _end(self) -> None:
        """Nobody is left waiting, also when the thread ends by an error of its own."""
        with self._lock:
            self.is_closed = True
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Call):
                command.answer.put((None, EngineError(_CLOSED)))
        self._record(None)
        self._notify()
        self._ended()
        self.engine.close()
        del self.engine, self.driver  # weights and cache are free, though the loop has a name still

    def _obey_all(self) -> bool:
        """Take in commands; wait for one when there is nothing else to do. False when told to stop."""
        has_news = False
        while True:
            is_idle = not self.driver.scheduler.has_work and not self.has_next
            if not is_idle and self._inbox.empty():
                self.driver.expire()
                return True
            if is_idle and has_news:
                self._deliver(self.driver)  # what commands have ended
                has_news = False
            self._notify()
            try:
                command = self._inbox.get(timeout=self._seconds_left() if is_idle else None)
            except queue.Empty:
                self.driver.expire()
                has_news = True
                continue
            if command is None:
                if has_news:
                    self._deliver(self.driver)  # whoever was ended before receives that
                return False
            has_news = True
            if isinstance(command, _Call):
                self._finish_planned()
                _answer(command)
            for one in command if isinstance(command, tuple) else ():
                self._obey(one)

    def _seconds_left(self) -> float | None:
        """Until the next deadline of a request that waits for nothing but being resumed."""
        due = self.driver.scheduler.next_deadline
        return None if due is None else max(due - time.monotonic(), 0.0) + 1e-3

    def _obey(self, command: _Command) -> None:
        match command:
            case ProfileOn(endpoint):
                self._finish_planned()  # graphs are captured anew, over what a step that is under way computes
                self._record(endpoint)
            case ProfileOff():
                self._record(None)
            case _:
                self.driver.obey(command)

    def _record(self, endpoint: str | None) -> None:
        """Have requests and steps recorded from the next step on, or not."""
        executor = self.engine.executor
        self.driver.record(None)
        record_steps(executor, endpoint, "engine", 0)
        if executor.recorder is not None:
            self.driver.record(executor.recorder.post)

    def step(self) -> None:
        """Run a step, and take its results in. Where GPUs compute it, the step before it is taken in meanwhile, and the
        one behind it planned: between two of them there is nothing but sampling."""
        plan = self._take_next() or self.driver.plan()
        if plan is None:
            stats = self.driver.stats()
            assert not stats.num_running + stats.num_waiting, "requests wait and nothing is planned"
            self._notify()
            return  # nothing was left to copy
        self._planned(plan)
        executor = self.engine.executor
        try:
            result = executor.execute(plan, self._go_on) if executor.runs_apart else executor.execute(plan)
            self._notify()  # where the runner did not
        except StageLostError as error:
            logger.warning("%s; answers go on once another one is there", error)
            self._drop_pending()
            executor.recover()
            self.driver.lose_steps()
        except Exception as error:  # whatever a kernel or torch raises must reach the readers, and the log
            self._drop_pending()
            names = ", ".join(self.driver.scheduler.in_flight_ids(plan.step_id))
            logger.exception("a step failed: the answers that were in it end here (%s), all others go on", names)
            executor.reset()
            self.failure = error
            self.driver.fail_step(plan, f"the engine failed with {type(error).__name__}: {error}")
        else:
            self._take_in()  # where it did not run apart after all
            self._done = result
            if self.has_next:
                return  # taken in while that one runs
            self._take_in()
        self._deliver(self.driver)
        self.failure = None

    def _go_on(self) -> None:
        """While a step is computed."""
        if self._done is not None:
            self._take_in()
            self._deliver(self.driver)
        self._next = self.driver.plan() if self._plans_ahead else None
        if self._next is not None:
            self.engine.executor.prepare(self._next)
        self._notify()

    def _take_in(self) -> None:
        if self._done is not None:
            self.driver.commit(self._done)
            self._done = None

    def _take_next(self) -> StepPlan | None:
        plan, self._next = self._next, None
        return plan

    @property
    def has_next(self) -> bool:
        """Whether a step is planned that has not run yet."""
        return self._next is not None

    def _drop_pending(self) -> None:
        """What was planned behind a step that failed; what was computed before it counts."""
        self._take_in()
        self._next = None

    def _finish_planned(self) -> None:
        """Run what is planned, and plan no more: then no step is in flight."""
        self._plans_ahead = False
        while self.has_next:
            self.step()
        self._plans_ahead = True


def _answer(call: _Call) -> None:
    try:
        call.answer.put((call.run(), None))
    except Exception as error:  # noqa: BLE001 - the one who asked raises it
        call.answer.put((None, error))
