"""Which models run: turns, memory, idleness, failures, without a model, a task or a second of time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from ktransformers.errors import CapacityError, EngineError
from ktransformers.server.multi_model.pool import ModelPool, ModelState, PoolAction, PoolActionKind, PooledModel
from ktransformers.system.restart_policy import FIRST_DELAY, LONGEST_DELAY

LOAD, STOP, ADMIT = PoolActionKind.LOAD, PoolActionKind.STOP, PoolActionKind.ADMIT


class Pool(ModelPool):
    """With a clock that stands still, and models that take no time to load and stop unless they are told to."""

    def __init__(self, sizes: dict[str, int], memory: int, idle: float = float("inf"), kept: Sequence[str] = ()):
        self.now = 0.0
        models = [PooledModel(name, {"cpu": size}, name in kept) for name, size in sizes.items()]
        super().__init__(models, {"cpu": memory}, idle, lambda: self.now)

    def settle(self) -> list[str]:
        """Do all that is to be done, and say what it was."""
        done = []
        while steps := self.decide():
            for step in steps:
                done.append(f"{step.kind} {step.name}")
                if step.kind is LOAD:
                    self.loaded(step.name)
                elif step.kind is STOP:
                    self.stopped(step.name)
                self.check_integrity()
        return done

    def begin(self, name: str) -> list[str]:
        """A request that is let in after what this returns."""
        self.ask(name)
        return self.settle()


def test_a_model_is_loaded_for_the_first_request_and_runs_for_the_next() -> None:
    pool = Pool({"a": 1}, 1)
    assert not pool.ask("a")
    assert not pool.ask("a")
    assert pool.decide() == [PoolAction(LOAD, "a")]
    assert not pool.ask("a")  # while it loads
    assert pool.decide() == []
    pool.loaded("a")
    assert (pool.num_users("a"), pool.num_waiting("a")) == (3, 0)
    assert pool.ask("a")
    assert pool.num_users("a") == 4


def test_loads_are_one_at_a_time_in_order_of_arrival() -> None:
    pool = Pool({"a": 1, "b": 1, "c": 1}, 3)
    for name in ("c", "a", "b", "a"):
        pool.ask(name)
    assert pool.decide() == [PoolAction(LOAD, "c")]
    assert pool.decide() == []
    pool.loaded("c")
    assert pool.decide() == [PoolAction(LOAD, "a")]
    pool.loaded("a")
    assert pool.decide() == [PoolAction(LOAD, "b")]


def test_the_idle_one_that_was_not_used_for_longest_goes() -> None:
    pool = Pool({"a": 1, "b": 1, "c": 1, "d": 1}, 3)
    for name in ("a", "b", "c"):
        pool.begin(name)
        pool.leave(name)
    assert pool.ask("a")
    pool.leave("a")
    assert pool.begin("d") == ["stop b", "load d"]


def test_only_what_is_needed_goes() -> None:
    pool = Pool({"small": 1, "large": 4, "other": 1, "wide": 4}, 6)
    for name in ("small", "large", "other"):
        pool.begin(name)
        pool.leave(name)
    assert pool.begin("wide") == ["stop large", "load wide"]  # small was used before, and is not enough


def test_devices_are_counted_each() -> None:
    models = [
        PooledModel("host", {"cpu": 4}),
        PooledModel("gpu", {"cpu": 1, "cuda:0": 8}),
        PooledModel("both", {"cpu": 2, "cuda:0": 1}),
    ]
    pool = ModelPool(models, {"cpu": 5, "cuda:0": 8}, float("inf"))
    for name in ("host", "gpu"):
        pool.ask(name)
        (step,) = pool.decide()
        assert step == PoolAction(LOAD, name)
        pool.loaded(name)
        pool.leave(name)
    pool.ask("both")
    assert pool.decide() == [PoolAction(STOP, "host"), PoolAction(STOP, "gpu")]
    pool.stopped("host")
    assert pool.decide() == []
    pool.stopped("gpu")
    assert pool.decide() == [PoolAction(LOAD, "both")]
    assert pool.used() == {"cpu": 2, "cuda:0": 1}


def test_a_model_in_use_is_not_stopped_but_held_and_whoever_comes_later_waits_behind() -> None:
    pool = Pool({"a": 1, "b": 1}, 1)
    pool.begin("a")
    assert pool.begin("b") == []
    assert not pool.ask("a")  # behind b
    assert pool.decide() == []
    assert pool.state("a") is ModelState.RUNNING
    pool.leave("a")
    assert pool.decide() == [PoolAction(STOP, "a")]
    assert pool.decide() == []
    pool.stopped("a")
    assert pool.decide() == [PoolAction(LOAD, "b")]
    pool.loaded("b")
    assert pool.decide() == []  # b is in use, and a waits
    pool.leave("b")
    assert pool.settle() == ["stop b", "load a"]
    assert (pool.num_users("a"), pool.num_users("b")) == (1, 0)


def test_whoever_waits_for_what_is_held_is_let_in_when_the_first_of_the_line_leaves() -> None:
    pool = Pool({"a": 1, "b": 1}, 1)
    pool.begin("a")
    pool.ask("b")
    pool.decide()
    pool.ask("a")
    pool.withdraw("b")
    assert pool.decide() == [PoolAction(ADMIT, "a")]
    assert pool.num_users("a") == 2


def test_a_model_that_is_not_in_the_way_is_not_held() -> None:
    pool = Pool({"a": 2, "b": 2, "c": 2}, 4)
    pool.begin("a")
    pool.begin("b")
    pool.ask("c")
    assert pool.decide() == []
    assert not pool.ask("a")  # the one that was used less recently
    assert pool.ask("b")
    pool.leave("b")
    pool.leave("b")
    assert pool.settle() == ["admit a", "stop b", "load c"]  # b is idle first


def test_a_model_stops_for_requests_that_wait_for_it_while_it_stops() -> None:
    pool = Pool({"a": 1, "b": 1}, 1)
    pool.begin("a")
    pool.leave("a")
    pool.ask("b")
    assert pool.decide() == [PoolAction(STOP, "a")]
    pool.ask("a")
    pool.withdraw("b")
    assert pool.decide() == []
    pool.stopped("a")
    assert pool.decide() == [PoolAction(LOAD, "a")]


def test_who_leaves_before_the_load_takes_the_wish_along_and_who_leaves_later_does_not() -> None:
    pool = Pool({"a": 1}, 1)
    pool.ask("a")
    pool.withdraw("a")
    assert pool.decide() == []
    pool.ask("a")
    assert pool.decide() == [PoolAction(LOAD, "a")]
    pool.withdraw("a")
    pool.loaded("a")
    assert pool.state("a") is ModelState.RUNNING
    assert pool.ask("a")


def test_a_wish_needs_no_request() -> None:
    pool = Pool({"a": 1, "b": 1}, 2)
    pool.wish("b")
    pool.wish("a")
    assert pool.settle() == ["load b", "load a"]
    pool.wish("a")
    assert pool.settle() == []


def test_what_nobody_asks_for_is_stopped_after_its_time() -> None:
    pool = Pool({"a": 1, "b": 1}, 2, idle=10.0)
    pool.begin("a")
    assert pool.wake_at() is None
    pool.now = 5.0
    pool.leave("a")
    assert pool.wake_at() == 15.0
    assert pool.idle_end("a") == 15.0
    pool.now = 14.9
    assert pool.decide() == []
    pool.now = 15.0
    assert pool.decide() == [PoolAction(STOP, "a")]
    assert pool.decide() == []
    assert pool.wake_at() is None


def test_one_that_is_kept_goes_neither_for_others_nor_for_its_time() -> None:
    pool = Pool({"a": 1, "b": 1, "c": 1}, 2, idle=10.0, kept=["a"])
    for name in ("a", "b"):
        pool.begin(name)
        pool.leave(name)
    pool.keep_for("a", 0.0)
    pool.now = 9.0
    assert pool.begin("c") == ["stop b", "load c"]
    pool.leave("c")
    pool.now = 30.0
    assert pool.settle() == ["stop c"]
    assert pool.idle_end("a") is None


@pytest.mark.parametrize(("seconds", "end"), [(0.0, 0.0), (3.0, 3.0), (float("inf"), None)])
def test_a_request_may_say_how_long_its_model_stays(seconds: float, end: float | None) -> None:
    pool = Pool({"a": 1}, 1, idle=10.0)
    pool.begin("a")
    pool.keep_for("a", seconds)
    assert pool.decide() == []  # in use
    pool.leave("a")
    assert pool.wake_at() == end
    assert pool.settle() == (["stop a"] if seconds == 0.0 else [])
    pool.now = 5.0
    pool.settle()
    assert (pool.state("a") is ModelState.RUNNING) == (end is None)
    if end is not None:  # the next load begins anew
        pool.begin("a")
        assert pool.idle_end("a") == 15.0


def test_one_that_shall_stay_goes_for_others_all_the_same() -> None:
    pool = Pool({"a": 1, "b": 1}, 1)
    pool.begin("a")
    pool.keep_for("a", float("inf"))
    pool.leave("a")
    assert pool.begin("b") == ["stop a", "load b"]


def test_a_load_that_fails_is_not_tried_again_at_once_and_others_go_on() -> None:
    pool = Pool({"a": 1, "b": 1}, 1)
    error, wait = EngineError("it broke"), FIRST_DELAY
    for _ in range(10):
        pool.ask("a")
        pool.ask("a")
        assert pool.decide() == [PoolAction(LOAD, "a")]
        pool.failed("a", error)
        assert (pool.num_waiting("a"), pool.num_users("a")) == (0, 0)
        assert pool.refusal("a") == (error, wait)
        assert pool.refusal("b") is None
        assert pool.begin("b") == ["load b"]
        pool.leave("b")
        pool.keep_for("b", 0.0)
        assert pool.settle() == ["stop b"]
        pool.now += wait
        assert pool.refusal("a") is None
        wait = min(2 * wait, LONGEST_DELAY)
    pool.begin("a")
    pool.leave("a")
    assert pool.refusal("a") is None
    pool.lost("a", error)
    pool.stopped("a")
    assert pool.refusal("a") == (error, FIRST_DELAY)  # one that was loaded meanwhile begins anew


def test_one_that_ends_by_itself_has_its_memory_until_it_is_gone() -> None:
    pool = Pool({"a": 1, "b": 1}, 1)
    pool.begin("a")
    pool.ask("b")
    pool.decide()
    pool.lost("a", EngineError("killed"))
    assert pool.decide() == []
    pool.stopped("a")
    assert pool.decide() == [PoolAction(LOAD, "b")]
    pool.leave("a")  # its reader hears of it later
    assert pool.num_users("a") == 0


def test_models_that_can_never_run_are_refused() -> None:
    with pytest.raises(CapacityError, match="the model b takes 3 B of cpu, and there are 2 B for all models"):
        Pool({"a": 1, "b": 3}, 2)
    with pytest.raises(CapacityError, match="b takes 2 B of cpu, and those that are kept 1 B, and there are 2 B"):
        Pool({"a": 1, "b": 2}, 2, kept=["a"])
    with pytest.raises(CapacityError, match="takes 1 B of cuda:0"):
        ModelPool([PooledModel("a", {"cuda:0": 1})], {"cpu": 9}, 1.0)


class World:
    """Requests that come, wait, are let in and leave in any order, and models that load, fail and stop in theirs."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        names = [f"m{index}" for index in range(rng.randint(1, 6))]
        devices = ["cpu", "cuda:0", "cuda:1"][: rng.randint(1, 3)]
        self.sizes = {name: {device: rng.randint(0, 8) for device in devices} for name in names}
        kept = [name for name in names if rng.random() < 0.15]
        memory = {}
        for device in devices:
            taken = sum(self.sizes[name][device] for name in kept)
            most = max((self.sizes[name][device] for name in names if name not in kept), default=0)
            memory[device] = taken + most + rng.randint(0, 6)
        self.now = 0.0
        models = [PooledModel(name, self.sizes[name], name in kept) for name in names]
        self.pool = ModelPool(models, memory, rng.choice([0.0, 3.0, float("inf")]), lambda: self.now)
        self.names = names
        self.waiting: dict[str, list[int]] = {name: [] for name in names}
        self.users: dict[str, int] = dict.fromkeys(names, 0)
        self.loading: list[str] = []
        self.stopping: list[str] = []
        self.num_asked = 0

    def act(self) -> None:
        for step in self.pool.decide():
            if step.kind is LOAD:
                self.loading.append(step.name)
            elif step.kind is STOP:
                assert not self.users[step.name]
                self.stopping.append(step.name)
            else:
                self.let_in(step.name)
        self.pool.check_integrity()
        for name in self.names:
            assert self.pool.num_users(name) == self.users[name]
            assert self.pool.num_waiting(name) == len(self.waiting[name])

    def let_in(self, name: str) -> None:
        self.users[name] += len(self.waiting[name])
        self.waiting[name].clear()

    def choices(self) -> list[Callable[[], None]]:
        used = [name for name in self.names if self.users[name]]
        waited = [name for name in self.names if self.waiting[name]]
        found: list[Callable[[], None]] = [self.ask, self.ask, self.pass_time]
        found += [lambda: self.leave(self.rng.choice(used))] * (2 * bool(used))
        found += [lambda: self.withdraw(self.rng.choice(waited))] * bool(waited)
        found += [self.end_load] * (2 * bool(self.loading)) + [self.end_stop] * (2 * bool(self.stopping))
        return found

    def ask(self) -> None:
        name = self.rng.choice(self.names)
        if self.pool.ask(name):
            self.users[name] += 1
        else:
            self.waiting[name].append(self.num_asked)
        self.num_asked += 1

    def leave(self, name: str) -> None:
        self.users[name] -= 1
        self.pool.leave(name)

    def withdraw(self, name: str) -> None:
        self.waiting[name].pop()
        self.pool.withdraw(name)

    def end_load(self) -> None:
        name = self.loading.pop()
        if self.rng.random() < 0.8:
            self.pool.loaded(name)
            self.let_in(name)
        else:
            self.pool.failed(name, EngineError("no luck"))
            self.waiting[name].clear()

    def end_stop(self) -> None:
        name = self.stopping.pop(self.rng.randrange(len(self.stopping)))
        self.pool.stopped(name)

    def pass_time(self) -> None:
        self.now += self.rng.random()

    def drain(self) -> None:
        """When nobody comes any more and loads succeed, everybody gets a turn, whatever was going on."""
        for _ in range(1000):
            self.act()
            if self.loading:
                name = self.loading.pop()
                self.pool.loaded(name)
                self.let_in(name)
            elif self.stopping:
                self.end_stop()
            elif used := [name for name in self.names if self.users[name]]:
                self.leave(self.rng.choice(used))
            elif not any(self.waiting.values()):
                return
        raise AssertionError(f"somebody waits for ever: {self.waiting}")


def test_any_order_of_events_stays_within_the_memory_and_serves_everybody(
    random_cases: Callable[[int, int], int],
) -> None:
    for seed in range(random_cases(300, 20_000)):
        world = World(random.Random(seed))
        for _ in range(world.rng.randint(1, 120)):
            world.rng.choice(world.choices())()
            world.act()
        world.drain()


def test_nobody_overtakes_for_ever() -> None:
    """One model is asked for all the time by two clients in turns; another's only request gets its turn."""
    pool = Pool({"busy": 1, "rare": 1}, 1)
    pool.begin("busy")
    pool.ask("rare")
    for _ in range(3):
        pool.decide()
        assert not pool.ask("busy")
    pool.leave("busy")
    assert pool.settle() == ["stop busy", "load rare"]
    pool.leave("rare")
    assert pool.settle() == ["stop rare", "load busy"]
    assert pool.num_users("busy") == 3
