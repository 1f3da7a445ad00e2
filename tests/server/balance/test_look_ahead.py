"""An engine whose GPU computes a step prepares the one behind it, if that comes before the step can end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ktransformers.scheduler.commands import ProfileOff
from ktransformers.scheduler.records import StepPlan, StepResult
from ktransformers.server.balance.engine_process import _Work
from ktransformers.server.balance.messages import EngineWork, encode
from tests.support.engines.gpu_engines import step_row


class Sockets:
    """What the scheduler sends: `late` comes when it is waited for, for the milliseconds in `waited`."""

    def __init__(self, *sent: EngineWork, late: tuple[EngineWork, ...] = ()) -> None:
        self.sent, self.late, self.waited = list(sent), list(late), list[int]()

    def poll(self, milliseconds: int) -> bool:
        if milliseconds:
            self.waited.append(milliseconds)
            self.sent += self.late
            self.late = []
        return bool(self.sent)

    def recv(self) -> bytes:
        return encode(self.sent.pop(0))

    def send(self, data: bytes) -> None:
        pass


class Executor:
    recorder, runs_apart = None, True

    def __init__(self, seconds: float) -> None:
        self.seconds, self.prepared = seconds, list[int]()

    def begin(self, plan: StepPlan) -> None:
        pass

    def prepare(self, plan: StepPlan) -> None:
        self.prepared.append(plan.step_id)

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        assert meanwhile is not None
        meanwhile()
        return StepResult(step_id=plan.step_id, results=[], seconds=self.seconds)


def plan_of(number: int, num_rows: int = 1) -> StepPlan:
    return StepPlan(step_id=number, starts=[], rows=[step_row(0, [5] * num_rows, 0, [0])], ended=[])


def work_of(executor: Executor, sockets: Any) -> _Work:
    return _Work(executor, 0, sockets, sockets)  # type: ignore[arg-type]


def test_a_step_that_has_come_is_prepared_and_nothing_else_is() -> None:
    executor, sockets = Executor(0.01), Sockets(plan_of(1), plan_of(2), ProfileOff())
    work = work_of(executor, sockets)
    for _ in range(2):
        work._do(work._next())
    assert executor.prepared == [2]
    assert not sockets.waited


@pytest.mark.parametrize(("seconds", "waited"), [(0.001, []), (0.0045, [2]), (0.5, [2])])
def test_one_that_comes_late_is_waited_for_less_than_a_step_takes(seconds: float, waited: list[int]) -> None:
    executor = Executor(seconds)
    sockets = Sockets(plan_of(1))
    work = work_of(executor, sockets)
    work._do(work._next())
    assert not sockets.waited  # what steps take is not known yet
    sockets.sent, sockets.late = [plan_of(2)], [plan_of(3)]
    work._do(work._next())
    assert sockets.waited == waited
    assert executor.prepared == [3] * len(waited)


def test_steps_of_more_rows_say_nothing_of_what_one_takes() -> None:
    executor, sockets = Executor(0.5), Sockets(plan_of(1, 64))
    work = work_of(executor, sockets)
    work._do(work._next())
    sockets.sent, sockets.late = [plan_of(2)], [plan_of(3)]
    work._do(work._next())
    assert not sockets.waited
