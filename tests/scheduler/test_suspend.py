"""Suspended requests: no pages, no place in the queue, the same tokens afterwards."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktransformers.core import FinishReason
from tests.support.servers.fake_engine import Loop, answer_alone, make_config, make_request

PROMPT = [1 + i % 6 for i in range(30)]


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
def test_at_any_step(num_steps: int, num_in_flight: int) -> None:
    """Between chunks of the prompt (8 tokens of 30 a step), in decode, and with steps in flight."""
    loop = Loop(make_config())
    loop.add(make_request("r", PROMPT, 10, ignore_eos=True))
    for _ in range(num_steps):
        loop.schedule()
        loop.commit()
    for _ in range(num_in_flight):
        loop.schedule()
    assert loop.suspend("r")
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_suspended, stats.num_used_pages) == (0, 0, 1, 0)
    answer = list(loop.answers["r"])
    loop.drain()
    assert loop.answers["r"] == answer, "a suspended request went on"
    assert loop.schedule() is None
    assert loop.scheduler.has_requests
    assert not loop.scheduler.has_work
    assert loop.resume("r")
    loop.drain()
    loop.check_answers()
    assert len(loop.answers["r"]) == 10


def test_what_is_asked_twice_or_of_nobody() -> None:
    loop = Loop(make_config())
    loop.add(make_request("r", PROMPT))
    assert not loop.scheduler.suspend("other")
    assert not loop.scheduler.resume("other")
    assert not loop.resume("r")
    assert loop.suspend("r")
    assert loop.suspend("r")
    assert loop.resume("r")
    assert not loop.resume("r")
    loop.drain()
    assert not loop.suspend("r")
    assert not loop.resume("r")


def test_its_pages_are_found_again_while_they_last() -> None:
    loop = Loop(make_config())
    loop.add(make_request("r", PROMPT, ignore_eos=True))
    for _ in range(4):
        loop.schedule()
        loop.commit()
    loop.suspend("r")
    loop.resume("r")
    plan = loop.schedule()
    assert plan is not None
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(28, 3)], "the 7 full pages were not found"


def test_its_seat_goes_to_others_and_its_rank_is_kept() -> None:
    loop = Loop(make_config(max_batch_size=1))
    for name in "abc":
        loop.add(make_request(name, PROMPT[:4], ignore_eos=True))
    loop.schedule()
    loop.commit()
    loop.suspend("a")
    for _ in range(3):
        loop.schedule()
        loop.commit()
    assert [len(loop.answers[name]) for name in "abc"] == [1, 3, 0]
    loop.resume("a")
    while "a" not in loop.last:
        loop.schedule()
        loop.commit()
    assert "b" in loop.last, "a running request was suspended"
    assert not loop.answers["c"], "it lost its rank"


def test_deadlines_go_on_while_suspended() -> None:
    loop = Loop(make_config())
    loop.add(make_request("r", PROMPT, deadline=5.0))
    loop.suspend("r")
    assert loop.scheduler.next_deadline == 5.0
    (update,) = loop.scheduler.expire(6.0)
    assert update.is_expired
    assert not loop.scheduler.has_requests
    loop.scheduler.check_integrity()


def test_it_can_be_ended_while_suspended() -> None:
    loop = Loop(make_config())
    loop.add(make_request("r", PROMPT))
    loop.suspend("r")
    update = loop.scheduler.finish("r", FinishReason.ABORT)
    assert update is not None
    assert not loop.resume("r")
    loop.scheduler.check_integrity()


def test_another_engine_does_not_wake_it() -> None:
    loop = Loop(make_config())
    loop.add(make_request("r", PROMPT), make_request("s", PROMPT))
    for _ in range(5):
        loop.schedule()
        loop.commit()
    loop.suspend("r")
    loop.crash()
    loop.drain()
    assert loop.last.keys() == {"s"}
    loop.resume("r")
    loop.drain()
    loop.check_answers()


@given(st.randoms(use_true_random=False), st.sampled_from([0, 6]))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_50_requests_whatever_happens(rng: random.Random, num_states: int) -> None:
    """Suspended, resumed, of several priorities, short of pages, engines lost."""
    changes = {"num_states": num_states, "snapshot_align": 8} if num_states else {}
    loop = Loop(make_config(num_pages=24, page_size=8, chunk_size=16, **changes))
    prefixes = [[rng.randrange(40) for _ in range(60)] for _ in range(3)]
    names = [f"r{i}" for i in range(50)]
    for name in names:
        prompt = rng.choice(prefixes)[: rng.randrange(1, 60)] + [rng.randrange(40) for _ in range(rng.randrange(1, 20))]
        loop.add(make_request(name, prompt, rng.randrange(1, 25), seed=rng.randrange(9), priority=rng.randrange(3)))
    for _ in range(150):
        for _ in range(rng.randrange(4)):
            loop.schedule()
        if loop.results and rng.randrange(8):
            loop.commit()
        kind = rng.randrange(10)
        if kind < 5:
            loop.suspend(rng.choice([name for name in names if name not in loop.last] or names))
        elif kind < 9:
            loop.resume(rng.choice(names))
        elif not rng.randrange(4):
            loop.crash()
    loop.drain()
    for name in names:
        loop.resume(name)
    loop.drain()
    loop.check_answers()
    assert loop.last.keys() == set(names)
    assert {name: len(loop.answers[name]) for name in names} == {
        name: len(answer_alone(loop.requests[name], loop.config)[0]) for name in names
    }
