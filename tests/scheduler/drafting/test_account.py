"""What an account of draft tokens makes of gains and losses, with numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ktransformers.scheduler.drafting.account import Account


def rests(account: Account, loss: float, count: int) -> list[int]:
    """How long it rests each time, where whatever is tried loses so much."""
    found, now = list[int](), account.wakes_at
    while len(found) < count:
        if account.is_awake(now):
            account.spend(loss)
            now += 1
        else:
            found.append(account.wakes_at - now)
            now = account.wakes_at
    return found


def test_one_plain_step_may_be_lost_at_first() -> None:
    account = Account()
    account.spend(0.5)
    assert account.balance == pytest.approx(1.0 - 1 / 32 - 0.5 + 0.003)
    assert account.is_awake(1)
    account.spend(0.5)
    assert account.balance == pytest.approx(0.47175 * 31 / 32 - 0.5 + 0.003)
    assert not account.is_awake(2)
    assert (account.balance, account.wakes_at) == (0.0, 2 + 1)  # overdrawn by 0.04, which is less than 0.096 of a step


def test_rests_become_twice_as_long_up_to_a_limit() -> None:
    """Each try loses a quarter of a plain step, 0.247 of it not for free: 0.048 of 6 steps, 0.024 of 11, in the end
    0.003 of 83."""
    first, *others = rests(Account(), 0.25, 8)
    assert first <= 3
    assert others == [6, 11, 21, 42, 83, 83, 83]


def test_what_never_pays_takes_three_thousandths_in_the_long_run() -> None:
    account, lost, late = Account(), 0.0, 0.0
    for now in range(20000):
        if account.is_awake(now):
            account.spend(0.7)
            lost += 0.7
            late += 0.7 * (now >= 10000)
    assert lost < 0.003 * 20000 + 7 * 0.7 + 1
    assert late <= 0.003 * 10000 + 0.7


def test_it_recovers_where_draft_tokens_begin_to_pay() -> None:
    account, awake = Account(), 0
    rests(account, 0.25, 7)
    for now in range(account.wakes_at, account.wakes_at + 20):
        if account.is_awake(now):
            awake += 1
            account.spend(0.25)
            account.earn(1.0)
    assert awake == 20
    assert account.balance > 10.0
    first, second = rests(account, 0.25, 2)  # where they do not pay any more, as short as the first ones
    assert first <= 3
    assert second == 6


def test_what_is_old_counts_for_little() -> None:
    account = Account()
    for _ in range(100):
        account.earn(1.0)
    assert account.balance == 16.0
    for now in range(200):
        if not account.is_awake(now):
            break
        account.spend(0.03)
    # 16 plain steps would be lost after 533 of these; faded by 1 / 32 each, after 94: 16.864 * (31 / 32) ** n < 0.864
    assert now == 94


def test_what_is_spent_in_a_rest_is_paid_for_with_the_next_try() -> None:
    account = Account()
    account.spend(2.0)
    assert not account.is_awake(10)
    for _ in range(4):
        account.spend(0.1)
    assert account.balance == 0.0
    assert account.is_awake(account.wakes_at)
    account.spend(0.2)
    assert account.balance == pytest.approx(-0.6 + 0.003)


def test_what_costs_next_to_nothing_never_rests() -> None:
    account = Account()
    for now in range(1000):
        assert account.is_awake(now)
        account.spend(0.003)


def test_gains_that_lose_as_much_again_shorten_no_rest() -> None:
    """What earns a little now and then, and loses more, is not tried as often as what gains."""
    account, awake = Account(), list[int]()
    for now in range(4000):
        if account.is_awake(now):
            awake.append(now)
            account.spend(0.5)
            if len(awake) % 4 == 0:
                account.earn(0.5)
    gaps = [after - before for before, after in pairwise(awake[-8:])]
    assert min(gaps) == 1
    assert max(gaps) > 150
