"""How far apart two results may be: hand-made rows against the formulas in the docstrings."""

from __future__ import annotations

import math

import pytest
import torch

from ktransformers.operators.comparison import MEDIAN, Tolerance, close, difference, quantile, same_bits

ROWS = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 5.0], [30.0, 40.0]])  # of norm 5, 10, 5, 50


def off(*shares: float) -> torch.Tensor:
    """ROWS, each off by a share of its norm."""
    return ROWS * (1 + torch.tensor(shares))[:, None]


def test_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone()[None])  # on however many axes
    assert same_bits(ROWS.bfloat16(), ROWS)  # numbers that both types have
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(ROWS, ROWS[:2])
    assert not same_bits(ROWS, torch.nextafter(ROWS, ROWS + 1))


def test_numbers() -> None:
    assert close(ROWS + 1e-5, ROWS)
    assert not close(ROWS + 1e-2, ROWS)
    assert not close(ROWS[:1], ROWS)
    assert not close(None, ROWS)
    assert close(ROWS + 0.3, ROWS, of_largest=0.01)
    assert not close(ROWS + 0.5, ROWS, of_largest=0.01)


def test_half_of_the_rows_keep_to_the_median() -> None:
    assert difference(off(0, 0, 0.5, 0.5), ROWS, Tolerance(0.01)) is None  # the lower one of an even number
    assert difference(off(0, 0.5, 0.5, 0.5), ROWS, Tolerance(0.01)) == "off by 0.5, of which rounding explains 0.01"


def test_the_first_measure_that_is_not_kept_to_is_said() -> None:
    got = off(0.02, 0.02, 0.02, 0.9)
    assert difference(got, ROWS, Tolerance(0.1)) is None
    said = difference(got, ROWS, Tolerance(0.1), measures=[MEDIAN, quantile(0.5), torch.max])
    assert said == "off by 0.9, of which rounding explains 0.1"


def test_the_last_rows_alone() -> None:
    got = off(0.5, 0.5, 0, 0)
    assert difference(got, ROWS, Tolerance(0.1), measures=[torch.max]) is not None
    assert difference(got, ROWS, Tolerance(0.1), measures=[torch.max], last=2) is None
    assert difference(got, ROWS, Tolerance(0.1), measures=[torch.max], last=3) is not None


@pytest.mark.parametrize("share", [0.9, 1.2])
def test_what_rounding_explains(share: float) -> None:
    """floor + margin * (epsilon * |result| + |rounded - result|) / |change|, here 0.1 + 2 * (0.01 * 5 + 0.5) / 2."""
    want, given, rounded = (torch.tensor([[x, 4.0]]) for x in (3.0, 5.0, 3.5))
    allowed = 0.1 + 2 * (0.01 * 5 + 0.5) / 2
    got = want + torch.tensor([[0.0, share * allowed * 2]])
    said = difference(got, want, Tolerance(0.1, 0.01, 2), given=given, rounded=rounded)
    assert said == (None if share < 1 else f"off by {share * allowed:.2g}, of which rounding explains {allowed:.2g}")


def test_nan_is_a_difference() -> None:
    assert difference(torch.full_like(ROWS, math.nan), ROWS, Tolerance(1e9)) is not None


def test_rows_of_several_streams() -> None:
    """[1, T, streams, H]: the largest error counts."""
    want = torch.ones(1, 3, 2, 4)
    got = want.clone()
    got[0, :, 1] *= 1.5
    assert difference(got, want, Tolerance(0.1), measures=[torch.max]) == "off by 0.5, of which rounding explains 0.1"
