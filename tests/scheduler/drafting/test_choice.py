"""How many draft tokens pay, for chances and costs that are given: with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from ktransformers.scheduler.drafting.choice import MARGIN, choose, gains


def losses(rows: int, *times: float) -> list[float]:
    """Of steps that take so many times as long with 1, 2, ... draft tokens beside so many rows."""
    return [0.0, *(rows * math.log(one) for one in times)]


def test_a_token_gains_by_what_there_is_without_it() -> None:
    assert gains((0.5, 0.25)) == pytest.approx((math.log(1.5), math.log(1.75 / 1.5)))
    assert gains(()) == ()


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ((1.0, 1.0, 1.0), 3),
        ((1.2, 1.4, 1.6), 3),  # 1.8 / 1.2, 2.44 / 1.4, 2.952 / 1.6 = 1.85 times as fast
        ((1.2, 1.4, 2.5), 2),
        ((1.2, 2.1, 3.0), 1),
        ((1.75, 2.5, 3.3), 0),  # 1.03, 0.98, 0.89
        ((1.6, 2.5, 3.3), 1),  # 1.125
    ],
)
def test_one_sequence(times: tuple[float, ...], count: int) -> None:
    counts, gain = choose([(0.8, 0.64, 0.512)], [False], losses(1, *times))
    assert counts == [count]
    tokens = [1.0, 1.8, 2.44, 2.952][count]
    assert gain == pytest.approx(math.log(tokens / ([1.0, *times][count])))


def test_gains_below_the_margin_are_none() -> None:
    chances = (MARGIN * 1.2 - 1.0,)  # just as fast as the margin says
    assert choose([chances], [False], losses(1, 1.2 + 1e-9)) == ([0], 0.0)
    assert choose([chances], [False], losses(1, 1.2 - 1e-9))[0] == [1]


def test_what_one_gains_must_be_more_than_what_others_lose() -> None:
    """A step 1.1 times as long for the sake of one: the two others lose a tenth each."""
    assert choose([(0.9,), (), ()], [False] * 3, losses(3, 1.1))[0] == [1, 0, 0]  # 1.9 / 1.1 ** 3 = 1.43
    assert choose([(0.5,), (), ()], [False] * 3, losses(3, 1.1))[0] == [0, 0, 0]  # 1.13 / 1.05 ** 3 = 0.97


def test_the_likeliest_come_first_and_those_alike_together() -> None:
    sure, doubtful = (0.95, 0.9), (0.3, 0.1)
    chances = [doubtful, sure, (), sure]
    counts, _ = choose(chances, [False] * 4, losses(4, 1.05, 1.1, 1.15, 1.2, 1.5, 1.8))
    assert counts == [0, 2, 0, 2]
    counts, _ = choose(chances, [False] * 4, losses(4, 1.05))  # no room for two more
    assert counts == [0, 0, 0, 0]


def test_the_engine_takes_its_time_for_each_token_of_the_longest_draft() -> None:
    chances = (0.8, 0.64, 0.512)
    for share, count in ((0.0, 3), (0.3, 3), (0.5, 2), (0.7, 1), (0.8, 0)):
        counts, gain = choose([chances], [True], losses(1, 1.0, 1.0, 1.0), share)
        assert counts == [count], share
        assert gain == pytest.approx(math.log(sum(chances[:count], 1.0) / (1.0 + count * share)))
    assert choose([chances, chances], [True, False], losses(2, *[1.0] * 6), 0.8)[0] == [0, 3]  # a copy takes none


def test_a_block_of_the_engine_takes_as_long_for_all_of_its_tokens_as_for_one() -> None:
    """2.952 tokens for 1 + 0.8 plain steps, where a pass for each would be 1 + 3 x 0.8; for 1.9 they do not pay more
    than 1.05 times."""
    chances = (0.8, 0.64, 0.512)
    counts, gain = choose([chances], [True], losses(1, 1.0, 1.0, 1.0), 0.8, in_block=True)
    assert counts == [3]
    assert gain == pytest.approx(math.log(2.952 / 1.8))
    assert choose([chances], [True], losses(1, 1.0, 1.0, 1.0), 1.9, in_block=True)[0] == [0]


def test_nothing_is_chosen_of_nothing() -> None:
    assert choose([(), ()], [False, False], losses(2, 1.0)) == ([0, 0], 0.0)
    assert choose([(0.9,)], [False], [0.0]) == ([0], 0.0)
