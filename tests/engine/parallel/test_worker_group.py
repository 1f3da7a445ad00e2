"""Who takes the places of processes that end, and when that is the end of all: with workers that the test plays."""

from __future__ import annotations

import threading

import pytest

from ktransformers.engine.parallel.ranks.worker_group import WorkerGroup
from ktransformers.engine.parallel.ranks.worker_handles import OnDeath, WorkerHandle
from ktransformers.errors import CapacityError, EngineError, StageLostError
from ktransformers.system.restart_policy import MAX_DEATHS


class Played(WorkerHandle):
    """Loads until `loaded` is set or it is closed. dies: ends by itself."""

    address = None

    def __init__(self, rank: int, on_death: OnDeath):
        self.name, self.dies = f"stage {rank}", on_death
        self.loaded, self.is_closed, self.is_gone, self.is_broken = threading.Event(), False, False, False

    def send(self, data: bytes) -> None:
        if self.is_gone:
            raise EngineError(f"{self.name} cannot be told")

    def close(self) -> None:
        self.is_closed = True
        self.loaded.set()


class Stage:
    """A workers of `size`, ready; made: every worker of each rank."""

    def __init__(self, size: int = 2):
        self.made: dict[int, list[Played]] = {}
        self.told: list[str] = []
        self._came = threading.Condition()
        self.workers = WorkerGroup(self._begun, self._check, self._tell)
        for rank in range(1, size + 1):
            self.workers.start(rank)
            self.last(rank).loaded.set()
        self.workers.wait()
        self.workers.is_recoverable = True

    def _begun(self, rank: int, on_death: OnDeath) -> WorkerHandle:
        with self._came:
            self.made.setdefault(rank, []).append(Played(rank, on_death))
            self._came.notify_all()
            return self.made[rank][-1]

    def _check(self, worker: WorkerHandle) -> None:
        assert isinstance(worker, Played)
        assert worker.loaded.wait(60)
        if worker.is_closed or worker.is_broken:
            raise CapacityError("it does not fit")

    def _tell(self, message: str) -> None:
        with self._came:
            self.told.append(message)
            self._came.notify_all()

    def last(self, rank: int, count: int = 1) -> Played:
        """The newest worker of this rank, which is at least the count-th."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.made.get(rank, ())) >= count, 60)
            return self.made[rank][-1]

    def heard(self) -> list[str]:
        with self._came:
            assert self._came.wait_for(lambda: bool(self.told), 60)
            return self.told


def test_places_are_taken_while_others_go_on() -> None:
    stage = Stage()
    first, second = stage.last(1), stage.last(2)
    stage.workers.send(b"a step")
    first.is_gone = True
    with pytest.raises(StageLostError, match="stage 1 cannot be told"):
        stage.workers.send(b"a step before the death is noticed")
    first.dies("stage 1 has ended")
    with pytest.raises(StageLostError, match="stage 1 is gone"):
        stage.workers.send(b"a step")
    new = stage.last(1, 2)
    new.loaded.set()
    with stage.workers.recovered() as found:
        assert found == [new]
        assert stage.workers.workers == [new, second]
    assert (first.is_closed, second.is_closed, new.is_closed) == (True, False, False)
    stage.workers.send(b"a step")
    assert not stage.told
    stage.workers.close()


def test_a_place_that_stays_empty_is_the_end() -> None:
    stage = Stage()
    stage.last(1).dies("stage 1 has ended")
    new = stage.last(1, 2)
    new.is_broken = True
    new.loaded.set()
    message = "stage 1 has ended, and no other one can start: it does not fit"
    assert stage.heard() == [message]
    with pytest.raises(EngineError, match=message), stage.workers.recovered():
        pass
    stage.workers.close()


def test_deaths_that_nobody_mends() -> None:
    """While all meet, and one more than there may be."""
    stage = Stage()
    for count in range(2, MAX_DEATHS + 1):
        stage.last(1).dies("stage 1 has ended")
        stage.last(1, count).loaded.set()
        with stage.workers.recovered():
            assert not stage.told
    stage.last(2).dies("stage 2 has ended")
    stage.last(2, 2).loaded.set()
    with stage.workers.recovered():
        pass
    assert not stage.told
    stage.last(2).dies("stage 2 has ended too often")
    assert stage.heard() == ["stage 2 has ended too often"]
    stage.workers.close()
    other = Stage()
    other.last(1).dies("stage 1 has ended")
    other.last(1, 2).loaded.set()
    with other.workers.recovered():
        other.last(2).dies("stage 2 has ended while all met")
        assert other.told == ["stage 2 has ended while all met"]
    other.workers.close()


def test_those_that_cannot_meet_again_are_not_asked_to() -> None:
    stage = Stage()
    stage.workers.is_recoverable = False
    stage.last(1).dies("GPU 1 has ended")
    assert stage.told == ["GPU 1 has ended"]
    with pytest.raises(EngineError, match="cannot meet again"), stage.workers.recovered():
        pass
    stage.workers.close()


def test_closing_ends_one_that_loads() -> None:
    stage = Stage()
    stage.last(1).dies("stage 1 has ended")
    new = stage.last(1, 2)
    stage.workers.close()
    keeper = stage.workers._keeper
    assert keeper is not None
    keeper.join(60)
    assert not keeper.is_alive()
    assert new.is_closed
    stage.last(2).dies("stage 2 has ended")
    assert not stage.told
