"""Snapshots of states: where they are taken, what a later request still has to run, what stale rows leave."""

from __future__ import annotations

import pytest

from ktransformers.core import FinishReason
from ktransformers.errors import ConfigError
from tests.support.servers.fake_engine import Loop, make_config, make_request

PROMPT = [i % 11 for i in range(30)]


def loop_of(**changes: object) -> Loop:
    values = {"num_pages": 64, "chunk_size": 16, "num_states": 8, "snapshot_align": 4, "max_batch_size": 2}
    return Loop(make_config(**(values | changes)))


def run(loop: Loop, name: str, prompt: list[int], max_tokens: int = 1, **params: object) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt did not have to be run."""
    loop.add(make_request(name, prompt, max_tokens, ignore_eos=True, **params))
    loop.drain()
    loop.check_answers()
    return loop.answers[name], loop.last[name].cached_len


def test_a_prompt_is_kept_up_to_the_last_border_before_its_end() -> None:
    loop = loop_of()
    assert run(loop, "first", PROMPT)[1] == 0
    assert run(loop, "again", PROMPT)[1] == 28
    assert run(loop, "longer", [*PROMPT, 1, 2, 3])[1] == 28
    assert run(loop, "shorter", PROMPT[:27])[1] == 0  # pages are there, a state is not
    assert run(loop, "salted", PROMPT, cache_salt="other")[1] == 0


def test_the_last_token_is_computed_though_a_state_of_all_is_there() -> None:
    loop = loop_of()
    run(loop, "first", PROMPT[:28])
    assert run(loop, "again", PROMPT[:28])[1] == 24
    assert run(loop, "longer", PROMPT[:29])[1] == 28


@pytest.mark.parametrize("interval", [8, 7])
def test_long_prompts_have_snapshots_inside(interval: int) -> None:
    loop = loop_of(snapshot_interval=interval)  # 7: 8 is the next multiple of pages
    run(loop, "first", PROMPT)
    assert run(loop, "other", [*PROMPT[:19], 5, 5, 5, 5, 5])[1] == 16


def test_the_next_turn_begins_at_the_end_of_the_last_answer() -> None:
    loop, history = loop_of(), list(PROMPT)
    for turn in range(8):
        answer, cached = run(loop, f"turn {turn}", history, max_tokens=10)
        assert len(history) - cached <= (30 if turn == 0 else 2 + 3 + 4)
        history += [*answer, 1, 2]
    slots = loop.scheduler._snapshots
    assert slots is not None
    assert slots.slots.num_snapshots <= 6


def test_only_the_last_state_of_an_answer_is_kept() -> None:
    loop = loop_of()
    run(loop, "long answer", PROMPT[:5], max_tokens=30)
    snapshots = loop.scheduler._snapshots
    assert snapshots is not None
    assert snapshots.slots.num_snapshots == 2  # behind the prompt, and at the end


def test_what_a_row_too_many_saves_is_not_published() -> None:
    loop = loop_of()
    loop.add(make_request("stopped", PROMPT[:6], 30, ignore_eos=True))
    loop.schedule()
    loop.commit()
    while loop.scheduler._requests["stopped"].known_len < 8:
        loop.schedule()
        loop.commit()
    loop.schedule()  # runs position 7, the last one before a border
    assert any(row.saves for row in loop.scheduler._in_flight[0].rows)
    loop.scheduler.finish("stopped", FinishReason.STOP)
    loop.commit()
    snapshots = loop.scheduler._snapshots
    assert snapshots is not None
    assert snapshots.slots.num_snapshots == 1
    assert snapshots.slots.holders() == (set(), set())


def test_preempted_and_lost_runs_begin_from_the_nearest_snapshot() -> None:
    loop = loop_of(num_states=12)
    for name, seed in (("a", 1), ("b", 2)):
        loop.add(make_request(name, [*PROMPT, seed], 20, ignore_eos=True, seed=seed))
    for _ in range(9):
        loop.schedule()
        loop.commit()
    assert loop.preempt("a")
    loop.drain()
    assert loop.engine.num_skipped >= 28
    loop.check_answers()
    loop.add(make_request("c", PROMPT, 20, ignore_eos=True))
    loop.schedule()
    loop.crash()
    loop.drain()
    loop.check_answers()


def test_answers_to_one_prompt_compute_it_once() -> None:
    loop = loop_of(max_batch_size=4)
    prompt = list(PROMPT)
    requests = [make_request(f"r{i}", prompt, 5, ignore_eos=True, seed=i) for i in range(3)]
    shared = [type(r)(**{**{f: getattr(r, f) for f in r.__struct_fields__}, "prompt_ids": prompt}) for r in requests]
    loop.add(*shared)
    loop.drain()
    loop.check_answers()
    assert [loop.last[f"r{i}"].cached_len for i in range(3)] == [0, 28, 28]


def test_no_more_sequences_run_than_there_are_states() -> None:
    loop = loop_of(num_states=1, max_batch_size=4)
    for i in range(3):
        loop.add(make_request(f"r{i}", PROMPT[: 9 + i], 6, ignore_eos=True))
    loop.schedule()
    assert loop.scheduler.stats().num_running == 1
    loop.drain()
    loop.check_answers()


def test_wrong_numbers() -> None:
    with pytest.raises(ConfigError, match="num_states must not be negative"):
        make_config(num_states=-1)
    with pytest.raises(ConfigError, match="snapshot_align must be at least 1"):
        make_config(snapshot_align=0)
