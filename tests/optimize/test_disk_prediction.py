"""Predictions of plans whose experts stay in files, by numbers that are worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ktransformers.operators.base import Placement
from ktransformers.optimize.disk_prediction import predict_from_disk, skewed_hits
from ktransformers.optimize.expert_slots import EXPERT_SLOTS
from ktransformers.optimize.hot_slots import LearnedPicks
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import Plan, PlanEntry

GB = 10**9


def plan_of(layers: int, layer_bytes: int, slots: int) -> Plan:
    entries = tuple(
        PlanEntry(f"l.{i}.experts", "X", "Y", Placement(), "a", "b", None, stored_experts=layer_bytes)
        for i in range(layers)
    )
    machine = Machine(0, 0, {"cpu": 0})
    return Plan("x", "rules", machine, entries, {}, {}, (), {}, {}, extra_bytes={EXPERT_SLOTS: {"cpu": slots}})


TOP_K = {f"l.{i}.experts": (8, 64) for i in range(4)}


def test_a_token_reads_what_no_slot_has() -> None:
    """16 GB of experts, an eighth of them a token: 2 GB, of which slots of 4 GB have a quarter, or 70 %."""
    found = predict_from_disk(plan_of(4, 4 * GB, 4 * GB), TOP_K, 1000, 1e9, token_seconds=0.1, row_seconds=0.01)
    assert found.token_bytes == 2 * GB
    assert found.hits == pytest.approx((0.25, 0.7))
    assert found.decode == pytest.approx((1 / (0.1 + 1.5), 1 / 0.6))
    assert found.prefill == pytest.approx((1 / (0.01 + 0.012), 1 / 0.012))
    assert not found.is_slow
    slower = predict_from_disk(plan_of(4, 4 * GB, 4 * GB), TOP_K, 1000, 0.2e9)
    assert slower.decode == pytest.approx((0.2 / 1.5, 0.2 / 0.6))
    assert slower.is_slow


def test_slots_on_a_gpu_serve_the_most_picked() -> None:
    """Of 16 GB 2 GB are there and 2 GB in RAM; a prompt reads what RAM lacks."""
    there = {f"l.{i}.experts": ("cuda:0", 0.25) for i in range(2)}
    plan = replace(plan_of(4, 4 * GB, 2 * GB), slots=there)
    found = predict_from_disk(plan, TOP_K, 1000, 1e9, token_seconds=0.1, row_seconds=0.01)
    assert found.gpu_hits == pytest.approx((0.125, 0.7**1.5))  # an eighth is a quarter to the power of 1.5
    assert found.hits == pytest.approx((0.25, 0.7))
    assert found.prefill == pytest.approx((1 / (0.01 + 0.014), 1 / 0.014))


@pytest.mark.parametrize("slots", [16 * GB, 17 * GB])  # the other one with those of a layer that drafts
def test_nothing_is_read_where_all_have_slots(slots: int) -> None:
    found = predict_from_disk(plan_of(4, 4 * GB, slots), TOP_K, 512, 1e9, token_seconds=0.1, row_seconds=0.01)
    assert found.hits == (1.0, 1.0)
    assert found.decode == pytest.approx((10.0, 10.0))
    assert found.prefill == pytest.approx((100.0, 100.0))


def test_what_was_learned_takes_the_place_of_a_guess() -> None:
    picks = LearnedPicks.of([np.array([97.0, 1.0, 1.0, 1.0])])
    found = predict_from_disk(plan_of(4, 4 * GB, 4 * GB), TOP_K, 512, 1e9, learned=picks)
    assert found.hits == pytest.approx((0.25, 0.97))


def test_skewed_hits_are_those_of_the_benchmarks() -> None:
    assert skewed_hits(0.25) == pytest.approx(0.7)
    assert (skewed_hits(0.0), skewed_hits(1.0), skewed_hits(2.0)) == (0.0, 1.0, 1.0)
    values = [skewed_hits(i / 10) for i in range(11)]
    assert values == sorted(values)
