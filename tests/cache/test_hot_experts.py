"""The policy of hot experts on traces: what it finds, and what must hold whatever the steps are."""

from __future__ import annotations

import numpy as np
import pytest

from ktransformers.cache.hot_experts import HotCosts, HotExperts, HotTotals, Upload, replay
from tests.support.engines.routing_traces import SKEW, Step, best_hits, trace

LAYERS, EXPERTS, TOP_K = 3, 16, 2
SLOTS = LAYERS * EXPERTS // 4
STEPS = 600


def begun(max_uploads: int = 4, **options: object) -> HotExperts:
    policy = HotExperts(LAYERS, EXPERTS, SLOTS, max_uploads, **options)  # type: ignore[arg-type]
    policy.land(policy.begin())
    return policy


def hits(policy: HotExperts, steps: list[Step], skip: int = 0) -> float:
    """The share of reads that found their expert, of the steps after the first ones."""
    found = list(replay(policy, steps))
    return sum(found[skip:]) / sum(len(expert) for _, expert in steps[skip:])


def picks_of(step: Step) -> np.ndarray:
    picks = np.zeros((LAYERS, EXPERTS), np.int64)
    np.add.at(picks, step, 1)
    return picks


def test_a_skewed_trace_finds_its_hot_quarter() -> None:
    steps = list(trace(STEPS, LAYERS, EXPERTS, TOP_K, skew=SKEW))
    counts = sum((picks_of(step) for step in steps), np.zeros((LAYERS, EXPERTS), np.int64))
    fixed = np.sort(counts, axis=1)[:, -EXPERTS // 4 :].sum() / counts.sum()
    assert 0.66 < fixed < 0.76  # the trace is what it says
    got = hits(begun(), steps, skip=100)
    assert got > 0.93 * fixed
    assert got <= best_hits(steps, LAYERS, EXPERTS // 4) / counts.sum() + 0.02


def test_the_hot_quarter_moves() -> None:
    """In each third of the trace as good again as with a choice that stays."""
    steps = list(trace(STEPS, LAYERS, EXPERTS, TOP_K, skew=SKEW, shift_every=200))
    found = list(replay(begun(half_life=16.0), steps))
    for begin in (100, 300, 500):
        assert sum(found[begin : begin + 100]) > 0.6 * 100 * LAYERS * TOP_K
    assert sum(found) <= best_hits(steps, LAYERS, EXPERTS // 4)


def test_even_routing_changes_little() -> None:
    steps = list(trace(STEPS, LAYERS, EXPERTS, TOP_K))
    policy = begun()
    assert abs(hits(policy, steps) - 0.25) < 0.05
    assert policy.totals.uploads < 0.1 * STEPS * TOP_K * LAYERS


def test_even_routing_with_dear_uploads_ends_in_whole_layers() -> None:
    """The quarter of the experts is the last layers', and stays."""
    policy = begun(costs=HotCosts(read=1.0, upload=50.0))
    steps = list(trace(1200, LAYERS, EXPERTS, TOP_K))
    list(replay(policy, steps))
    assert policy.is_whole
    there = (policy.slot_of >= 0).sum(1)
    assert there.tolist() == [0, 0, SLOTS]


def test_skewed_routing_leaves_whole_layers() -> None:
    policy = begun(costs=HotCosts(read=1.0, upload=50.0))
    list(replay(policy, list(trace(1200, LAYERS, EXPERTS, TOP_K))))
    assert policy.is_whole
    skewed = list(trace(1200, LAYERS, EXPERTS, TOP_K, skew=40.0, seed=1))
    policy.costs = HotCosts(read=1.0, upload=0.1)
    list(replay(policy, skewed))
    assert not policy.is_whole
    assert (policy.slot_of >= 0).sum(1).tolist() == [EXPERTS // 4] * LAYERS


def test_an_expert_is_uploaded_on_its_second_hit() -> None:
    policy = begun()
    first = np.zeros((LAYERS, EXPERTS), np.int64)
    first[1, 9] = 1
    policy.observe(first)
    assert policy.decide() == []
    policy.launch()
    policy.observe(first)
    (upload,) = policy.decide()
    assert (upload.layer, upload.expert, upload.after) == (1, 9, 1)
    assert policy.slot_of[1, 9] == -1
    assert (policy.slot_of[1] >= 0).sum() == EXPERTS // 4 - 1  # whoever was there is gone already
    policy.land([upload])
    assert policy.slot_of[1, 9] == upload.slot
    policy.observe(first)
    assert policy.totals == HotTotals(steps=3, reads=3, hits=1, uploads=1)


def test_same_steps_same_choices() -> None:
    steps = list(trace(200, LAYERS, EXPERTS, TOP_K, skew=SKEW))
    one, other = begun(), begun()
    assert list(replay(one, steps)) == list(replay(other, steps))
    assert (one.slot_of == other.slot_of).all()


def test_what_was_learned_is_there_from_the_start() -> None:
    steps = list(trace(STEPS, LAYERS, EXPERTS, TOP_K, skew=SKEW))
    policy = begun()
    list(replay(policy, steps))
    again = HotExperts(LAYERS, EXPERTS, SLOTS, 4)
    again.land(again.begin(policy.scores()))
    assert hits(again, steps[:10]) > hits(begun(), steps[:10]) + 0.2


def test_scores_of_other_experts_are_refused() -> None:
    policy = HotExperts(LAYERS, EXPERTS, SLOTS, 4)
    for wrong in (np.zeros((LAYERS, EXPERTS + 1)), np.full((LAYERS, EXPERTS), np.nan)):
        with pytest.raises(ValueError, match="scores must be"):
            policy.begin(wrong)
    policy.begin()
    with pytest.raises(RuntimeError, match="filled already"):
        policy.begin()


@pytest.mark.parametrize(
    "sizes", [(0, 4, 4, 1), (1, 0, 1, 1), (2, 4, 0, 1), (2, 4, 9, 1), (2, 4, 4, 0)], ids=lambda one: str(one)
)
def test_sizes_that_make_no_sense(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be positive|slots are more"):
        HotExperts(*sizes)


class _Gpu:
    """Slots as a device would have them: steps run later than they are launched, copies later than they are put."""

    def __init__(self, policy: HotExperts) -> None:
        self.policy, self.content = policy, [(-1, -1)] * policy.num_slots
        self.flying: dict[int, np.ndarray] = {}  # maps of steps that are launched and not over
        self.coming: list[Upload] = []

    def launch(self) -> None:
        self.flying[self.policy.launch()] = self.policy.slot_of.copy()

    def finish(self, number: int) -> None:
        """A step reads all that its map names, at its end."""
        for layer, expert in np.argwhere(self.flying[number] >= 0).tolist():
            slot = self.flying[number][layer, expert]
            assert self.content[slot] == (layer, expert), "a slot in use was overwritten"
        del self.flying[number]

    def copy(self, count: int) -> None:
        """Copies that need not wait for a step are made, in their order."""
        done = []
        while self.coming and len(done) < count and self.coming[0].after < min(self.flying, default=1 << 60):
            upload = self.coming.pop(0)
            self.content[upload.slot] = (upload.layer, upload.expert)
            done.append(upload)
        self.policy.land(done)


@pytest.mark.parametrize("seed", range(6))
def test_invariants_whatever_the_order(seed: int) -> None:
    """Steps in flight, copies that lag behind, switches between whole layers and slots."""
    generator = np.random.default_rng(seed)
    layers, experts = int(generator.integers(1, 4)), int(generator.integers(2, 12))
    slots, most = int(generator.integers(1, layers * experts + 1)), int(generator.integers(1, 5))
    costs = HotCosts(1.0, 5.0) if seed % 2 else None
    policy = HotExperts(layers, experts, slots, most, half_life=float(generator.integers(1, 20)), costs=costs)
    gpu = _Gpu(policy)
    gpu.coming = policy.begin()
    gpu.copy(slots)
    assert sorted(gpu.content) == sorted(set(gpu.content))
    for _ in range(300):
        gpu.launch()
        if generator.random() < 0.5:
            for number in list(gpu.flying):
                gpu.finish(number)
        picks = generator.integers(0, 3, (layers, experts)) * (generator.random((layers, experts)) < 0.3)
        policy.observe(picks)
        made = policy.decide()
        assert len(made) <= most
        gpu.coming += made
        gpu.copy(int(generator.integers(0, 4)))
        policy.check_integrity()
        if costs is not None and generator.random() < 0.02:
            policy.costs = HotCosts(1.0, float(generator.choice([0.0, 50.0])))
    assert policy.totals.hits <= policy.totals.reads


def test_costs_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="no costs"):
        HotCosts(read=0.0)
    assert HotCosts().gain_of_hot(0.7, 0.25, 8.0, 0.0) == pytest.approx(0.6)
    assert HotCosts().gain_of_hot(0.25, 0.25, 8.0, 0.0) == 0.0
    assert HotCosts().gain_of_hot(1.0, 1.0, 8.0, 0.0) == 0.0
