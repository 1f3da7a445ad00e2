"""Which part of a product `make test` runs."""

from __future__ import annotations

import itertools

import pytest

from tests.support.checks.products import thinned


def chosen(params: list) -> list[tuple]:
    return [param.values for param in params if not param.marks]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_what_stays_covers_all_combinations_of_values(strength: int) -> None:
    cases = list(itertools.product("abcd", (1, 2, 3), (True, False)))
    params = thinned(cases, strength)
    assert [param.values for param in params] == cases
    kept = chosen(params)
    for places in itertools.combinations(range(3), strength):
        assert {tuple(case[at] for at in places) for case in kept} == {
            tuple(case[at] for at in places) for case in cases
        }
    assert len(kept) <= {1: 4, 2: 14, 3: 24}[strength]
    assert all(mark.name == "exhaustive" for param in params for mark in param.marks)
    assert chosen(thinned(cases, strength)) == kept


def test_cases_need_as_many_parameters_as_are_combined() -> None:
    with pytest.raises(ValueError, match="fewer than 2"):
        thinned([("a",), ("b",)])


def test_only_combinations_that_there_are_count() -> None:
    assert chosen(thinned([("a", 1), ("b", 2), ("c", 3)])) == [("a", 1), ("b", 2), ("c", 3)]
    assert chosen(thinned([("a", 1), ("a", 2), ("b", 2)], strength=1)) == [("a", 1), ("b", 2)]
