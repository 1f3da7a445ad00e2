"""Draft tokens in the scheduler: answers are those that each request gets alone, whatever is drafted and rejected."""

from __future__ import annotations

import random

import pytest

from ktransformers.scheduler.config import SchedulerConfig
from tests.support.servers.fake_engine import Loop, answer_alone, make_config, make_request, stir

PATTERN = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4]


def loop_of(**changes: object) -> Loop:
    values = {"num_pages": 64, "chunk_size": 32, "max_drafts": 3}
    return Loop(make_config(**(values | changes)))


def add(loop: Loop, name: str, seed: int, max_tokens: int = 30, **params: object) -> None:
    """An even seed: the answer repeats itself. An odd one: draft tokens are hardly ever right."""
    loop.add(make_request(name, PATTERN, max_tokens, ignore_eos=True, seed=seed, **params))


def test_an_answer_that_repeats_itself_takes_fewer_steps() -> None:
    loop = loop_of()
    add(loop, "a", 2, max_tokens=120)
    loop.drain()
    loop.check_answers()
    stats = loop.scheduler.stats()
    assert stats.num_accepted == loop.engine.num_accepted > 40
    assert loop.scheduler._next_step - 1 == 120 - stats.num_accepted
    last = loop.last["a"]
    assert (last.num_drafted, last.num_accepted) == (stats.num_drafted, stats.num_accepted)


def test_a_request_may_want_none() -> None:
    loop = loop_of()
    add(loop, "a", 2, max_tokens=40, max_drafts=0)
    seq = loop.scheduler._requests["a"]
    loop.drain()
    assert seq.drafter is None  # nothing is looked for
    assert loop.scheduler.stats().num_drafted == 0
    assert loop.scheduler._next_step - 1 == 40
    loop = loop_of()
    add(loop, "a", 2, max_tokens=120, max_drafts=1)
    while loop.scheduler.has_work:
        plan = loop.schedule()
        assert plan is not None
        assert all(row.num_drafts <= 1 for row in plan.rows)
        loop.commit()
    assert loop.scheduler.stats().num_drafted > 20


def test_no_step_is_planned_beside_one_with_draft_tokens() -> None:
    loop = loop_of()
    add(loop, "a", 2, max_tokens=40)
    add(loop, "b", 4, max_tokens=40)
    seen = 0
    while loop.scheduler.has_work:
        plan = loop.schedule()
        assert plan is not None
        if any(row.num_drafts for row in plan.rows):
            seen += 1
            assert loop.schedule() is None
        loop.commit()
    assert seen > 5
    loop.check_answers()


def test_prompts_are_not_held_up() -> None:
    """Where somebody's prompt is computed, steps carry that instead of draft tokens."""
    loop = loop_of(num_pages=128)
    add(loop, "a", 2, max_tokens=60)
    for _ in range(12):
        loop.schedule()
        loop.commit()
    loop.add(make_request("long", [9] * 90, 2, ignore_eos=True, seed=5))
    loop.schedule()  # lets the long one in, and may draft for the first
    loop.commit()
    plan = loop.schedule()
    assert plan is not None
    assert sorted(row.num_tokens for row in plan.rows) == [1, 31]
    loop.drain()
    loop.check_answers()


def test_draft_tokens_take_nobodys_pages() -> None:
    """Two sequences fill the cache but for a token: drafting goes on without pages of the other's."""
    loop = loop_of(num_pages=8, max_batch_size=2)
    loop.add(make_request("a", [1, 2] * 6, 4, ignore_eos=True, seed=2))
    loop.add(make_request("b", [2, 1] * 6, 4, ignore_eos=True, seed=4))
    loop.drain()
    loop.check_answers()
    assert loop.scheduler.stats().num_preemptions == 0


def test_an_end_token_among_accepted_ones_ends_the_answer() -> None:
    config = make_config(max_drafts=3, num_pages=64, chunk_size=32)
    for seed in range(2, 400, 2):
        request = make_request("a", PATTERN * 2, 30, seed=seed)
        alone, _ = answer_alone(request, config)
        if 8 < len(alone) < 30:
            loop = Loop(config)
            loop.add(request)
            loop.drain()
            loop.check_answers()
            assert loop.scheduler.stats().num_used_pages == 0
            return
    raise AssertionError("no seed leads to an end token in the middle")


CONFIGS = {
    "pages": make_config(num_pages=24, page_size=4, chunk_size=16, max_drafts=7),
    "few pages": make_config(num_pages=12, page_size=4, chunk_size=16, max_drafts=7),
    "pages of one": make_config(num_pages=90, page_size=1, chunk_size=16, max_drafts=3),
    "states": make_config(num_pages=40, chunk_size=16, max_drafts=3, num_states=24, snapshot_align=8),
    "few states": make_config(num_pages=40, chunk_size=16, max_drafts=3, num_states=7, snapshot_align=8),
    "states, no prefixes": make_config(
        num_pages=40, chunk_size=16, max_drafts=3, num_states=24, has_prefix_cache=False
    ),
    "stages": make_config(num_pages=40, chunk_size=16, max_drafts=3, num_stages=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(6))
def test_draft_tokens_change_no_answer(name: str, seed: int) -> None:
    """Requests come and go, are preempted, suspended and resumed, and the engine dies."""
    config: SchedulerConfig = CONFIGS[name]
    rng, loop, accepted = random.Random(seed), Loop(config), 0
    for i in range(12):
        add(loop, f"r{i}", rng.choice((2, 4, 6, 5)), rng.randrange(1, 30))
        stir(loop, rng)
        if rng.random() < 0.1:
            accepted += loop.engine.num_accepted
            loop.crash()
    loop.drain()
    loop.check_answers()
    assert loop.last.keys() == loop.requests.keys()
    accepted += loop.engine.num_accepted
    assert accepted > 0
    assert loop.scheduler.stats().num_drafted > accepted
