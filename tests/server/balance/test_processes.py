"""The processes of balance_serve, with an engine without a model: deaths, aborts, poison, slow readers, start-up."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, PastToken, TokenEvent
from ktransformers.errors import (
    CapacityError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    NotReadyError,
    SlowReaderError,
)
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface, _commands
from ktransformers.server.balance.messages import Command, decode, encode
from ktransformers.server.balance.supervisor import BalanceConfig
from ktransformers.system.private_folder import PrivateFolder
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.balance_backend import DEADLINE, alone, backend, check, collect, gone, request, run, until
from tests.support.servers.balance_fakes import MODEL_LEN, POISON
from tests.support.servers.fake_engine import VOCAB_SIZE


def test_answers_to_one_prompt_are_sent_as_one_record() -> None:
    """32 choices with fields of a megabyte: the scheduler is told once, and nothing of stop strings."""
    first = request(1, prompt=tuple(range(1000)), params={"stop": ("x" * (1 << 20),), "logit_bias": {5: 1.0}})
    first = replace(first, prediction_ids=tuple(range(500)))
    asked = [
        replace(first, request_id=f"r{i}", params=replace(first.params, seed=i), is_suspended=lambda: False)
        for i in range(32)
    ]
    other = replace(first, request_id="other", cache_salt="b")
    unlike = replace(first, request_id="unlike", params=replace(first.params, seed=3, temperature=0.5))
    commands = list(_commands([*asked, other, unlike]))
    data = b"".join(map(encode, commands))
    assert len(data) < 3 * 6000
    heard = [one for data in map(encode, commands) for one in decode(data, Command).requests()]
    assert {one.request_id for one in heard} == {one.request_id for one in (*asked, other, unlike)}
    for one in heard:
        wanted = next(ask for ask in (*asked, other, unlike) if ask.request_id == one.request_id)
        assert one.params == replace(wanted.params, stop=())
        assert (tuple(one.prompt_ids), one.cache_salt) == (wanted.prompt_ids, wanted.cache_salt)
        assert tuple(one.prediction_ids) == wanted.prediction_ids


def test_suspended_answers_are_sent_as_such_beside_those_that_are_not() -> None:
    first = request(1, prompt=(1, 2, 3))
    asked = [replace(first, request_id=f"r{i}", params=replace(first.params, seed=i)) for i in range(6)]
    heard = [one for command in _commands(asked, {"r1", "r2", "r5"}) for one in command.requests()]
    assert {one.request_id: one.is_suspended for one in heard} == {f"r{i}": i in (1, 2, 5) for i in range(6)}


def test_choices_of_one_prompt_get_the_answers_they_get_alone() -> None:
    async def work() -> None:
        async with backend() as made:
            first = request(8)
            requests = [replace(first, request_id=f"r{i}", params=replace(first.params, seed=i)) for i in range(12)]
            left = made.inference(replace(first, request_id="left"))
            leaving = asyncio.create_task(anext(left))
            await asyncio.sleep(0)
            leaving.cancel()  # in the turn in which it came
            await asyncio.gather(leaving, return_exceptions=True)
            await left.aclose()
            answers = await asyncio.gather(*(collect(made, asked) for asked in requests))
            for events, asked in zip(answers, requests, strict=True):
                check(events, asked)
            await until(lambda: made.stats().num_running == made.stats().num_waiting == 0)

    run(work)


def test_many_requests_at_once_get_the_answers_they_get_alone() -> None:
    async def work() -> None:
        async with backend(cache_lens=200) as made:  # few pages: they throw each other out
            requests = [request(number) for number in range(30)]
            answers = await asyncio.gather(*(collect(made, asked) for asked in requests))
            for events, asked in zip(answers, requests, strict=True):
                check(events, asked)
            stats = made.stats()
            assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 0, 0.0)
            assert stats.scheduler is not None
            assert stats.scheduler.num_preemptions > 0
            assert stats.engine.num_steps > 0
            assert made.model.max_len == 200

    run(work)


def test_suspended_requests_go_on_with_the_answers_they_get_alone() -> None:
    """Suspended and resumed in the very turn in which they come, too; half of them are through when an engine dies."""

    async def work() -> None:
        rng = random.Random(2)
        async with backend(cache_lens=200) as made:  # few pages
            requests = [request(number, params={"max_tokens": rng.randint(1, 40)}) for number in range(24)]
            streams = [asyncio.create_task(collect(made, asked)) for asked in requests]
            for asked in requests[::3]:
                await asyncio.sleep(0)
                made.suspend(asked.request_id)
            for turn in range(60):
                await asyncio.sleep(0.001)
                made.suspend(rng.choice(requests).request_id)
                made.resume(rng.choice(requests).request_id)
                if turn == 30:
                    pid = made.supervisor.engine_pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
            for asked in requests:
                made.suspend(asked.request_id)
            await until(lambda: made.stats().num_running + made.stats().num_waiting == 0)
            assert made.stats().num_suspended > 0
            assert made.stats().cache_usage == 0.0
            for asked in requests:
                made.resume(asked.request_id)
            for stream, asked in zip(streams, requests, strict=True):
                check(await stream, asked)

    run(work)


def test_an_answer_that_was_begun_before_is_suspended_while_its_past_is_told() -> None:
    """As a request is that was suspended when the server was killed: it must not go on by itself."""

    async def work() -> None:
        async with backend() as made:
            asked = request(3, params={"max_tokens": 30})
            told = [PastToken.of(0, event) for event in await collect(made, asked)]
            past = [token for token in told[:9] if token is not None]
            heard: list[TokenEvent] = []

            async def read() -> None:
                async with aclosing(made.inference(replace(asked, request_id="again", past=past))) as events:
                    async for event in events:
                        heard.append(event)
                        if len(heard) <= len(past):
                            made.suspend("again")

            reading = asyncio.create_task(read())
            await until(lambda: made.stats().num_suspended == 1)
            assert len(heard) == 9
            made.resume("again")
            await reading
            assert [event.token_id for event in heard] == alone(asked)[0]

    run(work)


def test_a_suspended_request_ends_when_its_time_is_over_its_reader_leaves_or_the_service_stops() -> None:
    async def work() -> None:
        async with backend("load_slow") as made:
            asked = [request(number, params={"max_tokens": 400, "ignore_eos": True}) for number in (1, 3, 7)]
            timed = request(5, timeout=0.05)
            streams = [asyncio.create_task(collect(made, one)) for one in (*asked, timed)]
            await asyncio.sleep(0)
            for one in (*asked, timed):
                made.suspend(one.request_id)
            with pytest.raises(DeadlineError, match=r"was suspended when the 0\.05 s"):
                await streams[3]
            made.end("r7")
            made.end("nobody")
            assert (await streams[2])[-1].finish_reason is FinishReason.ABORT
            await until(lambda: made.stats().num_suspended == 2)
            streams[0].cancel()
            await until(lambda: made.stats().num_suspended == 1)
        assert (await streams[1])[-1].finish_reason is FinishReason.ABORT

    run(work)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_streams_go_on_when_the_engine_is_killed(random_cases: Callable[[int, int], int]) -> None:
    kills = random_cases(3, 12)

    async def work() -> None:
        async with backend("load_slow", max_engine_restarts=kills) as made:
            params = {"max_tokens": 40 * kills, "ignore_eos": True}
            requests = [request(number, params=params) for number in range(8)]
            streams = [asyncio.create_task(collect(made, asked)) for asked in requests]
            for kill in range(kills):
                steps = made.stats().engine.num_steps
                await until(lambda: made.stats().engine.num_steps >= steps + 12)  # noqa: B023
                pid = made.supervisor.engine_pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                late = request(100 + kill)
                streams.append(asyncio.create_task(collect(made, late)))
                requests.append(late)
                await until(lambda: made.supervisor.num_restarts == kill + 1)  # noqa: B023
            for stream, asked in zip(streams, requests, strict=True):
                check(await stream, asked)
            assert made.stats().num_engine_restarts == kills
            assert made.stats().scheduler.num_engine_losses == kills  # type: ignore[union-attr]

    run(work, kills * DEADLINE / 3)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_request_that_kills_engines_is_ended_alone() -> None:
    async def work() -> None:
        async with backend("load_mortal") as made:
            good = [request(number, params={"max_tokens": 40}) for number in range(6)]
            bad = request(50, (POISON, 1, 2))
            tasks = [asyncio.create_task(collect(made, asked)) for asked in [*good[:3], bad, *good[3:]]]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(answers[3], EngineError)
            for events, asked in zip(answers[:3] + answers[4:], good, strict=True):
                assert isinstance(events, list)
                check(events, asked)
            assert made.stats().engine.num_poisoned == 1
            assert made.stats().num_engine_restarts == 3

    run(work)


def test_without_the_scheduler_everything_stops() -> None:
    async def work() -> None:
        async with backend("load_slow") as made:
            stream = asyncio.create_task(collect(made, request(1, params={"max_tokens": 2000, "ignore_eos": True})))
            await until(lambda: made.stats().engine.num_steps > 3)
            scheduler, engine = made.supervisor.scheduler_pid, made.supervisor.engine_pid
            assert scheduler is not None
            assert engine is not None
            os.kill(scheduler, signal.SIGKILL)
            with pytest.raises(EngineError, match="scheduler process ended with signal 9"):
                await stream
            assert "scheduler process ended" in str(await made.lost())
            assert not made.is_ready
            with pytest.raises(EngineError):
                await collect(made, request(2))
        await until(lambda: gone(engine))
        async with backend() as another:
            check(await collect(another, request(3)), request(3))

    run(work)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_engine_that_never_comes_back_ends_the_service() -> None:
    async def work() -> None:
        async with backend("load_once") as made:
            stream = asyncio.create_task(collect(made, request(1, params={"max_tokens": 2000, "ignore_eos": True})))
            await until(lambda: made.stats().engine.num_steps > 3)
            assert made.supervisor.engine_pid is not None
            os.kill(made.supervisor.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="died 6 times"):
                await stream

    run(work)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """As addresses of sockets need it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_folders_of_killed_services_are_removed_by_the_next_one(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    code = "from ktransformers.system.private_folder import PrivateFolder\n"
    code += "print(PrivateFolder().path, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().decode().strip())
        (left / "commands").touch()
        (short_path / "ktransformers-of-somebody").mkdir()
        first = PrivateFolder()
        assert left.exists()
        other.kill()
    second = PrivateFolder()
    assert {path.name for path in short_path.iterdir()} == {
        first.path.name, second.path.name, "ktransformers-of-somebody"
    }  # fmt: skip
    first.remove()
    second.remove()
    assert [path.name for path in short_path.iterdir()] == ["ktransformers-of-somebody"]


PARENT = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.support.servers.balance_backend import backend, collect, request, until

async def main():
    async with backend("load_slow") as made:
        task = asyncio.create_task(collect(made, request(1, params={{"max_tokens": 2000, "ignore_eos": True}})))
        await until(lambda: made.stats().engine.num_steps > 3)
        print(made.supervisor.engine_pid, made.supervisor.scheduler_pid, flush=True)
        await task

asyncio.run(main())
"""


def test_no_orphans_when_the_api_process_is_killed() -> None:
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", PARENT.format(root=root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()

    async def work() -> None:
        await until(lambda: all(gone(pid) for pid in pids))

    run(work)


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("load_never", CapacityError, "this model does not fit; take a smaller one"),
        ("load_crash", EngineError, "ended while loading, with exit code 3"),
    ],
)
def test_start_up_errors_reach_the_caller(
    factory: str, error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        with pytest.raises(error, match=message):
            async with backend(factory):
                raise AssertionError("it started")

    run(work)
    assert "Traceback" not in capfd.readouterr().err


def test_loading_reports_progress_and_leaves_nothing_behind() -> None:
    async def work() -> None:
        fds = len(os.listdir("/proc/self/fd"))
        heard: list[tuple[int, int, str]] = []
        engine = EngineConfig(gguf_path=DEMO_GGUF, cache_lens=400)
        made = BalanceServeInterface(
            BalanceConfig(
                engine=engine, page_size=4, factory="tests.support.servers.balance_fakes:load", log_level="error"
            )
        )
        with pytest.raises(NotReadyError):
            made.check(request(1))
        await made.start(lambda *report: heard.append(report))
        assert heard[-1] == (2, 2, "module 2")
        folder = made.supervisor._folder.path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        await collect(made, request(1))
        await made.close()
        await made.close()
        assert not folder.exists()
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) <= fds

    run(work)


def test_the_scheduler_process_knows_no_torch() -> None:
    code = (
        "import sys, ktransformers.server.balance.scheduler_process\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_leaving_frees_the_pages_at_once() -> None:
    async def work() -> None:
        async with backend("load_slow") as made:
            async with aclosing(made.inference(request(1, params={"max_tokens": 2000, "ignore_eos": True}))) as events:
                await anext(events)
                await until(lambda: made.stats().cache_usage > 0)
            await until(lambda: made.stats().num_running == 0)
            assert made.stats().cache_usage == 0

    run(work)


def test_a_slow_reader_is_cut_off_and_the_others_are_served() -> None:
    async def work() -> None:
        async with backend(max_unread=50) as made:
            endless = request(1, params={"max_tokens": 500, "ignore_eos": True})
            async with aclosing(made.inference(endless)) as slow:
                await anext(slow)
                check(await collect(made, request(2)), request(2))
                await until(lambda: made.stats().num_running == 0)
                with pytest.raises(SlowReaderError):
                    async for _ in slow:
                        pass

    run(work)


def test_deadlines_priorities_and_refusals() -> None:
    async def work() -> None:
        async with backend("load_slow", max_batch_size=1) as made:
            endless = {"max_tokens": 2000, "ignore_eos": True}
            with pytest.raises(DeadlineError):
                await collect(made, request(1, params=endless, timeout=0.1))
            running = asyncio.create_task(collect(made, request(2, params={"max_tokens": 30, "ignore_eos": True})))
            await until(lambda: made.stats().num_running == 1)
            order: list[int] = []

            async def one(number: int, priority: int) -> None:
                await collect(made, request(number, priority=priority))
                order.append(number)

            tasks = [asyncio.create_task(one(number, priority)) for number, priority in ((3, 5), (4, 0), (5, -1))]
            await asyncio.gather(running, *tasks)
            assert order == [5, 4, 3]
            for wrong, error in (
                (request(6, (1,) * MODEL_LEN), ContextLengthError),
                (request(7, (VOCAB_SIZE,)), ConfigError),
                (request(8, params={"logit_bias": {VOCAB_SIZE: 1.0}}), ConfigError),
            ):
                with pytest.raises(error):
                    made.check(wrong)

    run(work)


@pytest.mark.exhaustive
def test_stop_strings_end_a_request_in_the_scheduler_too() -> None:
    async def work() -> None:
        async with backend("load_slow") as made:
            plain = request(1, params={"max_tokens": 60, "ignore_eos": True})
            text = "".join(event.text for event in await collect(made, plain))
            stop = text[len(text) // 2 : len(text) // 2 + 3]
            asked = request(1, params={"max_tokens": 2000, "ignore_eos": True, "stop": (stop,)})
            events = await collect(made, asked)
            assert events[-1].finish_reason is FinishReason.STOP
            assert events[-1].stop == stop
            assert "".join(event.text for event in events) == text[: text.index(stop)]
            await until(lambda: made.stats().num_running == 0)

    run(work)
