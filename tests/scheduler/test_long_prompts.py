"""Steps longer than chunk_size, while enough tokens of prompts wait: page_size 4, chunk_size 8, long steps of 24."""

from __future__ import annotations

from ktransformers.core import FinishReason
from ktransformers.scheduler.config import SchedulerConfig
from tests.scheduler.test_scheduler import long_request
from tests.support.servers.fake_engine import Loop, make_config


def config(**changes: object) -> SchedulerConfig:
    return make_config(num_pages=64, long_chunk_size=24, long_prompt=16, **changes)


def steps(loop: Loop) -> list[tuple[int, bool]]:
    """Tokens of each step until all requests are done, and whether it is a long one."""
    made = []
    while loop.scheduler.has_requests:
        plan = loop.schedule()
        assert plan is not None
        made.append((plan.num_tokens, plan.is_long))
        loop.commit()
    return made


def test_long_steps_begin_and_go_on() -> None:
    """From 16 tokens that wait on, and then while one step of 8 is not enough."""
    for prompt_len, want in (
        (15, [(8, False), (7, False)]),
        (16, [(16, True)]),
        (33, [(24, True), (9, True)]),
        (32, [(24, True), (8, False)]),
    ):
        loop = Loop(config())
        loop.add(long_request("a1", prompt_len, max_tokens=2))
        assert steps(loop) == [*want, (1, False)]
        loop.check_answers()


def test_prompts_that_wait_are_added_up() -> None:
    loop = Loop(config())
    loop.add(long_request("a1", 10, max_tokens=1), long_request("a2", 9, max_tokens=1))
    assert steps(loop) == [(19, True)]
    loop.check_answers()


def test_beside_decodes_a_throttle_has_to_limit_them() -> None:
    """Without one streams would wait for the long step."""
    for ratio, is_long in ((0.0, False), (2.0, True)):
        loop = Loop(config(max_itl_ratio=ratio))
        loop.add(long_request("a1", 3, max_tokens=20))
        loop.schedule()
        loop.commit()
        loop.add(long_request("a2", 20, max_tokens=1))
        plan = loop.schedule()
        assert plan is not None
        assert plan.is_long is is_long
        loop.commit()
        loop.drain()
        loop.check_answers()


def test_a_prompt_that_is_given_up_ends_them() -> None:
    loop = Loop(config())
    loop.add(long_request("a1", 50, max_tokens=2), long_request("a2", 2, max_tokens=9))
    plan = loop.schedule()
    assert plan is not None
    assert plan.is_long
    loop.commit()
    loop.scheduler.finish("a1", FinishReason.ABORT)
    plan = loop.schedule()
    assert plan is not None
    assert not plan.is_long
