"""The choice between copying an expert and leaving it to the CPU, by its own model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.operators.experts.split import (
    NEVER,
    AheadShare,
    CpuOverhead,
    CpuRate,
    PrefillRates,
    choose_split,
    even_counts,
    threshold_of,
)

seconds = st.floats(1e-6, 1e-2)


@st.composite
def rates(draw: st.DrawFn) -> PrefillRates:
    rows = (1, 8, 64)
    cpu = draw(st.tuples(seconds, seconds, seconds))
    more = draw(st.floats(1.0, 2.0))
    return PrefillRates(
        copy=draw(seconds),
        gpu_row=draw(st.floats(0.0, 1e-5)),
        cpu=CpuRate(rows, cpu),
        shared_cpu=CpuRate(rows, tuple(more * each for each in cpu)),
    )


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    rates=rates(),
    ahead=st.floats(0.0, 1e-2),
    overhead=st.floats(0.0, 1e-2),
    data=st.data(),
)
def test_no_extreme_is_faster(
    counts: list[int], rates: PrefillRates, ahead: float, overhead: float, data: st.DataObject
) -> None:
    array = np.array(counts)
    there = data.draw(st.lists(st.integers(0, len(counts) - 1), unique=True, max_size=len(counts)))
    split = choose_split(array, rates, there, ahead, overhead)
    on_gpu = set(split.on_gpu)
    assert len(on_gpu) == len(split.on_gpu)
    assert split.there in ((), tuple(there))
    assert all(counts[e] > 0 for e in split.copied)
    # Its own time, added up anew.
    rest = [e for e in range(len(counts)) if e not in on_gpu]
    if on_gpu or split.there:
        copying = ahead + len(split.copied) * rates.copy
        computing = rates.gpu_row * sum(counts[e] for e in on_gpu)
        cpu = float(rates.shared_cpu.of(array[rest]).sum()) + overhead * bool(array[rest].any())
        assert split.seconds == pytest.approx(max(copying, computing, cpu))
    # Never slower than the extremes.
    assert split.seconds <= (float(rates.cpu.of(array).sum()) + overhead) * (1 + 1e-9)
    to_copy = sum(1 for e, n in enumerate(counts) if n and e not in there)
    everything = max(ahead + to_copy * rates.copy, rates.gpu_row * sum(counts))
    assert split.seconds <= everything * (1 + 1e-9)
    # An expert that is copied has at least the rows of one that is not.
    if split.copied:
        assert min(counts[e] for e in split.copied) >= max((counts[e] for e in rest), default=0)


def test_an_equal_share_when_both_are_equally_fast() -> None:
    flat = CpuRate((1,), (1e-4,))
    split = choose_split(np.ones(10, dtype=np.int64), PrefillRates(1e-4, 0.0, flat, flat))
    assert len(split.copied) == 5
    assert split.seconds == pytest.approx(5e-4)


def test_a_hand_over_that_costs_more_than_the_last_copies_leaves_nothing_to_the_cpu() -> None:
    flat = CpuRate((1,), (1e-4,))
    rates, counts = PrefillRates(1e-4, 0.0, flat, flat), np.ones(10, dtype=np.int64)
    assert len(choose_split(counts, rates, overhead=2e-4).copied) == 6  # 6 copies beside 4 experts and the hand-over
    assert len(choose_split(counts, rates, overhead=9.5e-4).copied) == 10


def test_a_hand_over_is_learned_by_the_size_of_a_step() -> None:
    learned = CpuOverhead()
    assert learned.seconds(100) == 0.0
    learned.learn(4096, expected=1e-3, took=1e-3 + 4.096e-3)
    assert learned.seconds(4096) == pytest.approx(4.096e-3)
    assert learned.seconds(64) == pytest.approx(64e-6)  # by the row, before a step of this size was met
    learned.learn(64, expected=1e-3, took=0.5e-3)
    assert learned.seconds(64) == 0.0  # never a gain
    for _ in range(700):
        learned.forget()
    assert learned.seconds(4096) < 2.1e-3  # half of it, some 20 steps later
    for _ in range(100):
        learned.learn(4096, expected=2e-3, took=2e-3)
    assert learned.seconds(4096) < 1e-6


def test_the_share_that_is_copied_ahead_follows_the_copies() -> None:
    share = AheadShare()
    for _ in range(50):
        share.learn(is_idle=True)
    assert share.value == 1.0
    for _ in range(100):
        share.learn(is_idle=False)
    assert share.value == 0.25


def test_rates_between_and_behind_their_points() -> None:
    rate = CpuRate((1, 11, 21), (1.0, 0.5, 3.0))  # the second point is noise: less for more rows
    assert rate.of(np.array([0, 1, 6, 11, 16, 21, 31])).tolist() == [0.0, 1.0, 1.0, 1.0, 2.0, 3.0, 5.0]
    assert CpuRate((2,), (4.0,)).of(np.array([1, 2, 4])).tolist() == [4.0, 4.0, 8.0]


@pytest.mark.parametrize("points", [((), ()), ((1, 1), (1.0, 1.0)), ((0,), (1.0,)), ((1,), (0.0,)), ((1, 2), (1.0,))])
def test_nonsense_is_no_rate(points: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"rows|times"):
        CpuRate(*points)


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 8, 128), (64, 8, 256), (4096, 8, 128)])
def test_even_routing_is_what_chance_gives(num_tokens: int, top_k: int, num_experts: int) -> None:
    counts = even_counts(num_tokens, top_k, num_experts)
    rng = np.random.default_rng(0)
    drawn = [
        np.bincount(
            np.concatenate([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]), minlength=num_experts
        )
        for _ in range(3)
    ]
    mean = num_tokens * top_k / num_experts
    assert counts.sum() == pytest.approx(mean * num_experts, rel=0.05, abs=2)
    touched = np.mean([(one > 0).sum() for one in drawn])
    assert (counts > 0).sum() == pytest.approx(touched, rel=0.15, abs=3)


def test_the_threshold_moves_with_the_rates() -> None:
    cpu = CpuRate((1, 64), (2e-5, 1e-4))
    fast, slow = PrefillRates(5e-5, 0.0, cpu, cpu), PrefillRates(1.0, 0.0, cpu, cpu)
    assert threshold_of(slow, 8, 128) == NEVER
    assert 8 <= threshold_of(fast, 8, 128) < 512
    faster = PrefillRates(1e-5, 0.0, cpu, cpu)
    assert threshold_of(faster, 8, 128) <= threshold_of(fast, 8, 128)


def _brute(counts: np.ndarray, rates: PrefillRates, held: list[int], overhead: float) -> float:
    """The least time over every set of experts to copy, and over leaving all to the CPU."""
    others = [e for e in range(len(counts)) if counts[e] and e not in held]
    best = float(rates.cpu.of(counts).sum()) + overhead
    for size in range(len(others) + 1):
        for chosen in itertools.combinations(others, size):
            rest = counts.copy()
            rest[[*held, *chosen]] = 0
            rate = rates.shared_cpu if chosen else rates.cpu
            on_cpu = float(rate.of(rest).sum()) + (overhead if rest.any() else 0.0)
            on_gpu = rates.gpu_row * float(counts.sum() - rest.sum())
            best = min(best, max(size * rates.copy, on_gpu, on_cpu))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_what_the_gpu_holds_costs_no_copy(seed: int) -> None:
    """The choice is as fast as the best of all sets, and never copies or leaves to the CPU what is held."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 30, 8)
    held = rng.permutation(8)[: int(rng.integers(0, 7))].tolist()
    cpu = CpuRate((1, 32), (1e-4, float(rng.uniform(2e-4, 2e-3))))
    shared = CpuRate((1, 32), tuple(1.4 * s for s in cpu.seconds))
    rates = PrefillRates(float(rng.uniform(5e-5, 2e-3)), 1e-8, cpu, shared)
    split = choose_split(counts, rates, overhead=1e-4, held=held)
    assert split.seconds == pytest.approx(_brute(counts, rates, [e for e in held if counts[e]], 1e-4))
    assert sorted(split.held) == sorted(e for e in held if counts[e])
    assert not set(split.copied) & set(held)
    assert split.seconds <= choose_split(counts, rates, overhead=1e-4).seconds + 1e-12


def test_a_slow_gpu_leaves_what_it_holds_to_the_cpu() -> None:
    flat = CpuRate((1,), (1e-4,))
    rates = PrefillRates(1.0, 1.0, flat, flat)
    assert choose_split(np.ones(4, dtype=np.int64), rates, held=[1, 2]).on_gpu == ()


def test_the_threshold_rises_with_what_is_held() -> None:
    """Copying is compared with a CPU that has less to do."""
    cpu = CpuRate((1, 64), (2e-5, 1e-4))
    rates = PrefillRates(5e-5, 0.0, cpu, cpu)
    found = [threshold_of(rates, 8, 128, num_held) for num_held in (0, 32, 64, 128)]
    assert found == sorted(found)
    assert found[0] < found[2]
    assert found[-1] == NEVER
