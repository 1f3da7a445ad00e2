"""What happens between the end of an engine and the next one: pinned facts, waiting, hangs, spares, changed files."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import TokenEvent
from ktransformers.engine.plan import hardware as hardware_of
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.errors import CapacityError, ConfigError, EngineError
from ktransformers.optimize.machine import Machine
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.server.app import create_app
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.backend.interfaces.on_demand import OnDemandInterface
from ktransformers.server.balance import model_engine
from ktransformers.server.balance.launcher import Launcher
from ktransformers.server.balance.load_watch import LoadWatch, read_so_far
from ktransformers.server.balance.messages import EngineFacts, EngineOptions
from ktransformers.server.balance.restarts import pinned, shortfall
from ktransformers.server.balance.supervisor import SPARE_BYTES, BalanceConfig, Supervisor
from ktransformers.server.config import ServerConfig
from ktransformers.server.multi_model.model_manager import ModelManager
from ktransformers.server.multi_model.pool import ModelPool, PooledModel
from ktransformers.system.process_group import ChildProcess, ProcessGroup, Program
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.balance_backend import backend, check, collect, gone, request, run, until
from tests.support.servers.balance_fakes import POISON, ManualClock

LONG = {"max_tokens": 60, "ignore_eos": True}
LIMITS = SchedulerConfig(
    num_pages=100,
    page_size=4,
    vocab_size=40,
    eos_token_ids=(7,),
    max_model_len=600,
    chunk_size=64,
    max_batch_size=8,
    num_states=5,
)
FACTS = EngineFacts(scheduler=LIMITS, uses_gpus=True)


async def killed(made: BalanceServeInterface, number: int) -> asyncio.Task[list[TokenEvent]]:
    """A stream whose engine has just been killed in the middle of it."""
    stream = asyncio.create_task(collect(made, request(number, params=LONG)))
    steps = made.stats().engine.num_steps
    await until(lambda: made.stats().engine.num_steps > steps + 3)
    assert made.supervisor.engine_pid is not None
    os.kill(made.supervisor.engine_pid, signal.SIGKILL)
    return stream


@pytest.mark.exhaustive
def test_a_restarted_engine_has_the_pages_of_the_first() -> None:
    async def work() -> None:
        async with backend("load_by_free_memory", cache_lens=0, chunk_size=0) as made:
            for number in range(2):
                check(await (await killed(made, number)), request(number, params=LONG))
            assert made.supervisor.num_restarts == 2
            long = request(3, (1,) * 500)  # more than the engine would have had room for
            check(await collect(made, long), long)

    run(work)


def test_a_smaller_engine_is_refused_and_another_tried(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        clock = ManualClock()
        async with backend("load_smaller", clock=clock) as made:
            stream = await killed(made, 1)
            await until(lambda: 1.0 in clock.sleeping)
            assert "num_pages is 500, and the scheduler counts on 1000" in caplog.text
            assert made.pause is not None
            clock.wake(1.0)
            check(await stream, request(1, params=LONG))
            assert made.pause is None

    caplog.set_level(logging.INFO, "ktransformers.server")
    run(work)


@pytest.mark.exhaustive
def test_what_keeps_an_engine_from_starting_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        clock = ManualClock()
        async with backend("load_without_memory", clock=clock) as made:
            app = create_app(made, ServerConfig(model_names=("demo",)))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.get("/ready")).status_code == 200
                stream = await killed(made, 1)
                await until(lambda: 1.0 in clock.sleeping)
                answer = await client.get("/ready")
                assert answer.status_code == 503
                assert "this model does not fit at the moment" in answer.json()["error"]["message"]
                late = asyncio.create_task(collect(made, request(2)))
                clock.wake(1.0)
                await until(lambda: 2.0 in clock.sleeping)
                assert "nor is its folder there" in caplog.text
                clock.wake(2.0)
                check(await stream, request(1, params=LONG))
                check(await late, request(2))
                assert (await client.get("/ready")).status_code == 200

    caplog.set_level(logging.INFO, "ktransformers.server")
    run(work)


def test_an_engine_that_dies_before_the_scheduler_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Supervisor._start_scheduler

    async def late(self: Supervisor, facts: EngineFacts) -> None:
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
            await until(lambda: gone(pid))  # noqa: B023
        for _ in range(100):  # whoever waits for it hears of it
            await asyncio.sleep(0.001)
        await start(self, facts)

    engines: list[int] = []
    spawn = ProcessGroup.start

    def spawned(self: ProcessGroup, program: Program) -> ChildProcess:
        child = spawn(self, program)
        engines.append(child.pid)
        monkeypatch.setattr(ProcessGroup, "start", spawn)  # the first one
        return child

    monkeypatch.setattr(ProcessGroup, "start", spawned)
    monkeypatch.setattr(Supervisor, "_start_scheduler", late)

    async def work() -> None:
        async with backend("load_slow") as made:
            check(await collect(made, request(1)), request(1))
            assert made.supervisor.num_restarts == 1

    run(work)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_many_poisonous_requests_do_not_end_the_service() -> None:
    async def work() -> None:
        async with backend("load_mortal", max_engine_restarts=2) as made:
            for number in range(2):
                with pytest.raises(EngineError, match="died again and again"):
                    await collect(made, request(number, (POISON, 1, 2)))
                check(await collect(made, request(10 + number)), request(10 + number))
            assert made.stats().engine.num_poisoned == 2

    run(work)


def test_the_number_of_restarts_is_a_setting() -> None:
    async def work() -> None:
        async with backend("load_slow", max_engine_restarts=0) as made:
            with pytest.raises(EngineError, match=r"died 1 times .*--max_engine_restarts"):
                await (await killed(made, 1))

    run(work)
    with pytest.raises(ConfigError, match="--max_engine_restarts must be at least 0"):
        BalanceConfig(EngineConfig(), max_engine_restarts=-1)
    with pytest.raises(ConfigError, match="--engine_timeout must be"):
        BalanceConfig(EngineConfig(), engine_timeout=float("nan"))


def test_an_engine_that_hangs_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with backend("load_hanging", engine_timeout=1.0) as made:
            check(await collect(made, request(1, params=LONG)), request(1, params=LONG))
            assert made.stats().num_engine_restarts >= 1

    run(work)
    assert "it hangs, and is killed" in caplog.text


@pytest.mark.parametrize("seconds", [300.0, 0.0])
def test_loading_that_stands_still_is_a_hang(seconds: float) -> None:
    watch = LoadWatch(seconds)
    assert watch.pause == seconds / 4
    looks = [(0, 0), (0, 9), (0, 10), (1, 10)] + 5 * [(1, 11)]  # a slow disk: something comes between two looks
    assert [watch.is_stuck(progress) for progress in looks] == [False] * 8 + [True]


def test_what_a_process_reads_from_a_disk_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "io").write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 0\n")
    (folder / "stat").write_text("7 (a) b (c) S 1 7 7 0 -1 4194560 1000 0 33 0 5 1 0 0")
    assert read_so_far(7, tmp_path) == (4096, 33)
    assert read_so_far(8, tmp_path) == (0, 0)
    assert len(read_so_far(os.getpid())) == 2


async def hang_in_loading(made: BalanceServeInterface, clock: ManualClock) -> None:
    """Let time pass while an engine of load_stuck stands still, until somebody notices."""

    def is_noticed() -> bool:
        supervisor = made._supervisor
        if supervisor is not None and supervisor._launcher._reported[1] == "layers.7" and 75.0 in clock.sleeping:
            clock.wake(75.0)
        return made.pause is not None and "the engine hung while loading" in made.pause

    await until(is_noticed)


@pytest.mark.exhaustive
def test_an_engine_that_hangs_while_loading_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """The first one, and the one after a death."""

    async def work() -> None:
        clock = ManualClock()
        engine = EngineConfig(gguf_path=DEMO_GGUF, cache_lens=4000, chunk_size=16)
        config = BalanceConfig(
            engine=engine, page_size=4, factory="tests.support.servers.balance_fakes:load_stuck", log_level="error",
            has_spare_engine=False, engine_timeout=300.0,
        )  # fmt: skip
        made = BalanceServeInterface(config, clock=clock)
        transport = httpx.ASGITransport(app=create_app(made, ServerConfig(model_names=("demo",))))

        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            starting = asyncio.create_task(made.start())
            await hang_in_loading(made, clock)
            answer = await client.get("/ready")
            assert answer.status_code == 503
            assert "for 300 s it read nothing and reported nothing after layers.7" in answer.text
            await starting
            assert (await client.get("/ready")).status_code == 200
            assert made.supervisor.num_restarts == 1
            stream = await killed(made, 1)
            await hang_in_loading(made, clock)
            check(await stream, request(1, params=LONG))
            assert made.supervisor.num_restarts == 3
        await made.close()

    run(work)
    assert "hung while loading" in caplog.text


@pytest.mark.exhaustive
def test_an_engine_that_is_killed_while_it_loads_for_those_who_wait_is_tried_again() -> None:
    """As one of models.yaml: requests that wait for the model do not hear of it."""

    async def work() -> None:
        engine = EngineConfig(gguf_path=DEMO_GGUF, cache_lens=4000, chunk_size=16)
        config = BalanceConfig(
            engine, page_size=4, factory="tests.support.servers.balance_fakes:load_killed_twice", log_level="error",
            has_spare_engine=False,
        )  # fmt: skip
        made: list[BalanceServeInterface] = []

        def make() -> BalanceServeInterface:
            made.append(BalanceServeInterface(config))
            return made[-1]

        model = OnDemandInterface.of(BalanceServeInterface)(make, None)  # type: ignore[arg-type]
        pool = ModelPool([PooledModel("a", {"cpu": 1})], {"cpu": 1}, float("inf"))
        manager = ModelManager(pool, {"a": model}, max_waiting=9)
        await asyncio.gather(*(manager.enter("a") for _ in range(3)))
        assert model.is_ready
        assert len(made) == 1
        assert made[0].supervisor.num_restarts == 2
        await manager.close()

    run(work)


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("factory", "most", "says"),
    [
        ("load_killed_twice", 1, r"the engine died 2 times in 600 s; giving up \(--max_engine_restarts\)"),
        ("load_killed_twice", 0, "the engine died 1 times"),
        ("load_faulty", 5, "ended while loading, with signal 11"),
    ],
)
def test_how_often_an_engine_that_is_killed_while_it_loads_is_tried_again(factory: str, most: int, says: str) -> None:
    async def work() -> None:
        with pytest.raises(EngineError, match=says):
            async with backend(factory, max_engine_restarts=most):
                raise AssertionError("it started")

    run(work)


def test_engines_that_always_hang_while_loading_end_the_service() -> None:
    async def work() -> None:
        clock = ManualClock()
        config = BalanceConfig(
            EngineConfig(gguf_path=DEMO_GGUF),
            factory="tests.support.servers.balance_fakes:load_stuck",
            max_engine_restarts=0,
        )
        made = BalanceServeInterface(config, clock=clock)
        starting = asyncio.create_task(made.start())
        await hang_in_loading(made, clock)
        with pytest.raises(EngineError, match=r"died 1 times .*--max_engine_restarts"):
            await starting
        await made.close()

    run(work)


@pytest.mark.exhaustive
def test_a_spare_becomes_the_next_engine() -> None:
    async def work() -> None:
        async with backend("load_slow", has_spare_engine=True) as made:
            supervisor = made.supervisor
            for number in range(2):
                await until(lambda: supervisor.spare_pid is not None)
                spare = supervisor.spare_pid
                check(await (await killed(made, number)), request(number, params=LONG))
                assert supervisor.engine_pid == spare
            await until(lambda: supervisor.spare_pid is not None)
            spare = supervisor.spare_pid
            assert spare is not None
            os.kill(spare, signal.SIGKILL)  # nobody minds
            await until(lambda: gone(spare))
            check(await (await killed(made, 9)), request(9, params=LONG))
            assert supervisor.num_restarts == 3
            await until(lambda: supervisor.spare_pid is not None)
            last = supervisor.spare_pid
            assert last is not None
        await until(lambda: gone(last))

    run(work)


@pytest.mark.parametrize("has_spare", [True, False])
def test_memory_of_the_spare_is_planned(has_spare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[EngineOptions] = []

    async def load(self: Launcher, options: EngineOptions, progress: object) -> None:
        told.append(options)
        raise CapacityError("no engine in this test")

    def build(config: EngineConfig, *, hardware: Hardware, **others: object) -> None:
        told_of = hardware.machine
        assert (told_of.available_bytes, told_of.devices["cpu"]) == (1000, 1000)
        raise CapacityError("seen")

    monkeypatch.setattr(Launcher, "load", load)

    async def work() -> None:
        with pytest.raises(CapacityError, match="no engine"):
            async with backend("load", has_spare_engine=has_spare):
                raise AssertionError("it started")

    run(work)
    (options,) = told
    assert options.spare_bytes == (SPARE_BYTES if has_spare else 0)
    free = 1000 + options.spare_bytes
    monkeypatch.setattr(hardware_of, "detect_machine", lambda: Machine(free, free, {"cpu": free}))
    monkeypatch.setattr(model_engine, "build_engine", build)
    with pytest.raises(CapacityError, match="seen"):
        model_engine.load_engine(options, lambda done, total, name: None)


def test_children_leave_signals_to_their_parent() -> None:
    async def work() -> None:
        async with backend("load_slow", has_spare_engine=True) as made:
            stream = asyncio.create_task(collect(made, request(1, params=LONG)))
            await until(lambda: made.stats().engine.num_steps > 3 and made.supervisor.spare_pid is not None)
            pids = made.supervisor.engine_pid, made.supervisor.scheduler_pid, made.supervisor.spare_pid
            for pid in pids:  # the spare has hardly begun: there is no moment in which it could be hit
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                    assert pid is not None
                    os.kill(pid, number)
            check(await stream, request(1, params=LONG))
            assert made.supervisor.num_restarts == 0
            assert not any(gone(pid) for pid in pids if pid is not None)

    run(work)


def test_restarts_are_pinned_to_what_there_was() -> None:
    config = pinned(EngineConfig(cache_lens=399), FACTS)
    assert (config.cache_lens, config.chunk_size, config.use_cuda) == (400, 64, True)
    assert pinned(EngineConfig(use_cuda=True), FACTS).use_cuda is True
    assert pinned(EngineConfig(), msgspec.structs.replace(FACTS, uses_gpus=False)).use_cuda is False
    assert replace(config, cache_lens=0, chunk_size=0, use_cuda=None) == EngineConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 99}, "num_pages is 99, and the scheduler counts on 100"),
        ({"chunk_size": 63}, "chunk_size is 63"),
        ({"num_states": 4}, "num_states is 4, and the scheduler counts on 5"),
        ({"page_size": 8}, "page_size is 8, and was 4"),
        ({"vocab_size": 41}, "vocab_size"),
        ({"eos_token_ids": ()}, "eos_token_ids"),
        ({"max_model_len": None}, "max_model_len"),
    ],
)
def test_an_engine_with_less_does_not_match(changes: dict[str, Any], message: str) -> None:
    assert message in str(shortfall(FACTS, EngineFacts(scheduler=replace(LIMITS, **changes))))


def test_an_engine_with_more_matches() -> None:
    assert shortfall(FACTS, EngineFacts(scheduler=replace(LIMITS, num_pages=101, chunk_size=65))) is None
