"""SchedulerDriver: commands in, updates out, and what becomes of requests whose steps fail or are lost."""

from __future__ import annotations

import logging
from dataclasses import replace as replaced

import msgspec
import pytest

from ktransformers.core import FinishReason
from ktransformers.profiling.messages import Message, RequestRecord, TokensRecord
from ktransformers.scheduler.commands import Add, EngineLoss, Finish, Resume, Suspend
from ktransformers.scheduler.driver import SchedulerDriver
from ktransformers.scheduler.records import Request, RequestUpdate, StepPlan, StepResult
from tests.support.servers.fake_engine import VOCAB_SIZE, FakeEngine, answer_alone, make_config, make_request

PROMPT = [1 + i % 6 for i in range(20)]  # three chunks


class World:
    """A driver and an engine without a model; time stands still unless `now` is set."""

    def __init__(self, *, has_traces: bool = False, **config: object):
        self.now, self.config = 100.0, make_config(**config)
        self.driver = SchedulerDriver(self.config, lambda: self.now, has_traces=has_traces, checks_integrity=True)
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.new_engine()

    def new_engine(self) -> None:
        self.engine = FakeEngine(self.config, lambda request_id: "")

    def plan(self) -> StepPlan:
        plan = self.driver.plan()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, **result: object) -> None:
        rows = self.engine.run(plan)
        self.driver.commit(StepResult(step_id=plan.step_id, results=rows, **result))  # type: ignore[arg-type]
        self.hear()

    def step(self) -> None:
        self.commit(self.plan())

    def hear(self) -> None:
        for update in self.driver.take_updates():
            self.updates.setdefault(update.request_id, []).append(update)

    def drain(self) -> None:
        while self.driver.scheduler.has_work:
            self.step()

    def answer(self, request_id: str) -> tuple[list[int], FinishReason | None]:
        updates = self.updates[request_id]
        return [one.token_id for one in updates if one.token_id is not None], updates[-1].finish_reason

    def last(self, request_id: str) -> RequestUpdate:
        return self.updates[request_id][-1]


def test_twins_share_a_prompt_and_nothing_else() -> None:
    world, request = World(), make_request("r", PROMPT, 12)
    assert world.driver.obey(Add(request, (("s", 6), ("t", 7))))
    world.drain()
    for name, seed in (("r", 5), ("s", 6), ("t", 7)):
        alone = msgspec.structs.replace(request, params=replaced(request.params, seed=seed))
        assert world.answer(name) == answer_alone(alone, world.config)
    assert len({tuple(world.answer(name)[0]) for name in "rst"}) == 3


def test_commands_say_whether_their_request_was_there() -> None:
    world = World()
    for command in (Finish("r", FinishReason.ABORT), Suspend("r"), Resume("r")):
        assert not world.driver.obey(command)
    world.driver.obey(Add(make_request("r", PROMPT, 12, ignore_eos=True)))
    assert not world.driver.obey(Resume("r")), "it is not suspended"
    for _ in range(2):
        assert world.driver.obey(Suspend("r"))
    assert world.driver.plan() is None
    assert world.driver.obey(Resume("r"))
    world.step()
    assert world.driver.obey(Finish("r", FinishReason.STOP))
    assert not world.driver.obey(Finish("r", FinishReason.STOP))
    world.hear()
    assert (world.last("r").token_id, world.last("r").finish_reason) == (None, FinishReason.STOP)
    assert world.driver.plan() is None


def test_a_request_that_cannot_be_answered_is_refused_alone(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.driver.obey(Add(make_request("good", PROMPT)))
    world.driver.obey(Add(make_request("bad", [VOCAB_SIZE])))
    world.hear()
    update = world.last("bad")
    assert (update.finish_reason, update.prompt_len, update.completion_len) == (FinishReason.ABORT, 1, 0)
    assert update.error is not None
    assert f"names token {VOCAB_SIZE}" in update.error
    assert "request bad was refused" in caplog.text
    world.drain()
    assert world.answer("good") == answer_alone(make_request("good", PROMPT), world.config)


@pytest.mark.parametrize("is_suspended", [False, True])
def test_deadlines(is_suspended: bool) -> None:
    world = World()
    world.driver.obey(Add(make_request("r", PROMPT, deadline=110.0)))
    world.step()
    if is_suspended:
        world.driver.obey(Suspend("r"))
    world.now = 109.0
    world.driver.expire()
    world.hear()
    assert not world.updates
    world.now = 110.0
    world.driver.expire()
    world.hear()
    assert (world.last("r").finish_reason, world.last("r").is_expired) == (FinishReason.ABORT, True)
    assert world.driver.stats().num_expired == 1
    assert not world.driver.scheduler.has_requests


def test_seconds_to_the_first_token() -> None:
    """From a request's first step on; what it is suspended for does not count, nor do tokens from before."""
    world = World(max_batch_size=1)
    world.driver.obey(Add(make_request("r", PROMPT, ignore_eos=True)))
    world.now = 101.0
    for _ in range(2):  # of three chunks
        plan = world.plan()
        world.now += 1
        world.commit(plan)
    world.driver.obey(Suspend("r"))
    world.now = 200.0
    world.driver.obey(Resume("r"))
    while "r" not in world.updates:
        plan = world.plan()
        world.now += 0.5
        world.commit(plan)
    assert world.driver.take_prefill_seconds("r") == world.now - 200.0
    assert world.driver.take_prefill_seconds("r") is None
    world.step()
    assert world.driver.take_prefill_seconds("r") is None
    world.driver.obey(Finish("r", FinishReason.ABORT))
    begun = msgspec.structs.replace(make_request("s", [1, 2], ignore_eos=True), answer_ids=[3, 4])
    world.driver.obey(Add(begun))
    plan = world.plan()
    world.now += 4
    world.commit(plan)
    assert world.last("s").completion_len == 3
    assert world.driver.take_news([], None).prefill_seconds == {"s": 4.0}


def test_a_step_that_fails_ends_the_requests_that_were_in_it() -> None:
    world, other = World(max_batch_size=1), make_request("b", PROMPT, 6)
    world.driver.obey(Add(make_request("a", PROMPT)))
    world.driver.obey(Add(other))
    world.step()
    assert world.driver.fail_step(world.plan(), "out of luck") == ["a"]
    world.hear()
    assert (world.last("a").finish_reason, world.last("a").error) == (FinishReason.ABORT, "out of luck")
    world.new_engine()
    world.drain()
    assert world.answer("b") == answer_alone(other, world.config)
    assert world.last("b").cached_len == 0, "the cache may hold anything"
    world.driver.isolate()
    assert world.driver.scheduler.max_admitted is None


def two_of(world: World) -> list[Request]:
    requests = [make_request(name, [seed, *PROMPT], 6, ignore_eos=True) for name, seed in (("a", 1), ("b", 2))]
    for request in requests:
        world.driver.obey(Add(request))
    return requests


def test_steps_that_are_lost_are_computed_again() -> None:
    """Nobody is suspected when processes were only brought together again."""
    world = World()
    requests = two_of(world)
    for _ in range(5):
        world.step()
        world.plan()
        world.plan()
        assert world.driver.lose_steps() == []
        world.driver.isolate()
        assert world.driver.scheduler.max_admitted is None
        world.new_engine()
    world.drain()
    for request in requests:
        assert world.answer(request.request_id) == answer_alone(request, world.config)


def test_strikes(caplog: pytest.LogCaptureFixture) -> None:
    """Requests whose rows are in flight when an engine dies are suspects, until one of their rows is committed."""
    caplog.set_level(logging.INFO, "ktransformers.scheduler")
    world = World(chunk_size=64)
    requests = two_of(world)
    for epoch in range(2):
        world.plan()
        assert world.driver.lose_steps(epoch) == []
        world.new_engine()
        world.driver.isolate()
        assert world.driver.scheduler.max_admitted == (None if epoch == 0 else 1)
    assert "engines died with a, b in their batch: one request at a time" in caplog.text
    plan = world.plan()
    assert len(plan.rows) == 1
    world.commit(plan)  # a is cleared
    world.driver.obey(Finish("a", FinishReason.ABORT))
    world.plan()
    assert world.driver.lose_steps(2) == [0, 1, 2]
    world.hear()
    assert world.answer("a")[0] == answer_alone(requests[0], world.config)[0][:1]
    update = world.last("b")
    assert (update.finish_reason, update.token_id) == (FinishReason.ABORT, None)
    assert "the engine died again and again while it computed this request" in str(update.error)
    assert world.driver.take_news([], None).totals.num_poisoned == 1
    world.driver.isolate()
    assert world.driver.scheduler.max_admitted is None
    assert "no request is suspected any more" in caplog.text


def test_deaths_without_a_step_in_between_are_not_the_requests_fault() -> None:
    world = World()
    explained = []
    for name in ("a", "b"):
        world.driver.obey(Add(make_request(name, PROMPT)))
        for epoch in range(3):
            world.plan()
            explained.append(world.driver.lose_steps(epoch))
    assert explained == [[], [], [0, 1, 2], [], [], []]
    world.hear()
    assert world.last("a").error == world.last("b").error is not None


def test_news_are_told_once() -> None:
    world = World()
    world.driver.obey(Add(make_request("r", [1, 2], 3, ignore_eos=True)))
    plan = world.plan()
    rows = world.engine.run(plan)
    world.driver.commit(
        StepResult(
            step_id=plan.step_id,
            results=rows,
            seconds=2.0,
            experts=(8, 2, 5),
            expert_counts=b"ab",
            hot=(4, 3, 2, 100),
        )
    )
    plan = world.plan()
    rows = world.engine.run(plan)
    world.driver.commit(
        StepResult(step_id=plan.step_id, results=rows, seconds=0.5, experts=(4, 1, 4), expert_counts=b"c")
    )
    loss = EngineLoss(3)
    news = world.driver.take_news([loss], 4)
    assert [update.completion_len for update in news.updates] == [1, 2]
    assert (news.losses, news.hanging, news.expert_counts, news.traces) == ([loss], 4, b"abc", None)
    totals = news.totals
    assert (totals.num_steps, totals.num_tokens, totals.busy_seconds) == (2, 3, 2.5)
    assert (totals.num_expert_rows, totals.num_expert_samples, totals.num_touched_experts) == (12, 3, 9)
    hot = (totals.num_hot_reads, totals.num_hot_hits, totals.num_hot_uploads, totals.hot_upload_bytes)
    assert hot == (4, 3, 2, 100)
    assert news.stats == world.driver.stats()
    again = world.driver.take_news([], None)
    assert (again.updates, again.prefill_seconds, again.losses, again.expert_counts) == ([], {}, [], b"")
    assert again.totals == totals
    world.driver.obey(Add(make_request("later", PROMPT)))
    world.step()
    assert again.totals == totals, "what was sent counts on"
    assert world.driver.take_news([], None).totals.num_steps == totals.num_steps + 1


def test_traces_of_chunks() -> None:
    world = World(has_traces=True)
    world.driver.obey(Add(make_request("r", PROMPT)))
    for number in range(3):
        plan = world.plan()
        world.now = 101.0 + number
        world.commit(plan)
    traces = world.driver.take_news([], None).traces
    assert traces is not None
    assert traces.planned == [("r", 100.0)]
    assert [(one.began, one.ended, one.position, one.num_tokens) for one in traces.chunks] == [
        (100.0, 101.0, 0, 8),
        (101.0, 102.0, 8, 8),
        (102.0, 103.0, 16, 4),
    ]
    assert world.driver.take_news([], None).traces is None


def test_requests_are_recorded_while_somebody_listens() -> None:
    world, posted = World(), list[Message]()
    world.driver.record(posted.append)
    world.driver.obey(Add(make_request("r", PROMPT, 2, ignore_eos=True)))
    world.drain()
    tokens = [one for one in posted if isinstance(one, TokensRecord)]
    ends = [one for one in posted if isinstance(one, RequestRecord)]
    assert len(tokens) == 4  # steps
    assert [(one.request, one.prompt_len, one.completion_len) for one in ends] == [("r", 20, 2)]
    world.driver.obey(Add(make_request("left", PROMPT)))
    world.driver.record(None)  # which tells of those that are not through
    count = len(posted)
    world.driver.obey(Add(make_request("s", PROMPT)))
    world.drain()
    assert len(posted) == count
