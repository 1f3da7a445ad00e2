"""Chooses the experts of a model's layers that lie in slots of a GPU while it decodes: a policy on numbers alone.

A pool has slots for experts of one size, of several layers. Every slot holds some expert at all times, or waits for
one. A step is observed once it is over; what the next steps should find there is decided then:

    observe    an expert's score is a count in which a pick weighs half as much after `half_life` steps (LRFU, Lee et
               al., 2001: between the least recently and the least frequently used)
    decide     an expert that is picked a second time within WINDOW steps takes the place of its layer's expert with the
               lowest score, if its own is higher by a margin; at most max_uploads a step, those first that gain most
    land       its bytes are there: the map names its slot from the next step on

Nothing reads a slot between `decide` and `land`, but steps that were launched before may: an Upload says after which
one its slot may be written. Each layer has a quota of slots. It is the same for all, or, where experts are used so
evenly that uploads cost more than they save, whole layers for the last ones (`is_whole`).

Deterministic: the same steps lead to the same choices. Knows no devices, bytes or models.

L layers of the pool, E experts of each, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_UPLOADS", "WINDOW", "HotCosts", "HotExperts", "HotTotals", "Upload", "replay"]

WINDOW = 256
"""Steps within which an expert must be picked twice before it is uploaded."""

MAX_UPLOADS = 16
"""Of a step, unless somebody knows better."""

_MARGIN = 1.5  # times a score, by which another must be higher
_HEAD_START = 1.5  # picks
_JUDGED_EVERY = 64  # steps between two looks at whether whole layers are better
_LOOKED_EVERY = 8  # steps between two of which it is known what the best choice would have found
_KEPT = 0.97  # of what was known of earlier steps, at each look
_HYSTERESIS = 0.03
_RETRY = 0.98  # of the uploads that slots for each layer took last, at each judgement of whole layers
_LARGEST = 1e12

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HotCosts:
    """Costs of experts in seconds: read, of an expert that the CPU computes; upload, by which a copy to the GPU holds
    others up.
    """

    read: float = 1.0
    upload: float = 1.0

    def __post_init__(self) -> None:
        if not (0.0 < self.read < 1e3 and 0.0 <= self.upload < 1e3):
            raise ValueError(f"no costs: read {self.read}, upload {self.upload}")

    def gain_of_hot(self, hit_rate: float, share: float, reads: float, uploads: float) -> float:
        """Return the share of time that a step's experts save with slots for each layer, compared with whole layers on
        the GPU. share: of experts that have a slot; reads, uploads: of a step.
        """
        hot = (1.0 - hit_rate) * reads * self.read + uploads * self.upload
        whole = (1.0 - share) * reads * self.read
        return 0.0 if whole <= 0.0 else 1.0 - hot / whole


@dataclass(frozen=True, slots=True)
class Upload:
    """An expert on its way to a slot. after: the number of the last step launched that may read the slot."""

    layer: int
    expert: int
    slot: int
    after: int


@dataclass(slots=True)
class HotTotals:
    """Totals of hot experts since the start. reads: experts that steps used, each once a step and layer; hits: those
    that had a slot.
    """

    steps: int = 0
    reads: int = 0
    hits: int = 0
    uploads: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of reads whose expert had a slot, 0 before the first step."""
        return self.hits / self.reads if self.reads else 0.0


@dataclass(slots=True)
class _Recent:
    """Of the last steps. best: reads that the experts of highest score would have hit."""

    steps: float = 0.0
    reads: float = 0.0
    best: float = 0.0
    uploads: float = 0.0

    def fade(self) -> None:
        self.steps, self.reads = self.steps * _KEPT, self.reads * _KEPT
        self.best, self.uploads = self.best * _KEPT, self.uploads * _KEPT


@dataclass(slots=True)
class HotExperts:
    """The slots of one pool. Raises ValueError for sizes that make no sense.

    costs: decide between slots for each layer and whole layers; None: always the former.
    """

    num_layers: int
    num_experts: int
    num_slots: int
    max_uploads: int
    half_life: float = 64.0
    costs: HotCosts | None = None
    is_whole: bool = field(default=False, init=False)
    slot_of: npt.NDArray[np.int32] = field(init=False)
    totals: HotTotals = field(default_factory=HotTotals, init=False)
    _score: Floats = field(init=False, repr=False)
    _last: Ints = field(init=False, repr=False)
    _quota: Ints = field(init=False, repr=False)
    _owned: Ints = field(init=False, repr=False)
    _is_coming: Bools = field(init=False, repr=False)
    _is_wanted: Bools = field(init=False, repr=False)
    _weight: float = field(default=1.0, init=False, repr=False)
    _launched: int = field(default=0, init=False, repr=False)
    _recent: _Recent = field(default_factory=_Recent, init=False, repr=False)
    _hot_uploads: float = field(default=0.0, init=False, repr=False)  # of a step, when there were slots for each layer

    def __post_init__(self) -> None:
        shape = self.num_layers, self.num_experts
        if min(*shape, self.num_slots, self.max_uploads) < 1 or self.half_life <= 0.0:
            raise ValueError("layers, experts, slots, uploads and the half-life must be positive")
        if self.num_slots > self.num_layers * self.num_experts:
            raise ValueError(f"{self.num_slots} slots are more than {self.num_layers} x {self.num_experts} experts")
        self.slot_of = np.full(shape, -1, np.int32)
        self._score, self._last = np.zeros(shape), np.full(shape, -WINDOW - 1, np.int64)
        self._is_coming, self._is_wanted = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        self._quota = self._even_quota()
        self._owned = np.zeros(self.num_layers, np.int64)

    @property
    def share(self) -> float:
        """Share of all experts that have a slot."""
        return self.num_slots / (self.num_layers * self.num_experts)

    def scores(self) -> Floats:
        """Return the experts' scores [L, E]: picks, recent ones in full."""
        scores: Floats = self._score / self._weight
        return scores

    def begin(self, scores: Floats | None = None) -> list[Upload]:
        """Return the uploads that fill the slots at first: what earlier steps chose, or any. All must land before the
        first step.

        scores: of `scores`, an earlier time. Raises ValueError for those of other experts.
        """
        if self._owned.any():
            raise RuntimeError("the slots are filled already")
        if scores is not None:
            if scores.shape != self._score.shape or not np.isfinite(scores).all() or scores.min() < 0.0:
                raise ValueError(f"scores must be numbers of {list(self._score.shape)} experts")
            self._score[:] = scores
        made, slot = list[Upload](), 0
        for layer, best in enumerate(np.argsort(-self._score, axis=1, kind="stable")):
            for expert in best[: self._quota[layer]].tolist():
                made.append(self._sent(layer, expert, slot))
                slot += 1
        return made

    def launch(self) -> int:
        """Count the launch of a step that reads the map as it is now; return its number."""
        self._launched += 1
        return self._launched

    def observe(self, picks: Ints) -> None:
        """Learn from a step that is over. picks: [L, E], how often each expert was picked in it."""
        is_used, totals = picks > 0, self.totals
        num_used = int(is_used.sum())
        if not num_used:
            return
        totals.steps += 1
        totals.reads += num_used
        totals.hits += int((is_used & (self.slot_of >= 0)).sum())
        if totals.steps % _LOOKED_EVERY == 0:
            self._look(is_used, num_used)
        self._weight *= 2.0 ** (1.0 / self.half_life)
        self._score[is_used] += self._weight
        if self._weight > _LARGEST:
            self._score /= self._weight
            self._weight = 1.0
        is_second = is_used & (self._last >= totals.steps - WINDOW)
        self._last[is_used] = totals.steps
        self._is_wanted = is_second
        if self.costs is not None and totals.steps % _JUDGED_EVERY == 0:
            self._judge(self.costs)

    def decide(self) -> list[Upload]:
        """Return the uploads to begin now. Their experts have no slot until they land; those that they replace have
        none now.
        """
        found = self._candidates()
        made: list[Upload] = []
        for at in found[np.argsort(-self._score.ravel()[found], kind="stable")].tolist():
            if len(made) == self.max_uploads:
                break
            layer, expert = divmod(at, self.num_experts)
            slot = self._freed(layer, expert)
            if slot is not None:
                made.append(self._sent(layer, expert, slot))
        self._is_wanted[:] = False
        self._recent.uploads += len(made)
        self.totals.uploads += len(made)
        return made

    def land(self, uploads: Iterable[Upload]) -> None:
        """Note that the bytes of these uploads are in their slots."""
        for upload in uploads:
            self._is_coming[upload.layer, upload.expert] = False
            self.slot_of[upload.layer, upload.expert] = upload.slot

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot has one expert at most, and each layer what it is counted to have."""
        held = self.slot_of[self.slot_of >= 0]
        assert len(np.unique(held)) == len(held), "a slot has two experts"
        assert not held.size or held.max() < self.num_slots, "there is no such slot"
        assert not (self._is_coming & (self.slot_of >= 0)).any(), "an expert is there and on its way"
        assert ((self.slot_of >= 0).sum(1) + self._is_coming.sum(1) == self._owned).all(), "slots are miscounted"
        assert self._owned.sum() <= self.num_slots

    def _sent(self, layer: int, expert: int, slot: int) -> Upload:
        self._is_coming[layer, expert] = True
        self._owned[layer] += 1
        return Upload(layer, expert, slot, self._launched)

    def _even_quota(self) -> Ints:
        """As many slots for each layer as can be, those that are left for the last ones."""
        each, left = divmod(self.num_slots, self.num_layers)
        quota = np.full(self.num_layers, each, np.int64)
        quota[self.num_layers - left :] += 1
        return np.minimum(quota, self.num_experts)

    def _whole_quota(self) -> Ints:
        """Whole layers from the last one on, and what is left for the one before them."""
        before = np.arange(self.num_layers)[::-1] * self.num_experts
        return np.clip(self.num_slots - before, 0, self.num_experts)

    def _lowest(self) -> Floats:
        """[L]: the score of the expert that would have to go."""
        lowest: Floats = np.where(self.slot_of >= 0, self._score, np.inf).min(1)
        return lowest

    def _candidates(self) -> Ints:
        """Of those that are wanted, flat: which are not there, and would have a place."""
        is_wanted = self._is_wanted
        is_short = self._owned < self._quota
        if self.is_whole:
            is_wanted = is_wanted | (is_short & (self._quota == self.num_experts))[:, None]
        is_wanted = is_wanted & (self.slot_of < 0) & ~self._is_coming & (self._quota > 0)[:, None]
        is_better = self._score > (_MARGIN * self._lowest() + _HEAD_START * self._weight)[:, None]
        return np.flatnonzero(is_wanted & (is_better | is_short[:, None]))

    def _freed(self, layer: int, expert: int) -> int | None:
        """A slot for an expert: of a layer that has too many while this one has too few, or of its own layer."""
        loser = layer
        if self._owned[layer] < self._quota[layer]:
            there = (self.slot_of >= 0).any(1)
            loser = int(np.argmax(np.where(there, self._owned - self._quota, -1)))
            if self._owned[loser] <= self._quota[loser]:
                return None
        scores = np.where(self.slot_of[loser] >= 0, self._score[loser], np.inf)
        lowest = scores.min()
        if not np.isfinite(lowest):
            return None  # all that it has are on their way
        if loser == layer and self._score[layer, expert] <= _MARGIN * lowest + _HEAD_START * self._weight:
            return None
        tied = np.flatnonzero(scores == lowest)
        victim = int(tied[np.argmin(self._last[loser, tied])])
        slot = int(self.slot_of[loser, victim])
        self.slot_of[loser, victim] = -1
        self._owned[loser] -= 1
        return slot

    def _look(self, is_used: Bools, num_used: int) -> None:
        """Note what the experts of highest score would have hit, with the same quota for all layers."""
        quota = self._even_quota()
        order = np.argsort(-self._score, axis=1, kind="stable")
        is_best = np.zeros_like(is_used)
        np.put_along_axis(is_best, order, np.arange(self.num_experts)[None] < quota[:, None], axis=1)
        self._recent.fade()
        self._recent.steps += 1.0
        self._recent.reads += num_used
        self._recent.best += int((is_used & is_best).sum())

    def _judge(self, costs: HotCosts) -> None:
        """Whole layers, or slots for each?"""
        recent = self._recent
        if recent.steps < 1.0:
            return
        if self.is_whole:
            self._hot_uploads *= _RETRY
        else:
            self._hot_uploads = recent.uploads / (recent.steps * _LOOKED_EVERY)
        hit_rate, reads = recent.best / recent.reads, recent.reads / recent.steps
        gain = costs.gain_of_hot(hit_rate, self.share, reads, self._hot_uploads)
        if self.is_whole and gain > _HYSTERESIS:
            self.is_whole, self._quota = False, self._even_quota()
            self._recent = _Recent()
        elif not self.is_whole and gain < -_HYSTERESIS:
            self.is_whole, self._quota = True, self._whole_quota()


def replay(policy: HotExperts, trace: Iterable[tuple[Ints, Ints]], delay: int = 1) -> Iterator[int]:
    """Run a policy over recorded steps, and yield the hits of each. It must have begun.

    trace: (layer, expert) of each step, [n] each. delay: steps that an upload takes.
    """
    under_way: list[tuple[int, list[Upload]]] = []
    picks = np.zeros((policy.num_layers, policy.num_experts), np.int64)
    for number, (layer, expert) in enumerate(trace):
        while under_way and under_way[0][0] <= number:
            policy.land(under_way.pop(0)[1])
        policy.launch()
        before = policy.totals.hits
        picks[:] = 0
        np.add.at(picks, (layer, expert), 1)
        policy.observe(picks)
        under_way.append((number + 1 + delay, policy.decide()))
        yield policy.totals.hits - before
