"""When slots are lent to long steps, by rates that are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktransformers.operators.experts.lending import NO_LONG_STEPS, choose_long_steps, lent_slots, prompt_seconds
from ktransformers.operators.experts.split import STEP_COST, CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import PrefillShape

SLOW = CpuRate((1,), (1.0,))  # the GPU gets all experts
RATES = PrefillRates(100e-6, 0.0, SLOW, SLOW)
SHAPE = PrefillShape(16, 8, 1024, 512, 4096, num_held=4, long_rows=16384)
PARTS = (1 << 20, 1 << 20, 1 << 20)


def test_slots_for_blocks() -> None:
    """No block lies across two projections, and 256 bytes of each are for alignment."""
    assert lent_slots(1, 1000, (100, 100, 100)) == 13
    assert lent_slots(3, 1000, (100, 100, 100)) == 13
    assert lent_slots(4, 1000, (100, 100, 100)) == 23
    assert lent_slots(2, 1000, (100, 100, 250)) == 10


def test_seconds_of_a_prompt() -> None:
    """Twelve of sixteen experts are copied in each step."""
    step = 12 * RATES.copy + STEP_COST
    assert prompt_seconds(12288, 4096, SHAPE, 4, RATES) == pytest.approx(3 * step)
    assert prompt_seconds(12288, 8192, SHAPE, 4, RATES) == pytest.approx(2 * step)
    assert prompt_seconds(12288, 16384, SHAPE, 4, RATES) == pytest.approx(step)
    assert prompt_seconds(4096, 4096, SHAPE, 0, RATES) == pytest.approx(16 * RATES.copy + STEP_COST)


def test_from_which_prompt_it_pays() -> None:
    """A block of results is 64 MiB, in 65 slots; with ten layers seven experts of each lose theirs, which are copied in
    each step (all four that a layer has). A prompt of 8,192 has one step of 10 x 3.6 ms in the place of two of 3.2 ms,
    and 6.5 ms of uploads behind it.
    """
    found = choose_long_steps(SHAPE, RATES, 10, 200, PARTS, 2)
    assert (found.rows, found.num_slots, found.least_tokens) == (16384, 65, 8192)
    few = choose_long_steps(SHAPE, RATES, 10, 100, PARTS, 2)
    assert few == NO_LONG_STEPS  # more than half of the slots


def test_refilling_decides() -> None:
    """With one layer a step is saved for 3.6 ms, and uploads take 6.5 ms: three have to be."""
    found = choose_long_steps(SHAPE, RATES, 1, 200, PARTS, 2)
    assert found.rows == 16384
    assert found.least_tokens > 8192


def test_it_never_pays() -> None:
    """Where products take as long as the rows are many, or memory for long steps was not planned."""
    compute_bound = PrefillRates(1e-9, 1e-3, SLOW, SLOW)
    assert choose_long_steps(SHAPE, compute_bound, 10, 200, PARTS, 2) == NO_LONG_STEPS
    assert choose_long_steps(replace(SHAPE, long_rows=0), RATES, 10, 200, PARTS, 2) == NO_LONG_STEPS
