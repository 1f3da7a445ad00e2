"""How many deaths are too many, how long to wait, and how a process ended, in words."""

from __future__ import annotations

import signal

import pytest

from ktransformers.system.restart_policy import (
    MAX_DEATHS,
    MAX_STRIKES,
    RESTART_SECONDS,
    RestartPolicy,
    Strikes,
    delay_after,
    delays,
    ending,
    was_killed,
)

BUS = "signal 7 (SIGBUS: a model file was cut short while it was mapped, or its disk failed)"


def test_deaths_are_counted_within_a_time() -> None:
    policy = RestartPolicy(2)
    for epoch in range(2):
        policy.count(epoch, float(epoch))
    assert not policy.is_exceeded
    policy.count(2, RESTART_SECONDS)  # the first one is too long ago
    assert not policy.is_exceeded
    policy.count(3, RESTART_SECONDS)
    assert policy.is_exceeded
    policy.excuse((2, 99))
    assert not policy.is_exceeded


def test_waits_grow_to_a_minute() -> None:
    waits = delays()
    assert [next(waits) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_one_more_than_allowed_is_the_end() -> None:
    policy = RestartPolicy()
    for count in range(MAX_DEATHS):
        policy.count(f"stage {count}", 0.0)
    assert not policy.is_exceeded
    policy.count("stage 1, again", RESTART_SECONDS - 1.0)
    assert policy.is_exceeded
    assert policy.num_deaths == MAX_DEATHS + 1


@pytest.mark.parametrize(
    ("code", "is_killed", "words"),
    [
        (0, False, "exit code 0"),
        (3, False, "exit code 3"),
        (-signal.SIGKILL, True, "signal 9"),
        (-signal.SIGTERM, True, "signal 15"),
        (-signal.SIGSEGV, False, "signal 11"),
        (
            -signal.SIGBUS,
            False,
            BUS,
        ),
    ],
)
def test_endings(code: int, is_killed: bool, words: str) -> None:
    assert (was_killed(code), ending(code)) == (is_killed, words)


def test_the_delay_after_any_number_of_failures() -> None:
    assert [delay_after(count) for count in (1, 2, 6, 7, 5000)] == [1, 2, 32, 60, 60]


def test_a_request_is_ended_when_processes_are_lost_in_a_row_or_too_often() -> None:
    strikes = Strikes(most=9)
    for has_moved in [False] * (MAX_STRIKES - 1) + [True]:
        strikes.count(has_moved=has_moved)
    assert (strikes.num_losses, strikes.num_in_a_row, strikes.is_exceeded) == (MAX_STRIKES, 1, False)
    for _ in range(MAX_STRIKES - 1):
        assert not strikes.is_exceeded
        strikes.count(has_moved=False)
    assert (strikes.num_in_a_row, strikes.is_exceeded) == (MAX_STRIKES, True)
    often = Strikes(most=9)
    for _ in range(9):
        assert not often.is_exceeded
        often.count(has_moved=True)
    assert (often.num_losses, often.num_in_a_row, often.is_exceeded) == (9, 1, True)
