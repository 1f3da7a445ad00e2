"""Requests that come with the answer that another scheduler has begun."""

from __future__ import annotations

import msgspec
import pytest

from ktransformers.scheduler.records import StepResult
from tests.support.servers.fake_engine import Loop, answer_alone, make_config, make_request

PROMPT = [1 + i % 6 for i in range(30)]


@pytest.mark.parametrize("num_past", range(10))
def test_it_goes_on_with_the_tokens_it_would_have_had(num_past: int) -> None:
    request = make_request("r", PROMPT, 10, ignore_eos=True)
    whole, _ = answer_alone(request, make_config())
    loop = Loop(make_config())
    loop.add(msgspec.structs.replace(request, answer_ids=whole[:num_past], cached_len=12 if num_past else None))
    updates = []
    while (plan := loop.scheduler.schedule()) is not None:
        results = loop.engine.run(plan)
        updates += loop.scheduler.commit(StepResult(step_id=plan.step_id, results=results))
        loop.scheduler.check_integrity()
    assert [update.token_id for update in updates] == whole[num_past:]
    assert [update.completion_len for update in updates] == list(range(num_past + 1, 11))
    assert {update.cached_len for update in updates} == {12 if num_past else 0}
    assert not loop.scheduler.has_requests


def test_a_whole_answer_is_refused() -> None:
    loop = Loop(make_config())
    request = make_request("r", PROMPT, 3, ignore_eos=True)
    with pytest.raises(ValueError, match="has its answer already: 3 tokens"):
        loop.scheduler.add(msgspec.structs.replace(request, answer_ids=[1, 2, 3]))
    assert not loop.scheduler.has_requests


@pytest.mark.parametrize("num_past", [0, 4])
def test_one_that_comes_suspended_takes_nothing_until_it_is_resumed(num_past: int) -> None:
    request = make_request("r", PROMPT, 10, ignore_eos=True)
    whole, _ = answer_alone(request, make_config())
    loop = Loop(make_config())
    loop.add(msgspec.structs.replace(request, answer_ids=whole[:num_past], is_suspended=True))
    stats = loop.scheduler.stats()
    assert (stats.num_waiting, stats.num_suspended) == (0, 1)
    assert loop.scheduler.schedule() is None
    loop.scheduler.check_integrity()
    assert loop.scheduler.resume("r")
    updates = []
    while (plan := loop.scheduler.schedule()) is not None:
        updates += loop.scheduler.commit(StepResult(step_id=plan.step_id, results=loop.engine.run(plan)))
    assert [update.token_id for update in updates] == whole[num_past:]


def test_one_that_comes_suspended_is_ended_by_its_deadline() -> None:
    loop = Loop(make_config())
    request = make_request("r", PROMPT, 10)
    loop.scheduler.add(msgspec.structs.replace(request, is_suspended=True, deadline=5.0))
    assert loop.scheduler.next_deadline == 5.0
    (update,) = loop.scheduler.expire(6.0)
    assert update.is_expired
    assert not loop.scheduler.has_requests
