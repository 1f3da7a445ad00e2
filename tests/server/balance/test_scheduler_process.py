"""The scheduler process's own decisions, in this process: who is suspected, what deaths mean, when an engine hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
import zmq

from ktransformers.cli import build_parser
from ktransformers.cli.serve import serving
from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason
from ktransformers.errors import ConfigError, EngineError
from ktransformers.media.records import Sight
from ktransformers.scheduler.commands import Add, Finish, News, Resume, Suspend
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.records import RowResult, StepPlan, StepResult
from ktransformers.server.backend.interfaces import balance_serve
from ktransformers.server.balance.messages import (
    Anew,
    Command,
    EngineDown,
    EngineFacts,
    EngineUp,
    EngineWork,
    SchedulerOptions,
    encode,
)
from ktransformers.server.balance.messages import decode as decoded
from ktransformers.server.balance.scheduler_process import SchedulerProcess
from ktransformers.server.balance.step_watch import TOKENS_PER_LIMIT, StepWatch
from ktransformers.server.balance.supervisor import BalanceConfig, Supervisor
from tests.support.servers.fake_engine import VOCAB_SIZE, make_request

STEP_SECONDS = 100.0


class Around:
    """A scheduler process with both its neighbours played by the test; time stands still unless `now` is set."""

    def __init__(self, **changes: object) -> None:
        self.now = 1000.0
        self._context = zmq.Context()
        self._commands, self._news = self._bound(zmq.PUSH, "commands"), self._bound(zmq.PULL, "news")
        limits = {"num_pages": 100, "page_size": 4, "chunk_size": 64, "max_batch_size": 8, "vocab_size": VOCAB_SIZE}
        options = SchedulerOptions(
            config=SchedulerConfig(**(limits | changes)),  # type: ignore[arg-type]
            parent_pid=0, commands="inproc://commands", news="inproc://news", log_level="info",
            step_seconds=STEP_SECONDS, checks_integrity=True,
        )  # fmt: skip
        self.process = SchedulerProcess(options, self._context, lambda: self.now)
        self._engines: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []

    def _bound(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.bind(f"inproc://{name}")
        return socket

    def tell(self, *commands: Command) -> list[News]:
        """Send, let the process have a turn, and return what it says."""
        for command in (*commands, Finish("nobody", FinishReason.ABORT)):  # the last one: a turn never waits
            self._commands.send(encode(command))
        self.process.turn()
        news = []
        while self._news.poll(0):
            news.append(decoded(self._news.recv(), News))
        return news

    def engine(self, epoch: int) -> None:
        """A new engine connects."""
        self.tell(EngineUp(epoch, f"inproc://steps-{epoch}", f"inproc://results-{epoch}"))
        steps, results = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        steps.connect(f"inproc://steps-{epoch}")
        results.connect(f"inproc://results-{epoch}")
        self._engines.append((steps, results))

    def step(self) -> StepPlan:
        """What the engine is to compute next."""
        steps = self._engines[-1][0]
        while not steps.poll(0):
            self.tell()
        plan: StepPlan = decoded(steps.recv(), StepPlan)
        return plan

    def answer(self, plan: StepPlan, seconds: float = 0.0) -> None:
        rows = [RowResult(1) for row in plan.rows if row.is_sampled]
        before = self.num_steps
        self._engines[-1][1].send(encode(StepResult(step_id=plan.step_id, results=rows, seconds=seconds)))
        while self.num_steps == before:
            self.tell()

    def mending(self, is_begun: bool) -> None:
        """The engine says so, and is heard."""
        self._engines[-1][1].send(encode(StepResult(step_id=-1, results=[], recovering=is_begun)))
        link = self.process._link
        assert link is not None
        while link.is_recovering is not is_begun:
            self.tell()

    def sent(self) -> list[EngineWork]:
        """What waits for the engine."""
        steps, work = self._engines[-1][0], []
        while steps.poll(0):
            work.append(decoded(steps.recv(), EngineWork))
        return work

    @property
    def num_steps(self) -> int:
        return self.process.driver._totals.num_steps

    def die(self, epoch: int) -> tuple[int, ...]:
        """The engine of this epoch dies, and the next one comes; the epochs whose deaths that explains."""
        losses = [loss for news in self.tell(EngineDown(epoch)) for loss in news.losses]
        assert [loss.epoch for loss in losses] == [epoch]
        self.engine(epoch + 1)
        return losses[0].explained

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def around() -> Iterator[Around]:
    made = Around()
    yield made
    made.close()


def test_an_expired_suspect_takes_its_strikes_with_it(around: Around, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ktransformers.scheduler")
    around.engine(0)
    around.tell(Add(make_request("suspect", (1, 2), deadline=2000.0)))
    around.die(0)
    around.die(1)
    around.tell(*(Add(make_request(f"good{i}", (3, 4))) for i in range(3)))
    assert around.process.scheduler.max_admitted == 1
    assert "engines died with suspect in their batch" in caplog.text
    around.now = 2001.0
    (news,) = around.tell()
    assert news.updates[0].is_expired
    assert around.process.scheduler.max_admitted is None
    for _ in range(3):  # two steps of the suspect are with the engine
        around.answer(around.step())
    assert around.process.scheduler.stats().num_running == 3
    assert "no request is suspected any more" in caplog.text


def test_a_suspended_suspect_keeps_nobody_waiting(around: Around) -> None:
    around.engine(0)
    around.tell(Add(make_request("suspect", (1, 2))))
    around.die(0)
    around.die(1)
    around.tell(Suspend("suspect"), *(Add(make_request(f"good{i}", (3, 4), 9)) for i in range(3)))
    assert around.process.scheduler.max_admitted is None
    for _ in range(3):  # two steps of the suspect are with the engine
        around.answer(around.step())
    assert around.process.scheduler.stats().num_running == 3
    around.tell(Resume("suspect"), Resume("nobody"), Suspend("nobody"))
    assert around.process.scheduler.max_admitted == 1


def test_deaths_of_a_request_that_was_found_are_explained(around: Around) -> None:
    around.engine(0)
    around.tell(Add(make_request("bad", (1, 2))))
    assert [around.die(epoch) for epoch in range(3)] == [(), (), (0, 1, 2)]
    around.tell(Add(make_request("good", (3, 4), max_tokens=2)))
    around.answer(around.step())
    around.tell(Add(make_request("worse", (5, 6))))
    assert [around.die(epoch) for epoch in range(3, 6)] == [(), (), (3, 4, 5)]


def test_an_engine_that_mends_itself_is_sent_nothing_until_it_has(around: Around) -> None:
    """However long it takes; then what it had is sent anew, from the first token on."""
    around.engine(0)
    around.tell(Add(make_request("r", (1, 2, 3))))
    around.answer(around.step())
    before = around.sent()
    assert before
    around.mending(True)
    around.tell(Add(make_request("later", (4, 5))))
    around.now += 100 * STEP_SECONDS
    assert all(news.hanging is None for news in around.tell())
    assert around.sent() == []
    around.mending(False)
    work = around.sent()
    while len(work) < 2:
        around.tell()
        work += around.sent()
    anew, plan, *_ = work
    assert isinstance(anew, Anew)
    assert isinstance(plan, StepPlan)
    assert {start.request_id: list(start.token_ids) for start in plan.starts} == {"r": [1, 2, 3, 1], "later": [4, 5]}
    around.answer(plan)


def test_an_engine_that_does_nothing_but_die_is_not_excused_by_its_requests(around: Around) -> None:
    around.engine(0)
    around.tell(Add(make_request("first", (1, 2))))
    for epoch in range(3):
        around.die(epoch)
    around.tell(Add(make_request("second", (3, 4))))
    assert [around.die(epoch) for epoch in range(3, 6)] == [(), (), ()]


def test_a_death_that_nobody_was_part_of_is_answered_too(around: Around) -> None:
    around.engine(0)
    assert around.die(0) == ()


def test_a_step_without_a_result_means_that_the_engine_hangs(around: Around) -> None:
    around.engine(7)
    around.tell(Add(make_request("one", tuple(range(1, 11)), max_tokens=1)))
    limit = STEP_SECONDS * (1 + 10 / TOKENS_PER_LIMIT)
    heard: list[int | None] = []
    for part in range(1, 6):
        around.now = 1000.0 + limit * part / 4
        heard += [news.hanging for news in around.tell() if news.hanging is not None] or [None]
    assert heard == [None, None, None, 7, None]
    around.die(7)
    plan = around.step()  # computed again, and watched again from its own beginning
    around.answer(plan)
    assert around.process.scheduler.has_requests is False


@pytest.mark.parametrize("tokens", [1, TOKENS_PER_LIMIT])
def test_a_step_gets_time_by_its_tokens(tokens: int) -> None:
    watch, limit = StepWatch(10.0), 10.0 * (1 + tokens / TOKENS_PER_LIMIT)
    watch.sent(tokens, 0.0)
    watch.sent(1, 0.0)
    looks = [watch.is_overdue(limit * part / 4) for part in range(1, 5)]
    assert looks == [False, False, False, True]
    watch.finished(limit)  # the next one has only begun
    assert not watch.is_overdue(limit + 1)
    watch.finished(limit + 1)
    assert watch.next_look is None


def test_time_in_which_nobody_looked_does_not_count() -> None:
    watch = StepWatch(10.0)
    watch.sent(0, 0.0)
    assert watch.next_look == 2.5
    assert not watch.is_overdue(3600.0)  # the whole group was stopped for an hour
    assert watch.next_look == 3602.5
    assert [watch.is_overdue(3600.0 + 2.5 * part) for part in (1, 2, 3)] == [False, False, True]


def test_zero_seconds_watch_nothing() -> None:
    watch = StepWatch(0.0)
    watch.sent(1, 0.0)
    assert watch.next_look is None
    assert not watch.is_overdue(1e9)


def test_finish_reason_of_the_expired_is_abort(around: Around) -> None:
    (news,) = around.tell(Add(make_request("late", (1, 2), deadline=1.0)))
    assert news.updates[0].finish_reason is FinishReason.ABORT


def test_the_scheduler_has_the_limits_that_the_engine_says() -> None:
    limits = SchedulerConfig(9, 4, 8, 2, 40, num_states=7, snapshot_interval=256, picture_sight=Sight.PICTURE)
    options = SchedulerOptions(config=limits, parent_pid=0, commands="", news="", log_level="info")
    assert decoded(encode(options), SchedulerOptions).config == limits


def test_the_flag_for_streams_beside_prompts_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to the scheduler, which then goes by the times that the engine tells."""
    config: list[BalanceConfig] = []
    monkeypatch.setattr(balance_serve, "BalanceServeInterface", lambda made, profile: config.append(made))
    args = build_parser().parse_args(["serve", "--max_itl_ratio", "3.5", "--max_gap_ms", "80"])
    serving.backend_maker(args, EngineConfig())()
    started: list[SchedulerOptions] = []

    async def start(options: SchedulerOptions) -> None:
        started.append(options)
        raise EngineError("enough")

    async def supervise() -> None:
        supervisor = Supervisor(config[0], lambda news: None)
        monkeypatch.setattr(supervisor._launcher, "start_scheduler", start)
        facts = EngineFacts(scheduler=SchedulerConfig(9, 4, 8, 2, 40))
        with pytest.raises(EngineError, match="enough"):
            await supervisor._start_scheduler(facts)
        await supervisor.close()

    asyncio.run(supervise())
    arrived = started[0].config
    assert (arrived.max_itl_ratio, arrived.max_gap_ms) == (3.5, 80.0)
    args = build_parser().parse_args(["serve"])
    serving.backend_maker(args, EngineConfig())()
    assert (config[1].max_itl_ratio, config[1].max_gap_ms) == (2.0, 500.0)


def test_steps_beside_a_stream_are_as_long_as_the_engine_takes() -> None:
    around = Around(num_pages=2000, chunk_size=512, max_itl_ratio=2.0)
    around.engine(0)
    around.tell(Add(make_request("stream", (1, 2), 500, ignore_eos=True)))
    plans = []
    for step in range(30):
        plan = around.step()
        plans.append(plan.num_tokens)
        around.answer(plan, 1.0 + 0.01 * (plan.num_tokens - 1))
        if step == 4:
            around.tell(Add(make_request("prompt", [3] * 1000, 1)))
    around.close()
    assert plans[:5] == [2, 1, 1, 1, 1]
    assert sum(plans) == 2 + 29 + 1000, plans
    assert plans[-5:] == [1] * 5
    assert 96 in plans  # 1.95 seconds: what the ratio leaves time for
    assert max(plans) <= 300  # tried once


@pytest.mark.parametrize("flag", ["1", "-2", "nan"])
def test_a_ratio_that_is_none_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--max_itl_ratio must be more than 1, or 0"):
        BalanceConfig(EngineConfig(), max_itl_ratio=float(flag))
