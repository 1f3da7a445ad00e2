"""What is learnt of acceptance and of times, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from ktransformers.scheduler.drafting.acceptance import AcceptanceRates
from ktransformers.scheduler.drafting.row_costs import RowCosts


def test_at_first_longer_matches_are_believed_more() -> None:
    rates = AcceptanceRates(16)
    assert rates.chances(2, 3) == (0.5, 0.5 * 3 / 5, 0.5 * 3 / 5 * 4 / 6)
    assert rates.chances(16, 2) == (16 / 18, (16 / 18) ** 2)  # no longer ones are told apart


def test_what_came_decides_before_long() -> None:
    rates = AcceptanceRates(16)
    for _ in range(500):
        rates.add(2, False)
        rates.add(3, True)
    assert rates.chances(2, 1)[0] < 0.02
    assert rates.chances(3, 1)[0] > 0.98
    assert rates.chances(4, 1) == (4 / 6,)
    for _ in range(600):
        rates.add(2, True)
    assert rates.chances(2, 1)[0] > 0.9  # what was long ago is forgotten


def test_rates_are_means_of_a_sliding_weight() -> None:
    rates = AcceptanceRates(16)
    rates.add(2, True)  # 0.5 worth 8, and one more
    assert rates.chances(2, 1) == (pytest.approx((0.5 * 8 + 1) / 9),)
    rates.add(2, True, times=3)  # three more at once
    assert rates.chances(2, 1) == (pytest.approx((0.5 * 8 + 4) / 12),)


def test_chances_are_computed_anew_where_rates_have_moved() -> None:
    rates = AcceptanceRates(16)
    rates.add(2, True, times=248)
    before = rates.chances(2, 2)
    rates.add(2, True)  # by less than a hundredth of a token
    assert rates.chances(2, 2) is before
    rates.add(3, False)  # of 4 that were wrong in 8, one more
    assert rates.chances(2, 2) == (before[0], pytest.approx(before[0] * (8 * 3 / 5) / 9))


def test_times_between_and_beyond_those_that_were_seen() -> None:
    costs = RowCosts(8)
    assert costs.most_rows == 0
    costs.add(1, 10.0)
    assert costs.knows(1)
    assert not costs.knows(2)
    assert costs.most_rows == 2
    assert costs.seconds(2) == pytest.approx(10.9)  # less than a tenth of a step
    costs.add(4, 40.0)
    assert [costs.seconds(rows) for rows in (1, 2, 3, 4)] == [10.0, 20.0, 30.0, 40.0]
    assert costs.seconds(5) == pytest.approx(49.0)
    assert costs.seconds(6) == pytest.approx(58.0)
    assert costs.most_rows == 8
    costs.add(8, 30.0)
    assert [costs.seconds(4, more) for more in (0, 2, 4)] == [40.0, 40.0, 40.0]  # more rows never take less
    assert costs.seconds(1, 3) == 35.0  # but these are not known that well


def test_sizes_are_half_powers_of_two() -> None:
    costs = RowCosts(64)
    for rows in (29, 31, 33, 35):
        costs.add(rows, float(rows))
    assert costs.seconds(32) == 31.0  # the second least
    assert costs.knows(30)
    assert costs.most_rows == 64


def test_the_second_least_time_counts() -> None:
    costs = RowCosts(4)
    for seconds in (1.0, 50.0, 1.0, 1.2, 0.9):
        costs.add(2, seconds)
    assert costs.seconds(2) == 1.0


def test_sizes_that_were_not_timed_for_long_are_forgotten() -> None:
    costs = RowCosts(4)
    for _ in range(3):
        costs.add(2, 1.0)
    for _ in range(1016):
        costs.add(1, 1.0)
    assert costs.knows(2)
    for _ in range(32):
        costs.add(1, 1.0)
    assert not costs.knows(2)
    costs.add(9, 1.0)
    costs.add(3, 0.0)  # nobody knows
    assert not costs.knows(9)
    assert not costs.knows(3)


def test_what_draft_tokens_lose() -> None:
    costs = RowCosts(4)
    for rows, seconds in ((1, 10.0), (2, 15.0), (4, 40.0)):
        costs.add(rows, seconds)
    # 1.5, 2.75 and 4 times as long; of two answers beside each other, 27.5 / 15 and 40 / 15
    assert costs.losses(1) == pytest.approx([0.0, math.log(1.5), math.log(2.75), math.log(4)])
    assert costs.losses(2) == pytest.approx([0.0, 2 * math.log(27.5 / 15), 2 * math.log(40 / 15)])
    assert costs.losses(4) == [0.0]  # no more than four rows are ever run


def test_a_size_is_known_once_the_least_of_four_tries_is() -> None:
    """The first steps with draft tokens of a size are slow, and where they are rare others are for long."""
    costs = RowCosts(4)
    costs.add(1, 10.0)
    for seconds in (40.0, 21.0, 30.0):
        costs.add(2, seconds, is_drafted=True)
        assert costs.seconds(1, 1) == pytest.approx(10.9)  # still what is assumed
    costs.add(2, 20.0, is_drafted=True)
    assert costs.seconds(1, 1) == 20.0


def test_steps_with_draft_tokens_are_no_plain_ones() -> None:
    """Two answers with two tokens each take longer here than four answers, and say nothing of these."""
    costs = RowCosts(8)
    costs.add(2, 10.0)
    for _ in range(4):
        costs.add(4, 30.0, is_drafted=True)
    assert (costs.knows(2), costs.knows(4)) == (True, False)
    assert costs.seconds(2, 2) == 30.0
    costs.add(4, 20.0)
    assert costs.seconds(4) == 20.0


def test_plain_steps_become_stale() -> None:
    costs = RowCosts(8)
    costs.add(1, 10.0)
    for _ in range(64):
        costs.add(2, 12.0, is_drafted=True)
    assert not costs.is_stale(1)
    costs.skip(1)
    assert costs.is_stale(1)
    costs.add(1, 10.0)
    assert not costs.is_stale(1)


def test_what_steps_with_draft_tokens_lose_is_told_apart_from_what_rows_take() -> None:
    costs = RowCosts(4)
    for _ in range(3):
        costs.add(1, 10.0, is_ahead=True)
    for _ in range(4):
        costs.add(4, 19.0, is_drafted=True)
    assert costs.wait == 0.0
    assert costs.seconds(1, 3) == 19.0
    costs.add(1, 12.0)  # began behind a wait
    assert costs.wait == 2.0
    costs.add(1, 10.0, is_ahead=True)
    assert costs.seconds(1) == 10.0
    costs.add(4, 19.0, is_drafted=True)
    assert costs.seconds(1, 3) == 19.0  # 17 of the rows, and the wait
    assert costs.losses(1)[3] == pytest.approx(math.log(1.9))


def test_where_nothing_is_planned_ahead_nothing_is_lost() -> None:
    costs = RowCosts(8)
    for seconds in (10.0, 14.0, 10.0):
        costs.add(1, seconds)
    for _ in range(4):
        costs.add(2, 15.0, is_drafted=True)
    assert (costs.wait, costs.seconds(1), costs.seconds(1, 1)) == (0.0, 10.0, 15.0)


def test_a_wait_of_a_bad_moment_is_forgotten() -> None:
    """There are no waits without draft tokens, and no draft tokens where waiting seems to take longer than they save:
    what was learnt once would be kept for ever."""
    costs = RowCosts(16)
    for _ in range(8):
        costs.add(1, 10.0, is_ahead=True)
    costs.add(1, 50.0)
    assert costs.wait == 40.0
    for _ in range(240):
        costs.add(1, 10.0, is_ahead=True)
    assert costs.seconds(1, 1) > 50.0
    for _ in range(32):
        costs.add(1, 10.0, is_ahead=True)
    assert (costs.seconds(1, 1) < 12.0, costs.wait) == (True, 0.0)


def test_a_wait_that_others_had_is_no_more_than_a_step_took() -> None:
    """Waiting was learnt of steps of 8 rows, which take longer than all of a step of one sequence."""
    costs = RowCosts(64)
    costs.add(8, 10.0, is_ahead=True)
    costs.add(8, 30.0)
    costs.add(1, 2.0, is_ahead=True)
    for _ in range(4):
        costs.add(2, 5.0, is_drafted=True)
    assert costs.wait == 20.0
    line = costs.seconds(1, 1) - costs.seconds(1) - costs.wait
    assert -2.0 < line <= 3.0
