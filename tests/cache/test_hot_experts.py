"""The policy of hot experts on traces: what it finds, and what must hold whatever the steps are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ktransformers.cache.hot_experts import HotCosts, HotExperts, HotTotals, Move, Upload, replay
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


def test_uploads_that_are_not_worth_it_end() -> None:
    """Even routing: next to none in the end, and as many hits as experts that never move would have."""
    policy = begun()
    steps = list(trace(1600, LAYERS, EXPERTS, TOP_K))
    found = list(replay(policy, steps[:800]))
    before = policy.totals.uploads
    found += list(replay(policy, steps[800:]))
    assert policy.totals.uploads - before < 0.05 * 800 * TOP_K * LAYERS
    assert sum(found) > 0.98 * 0.25 * 1600 * TOP_K * LAYERS
    assert policy.margin > 10.0


def test_even_routing_among_many_experts_moves_next_to_none() -> None:
    """Where some expert of a slot has always been unpicked for long, so that many others seem worth far more."""
    layers, experts, top_k = 4, 256, 8
    policy = HotExperts(layers, experts, layers * experts // 4, 12, costs=HotCosts(read=1.0, upload=1.0))
    policy.land(policy.begin())
    steps = list(trace(800, layers, experts, top_k))
    list(replay(policy, steps[:600]))
    before = policy.totals.uploads
    list(replay(policy, steps[600:]))
    assert policy.totals.uploads - before < 0.002 * 200 * layers * top_k


def test_the_dearer_uploads_are_the_fewer_there_are() -> None:
    steps, made = list(trace(STEPS, LAYERS, EXPERTS, TOP_K, skew=SKEW, shift_every=50)), []
    for upload in (0.0, 1.0, 20.0):
        policy = begun(costs=HotCosts(read=1.0, upload=upload))
        list(replay(policy, steps))
        made.append(policy.totals.uploads)
    assert made[0] >= made[1] > 1.5 * made[2]


def test_routing_that_gets_skewed_is_followed() -> None:
    """After a long time of even routing, when next to nothing is uploaded any more."""
    policy = begun()
    list(replay(policy, list(trace(1200, LAYERS, EXPERTS, TOP_K))))
    skewed = list(trace(600, LAYERS, EXPERTS, TOP_K, skew=SKEW, seed=1))
    assert hits(policy, skewed, skip=200) > 0.93 * hits(begun(), skewed, skip=200)
    assert policy.margin < 10.0


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
    assert (policy.slot_of >= 0).sum() == SLOTS - 1  # whoever was there is gone already
    policy.land([upload])
    assert policy.slot_of[1, 9] == upload.slot
    policy.observe(first)
    assert policy.totals == HotTotals(steps=3, reads=3, hits=1, uploads=1)


def test_what_cannot_come_is_passed_by() -> None:
    """Nothing goes for it, the next best has the place that it would have had, and it is asked for again."""
    policy, asked = begun(max_uploads=2), list[tuple[int, int]]()
    first = policy.slot_of.copy()

    def step(*refused: int) -> list[int]:
        policy.launch()
        policy.observe(picks_of((np.array([0, 0]), np.array([12, 13]))))

        def can_come(layer: int, expert: int) -> bool:
            asked.append((layer, expert))
            return expert not in refused

        uploads = policy.decide(can_come)
        policy.check_integrity()
        policy.land(uploads)
        return [upload.expert for upload in uploads]

    assert step() == []
    assert step(12, 13) == []
    assert asked == [(0, 12), (0, 13)]
    assert (policy.slot_of == first).all()
    assert policy.totals.uploads == 0
    assert step(12) == [13]
    taken = policy.slot_of[0, 13]
    assert first.ravel()[first.ravel() == taken].size == 1
    assert step() == [12]
    assert asked == [(0, 12), (0, 13)] * 2 + [(0, 12)]
    assert policy.totals.uploads == 2


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


def test_what_was_learned_is_not_given_up_for_the_first_that_come() -> None:
    """Experts of a few picks do not take the place of those that were picked often before the start."""
    scores = np.zeros((LAYERS, EXPERTS))
    scores[:, : EXPERTS // 4] = 500.0
    policy = HotExperts(LAYERS, EXPERTS, SLOTS, 4)
    policy.land(policy.begin(scores))
    picks = np.zeros((LAYERS, EXPERTS), np.int64)
    picks[:, -1] = 1
    for _ in range(4):
        policy.observe(picks)
        assert policy.decide() == []


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
    """Steps in flight, copies that lag behind, uploads that are worth it and are not."""
    generator = np.random.default_rng(seed)
    layers, experts = int(generator.integers(1, 4)), int(generator.integers(2, 12))
    slots, most = int(generator.integers(1, layers * experts + 1)), int(generator.integers(1, 5))
    costs = HotCosts(1.0, 5.0) if seed % 2 else HotCosts()
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
        if seed % 2 and generator.random() < 0.02:
            policy.costs = HotCosts(1.0, float(generator.choice([0.0, 50.0])))
    assert policy.totals.hits <= policy.totals.reads


def test_costs_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="no costs"):
        HotCosts(read=0.0)


@dataclass(frozen=True)
class _Traffic:
    """Decode steps of several layers whose use of experts differs: [steps] (layer, expert)."""

    steps: list[Step]
    layers: int = 6
    experts: int = 32

    def flat(self) -> list[Step]:
        """As experts of one layer."""
        return [(np.zeros_like(layer), layer * self.experts + expert) for layer, expert in self.steps]

    def of_layer(self, number: int) -> list[Step]:
        return [(np.zeros(int((at == number).sum()), np.int64), one[at == number]) for at, one in self.steps]

    @property
    def reads(self) -> int:
        return sum(len(expert) for _, expert in self.steps)


def _traffic(kind: str, num_steps: int = 900) -> _Traffic:
    """Zipf's law with another exponent for each layer; drifting: whose experts change. Even: as chance has it."""
    generator = np.random.default_rng(5)
    exponents = np.array({"even": (0.0,) * 6}.get(kind, (0.1, 0.3, 0.7, 1.2, 1.6, 2.0)))
    layers, steps = np.repeat(np.arange(6), 4), list[Step]()
    for number in range(num_steps):
        if number == 0 or (kind == "drifting" and number % 150 == 0):
            ranks = np.argsort(generator.random((6, 32)), axis=1)
            logits = -exponents[:, None] * np.log(ranks + 1.0)
        keys = logits + generator.gumbel(size=logits.shape)
        steps.append((layers, np.argsort(-keys, axis=1)[:, :4].ravel()))
    return _Traffic(steps)


def _misses(traffic: _Traffic, slots: int) -> int:
    policy = HotExperts(traffic.layers, traffic.experts, slots, max_uploads=8)
    policy.land(policy.begin())
    return traffic.reads - sum(replay(policy, traffic.steps))


def _misses_of_equal_quotas(traffic: _Traffic, slots: int) -> int:
    """The same policy, for each layer on its own."""
    found = 0
    for layer in range(traffic.layers):
        policy = HotExperts(1, traffic.experts, slots // traffic.layers, max_uploads=8)
        policy.land(policy.begin())
        found += sum(replay(policy, traffic.of_layer(layer)))
    return traffic.reads - found


def _misses_of_lru(traffic: _Traffic, slots: int) -> int:
    """A cache for each layer that takes in everything that is read, at once and for nothing."""
    hits, each = 0, slots // traffic.layers
    caches = [list(range(each)) for _ in range(traffic.layers)]
    for layers, experts in traffic.steps:
        for number, cache in enumerate(caches):
            read = experts[layers == number].tolist()
            hits += len(set(read) & set(cache))
            caches[number] = [*[one for one in cache if one not in read], *read][-each:]
    return traffic.reads - hits


@pytest.mark.parametrize("slots", [24, 48, 96])
def test_it_misses_less_than_lru_and_than_equal_quotas_do(slots: int) -> None:
    """Of an eighth, a quarter and a half of the experts; never less than Belady, who knows what comes."""
    least, quotas = {24: 0.12, 48: 0.12, 96: 0.25}[slots], {24: 0.02, 48: 0.0, 96: 0.20}[slots]
    for kind in ("skewed", "drifting", "even"):
        traffic = _traffic(kind)
        got, lru = _misses(traffic, slots), _misses_of_lru(traffic, slots)
        best = traffic.reads - best_hits(traffic.flat(), 1, slots)
        assert best <= got
        if kind == "skewed":
            assert got < (1.0 - least) * lru
            assert _misses_of_equal_quotas(traffic, slots) > (1.0 + quotas) * got
        elif kind == "drifting":
            assert got < lru
        else:
            assert abs(got - lru) < 0.02 * lru  # there is nothing to know
            assert abs(got - (1.0 - slots / 192) * traffic.reads) < 0.02 * traffic.reads


def test_what_is_thrown_out_is_not_forgotten() -> None:
    """An expert that was picked often is back at its second pick, before one that is picked as recently."""
    policy = HotExperts(1, 8, 1, max_uploads=1)
    policy.land(policy.begin())

    def pick(*experts: int) -> list[Upload]:
        picks = np.zeros((1, 8), np.int64)
        picks[0, list(experts)] = 1
        policy.observe(picks)
        made = policy.decide()
        policy.land(made)
        return made

    for _ in range(30):
        pick(5)
    for _ in range(60):
        pick(6)
    assert policy.slot_of[0].argmax() == 6
    for _ in range(60):
        pick()
    made = [*pick(3, 5), *pick(3, 5), *pick(3, 5)]
    assert [upload.expert for upload in made] in ([], [5])
    while not made:
        made = pick(3, 5)
    assert made[0].expert == 5


def test_the_best_of_all_layers_have_the_slots() -> None:
    """A layer that uses a few of its experts gives up what it does not need."""
    policy = HotExperts(2, 16, 16, max_uploads=4)
    policy.land(policy.begin())
    assert (policy.slot_of >= 0).sum(1).tolist() == [8, 8]
    narrow, wide = trace(400, 1, 2, 2, seed=1), trace(400, 1, 16, 4, seed=2)
    steps = [(np.repeat([0, 1], [2, 4]), np.concatenate([a, b])) for (_, a), (_, b) in zip(narrow, wide, strict=True)]
    found = list(replay(policy, steps))
    assert (policy.slot_of >= 0).sum(1).tolist() == [2, 14]
    assert sum(found[200:]) > 0.9 * 200 * 6 * (2 + 4 * 14 / 16) / 6
    policy.check_integrity()


def test_the_last_slots_are_lent_and_come_back() -> None:
    """Those worth least lose their slots, whichever these are; what stays moves to theirs, and the best come back."""
    policy = HotExperts(1, 8, 6, max_uploads=2)
    policy.land(policy.begin())
    picks = np.zeros((1, 8), np.int64)
    picks[0, [0, 4, 5, 7]] = 1  # of experts 0 .. 5 in slots of their numbers, and one without
    policy.observe(picks)
    assert policy.lend(3) == [Move(4, 1), Move(5, 2)]  # of 1, 2 and 3, which were never picked, 3 has no use for a move
    assert policy.slot_of[0].tolist() == [0, -1, -1, -1, 1, 2, -1, -1]
    policy.check_integrity()
    with pytest.raises(RuntimeError, match="lent already"):
        policy.lend(1)
    back = policy.reclaim()
    assert [(one.expert, one.slot) for one in back] == [(7, 3), (1, 4), (2, 5)]  # picked, then the first ones
    policy.check_integrity()
    policy.land(back)
    assert sorted(policy.slot_of[0].tolist()) == [-1, -1, 0, 1, 2, 3, 4, 5]
    policy.check_integrity()


@pytest.mark.parametrize("count", [0, SLOTS, SLOTS + 1])
def test_slots_that_cannot_be_lent(count: int) -> None:
    with pytest.raises(ValueError, match="cannot be lent"):
        begun().lend(count)


def test_steps_go_on_while_slots_are_lent() -> None:
    """Uploads go to slots that are left; equal experts come back to all layers."""
    policy = begun()
    steps = list(trace(300, LAYERS, EXPERTS, TOP_K, skew=SKEW))
    list(replay(policy, steps[:100]))
    policy.land(policy.decide())
    for upload in _coming(policy):
        policy.land([upload])
    policy.lend(SLOTS // 2)
    for step in steps[100:200]:
        policy.launch()
        policy.observe(picks_of(step))
        policy.land(policy.decide())
        policy.check_integrity()
        assert (policy.slot_of >= 0).sum() == SLOTS - SLOTS // 2
    policy.land(policy.reclaim())
    assert (policy.slot_of >= 0).sum() == SLOTS
    policy.check_integrity()


def _coming(policy: HotExperts) -> list[Upload]:
    """The uploads that a replay has left on their way, each to a slot that nobody has."""
    free = sorted(set(range(SLOTS)) - set(policy.slot_of[policy.slot_of >= 0].tolist()))
    pairs = zip(sorted(policy._coming), free, strict=True)
    return [Upload(*divmod(number, EXPERTS), slot, 0) for number, slot in pairs]
