"""How many deaths are too many, how long to wait, and how a process ended, in words."""

from __future__ import annotations

import signal

import pytest

from ktransformers.system.restart_policy import MAX_DEATHS, RESTART_SECONDS, RestartPolicy, delays, ending, was_killed

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
