"""Chooses the experts of a model's layers that lie in slots of a GPU while it decodes: a policy on numbers alone.

A pool has slots for experts of one size, of several layers: whichever are worth most, of any layer. Every slot holds
some expert at all times, or waits for one. A step is observed once it is over; what the next steps should find there is
decided then:

    observe    counts picks, of experts without a slot as of others: a pick counts half after `half_life` steps
    decide     an expert is worth its count / (its age + RECENCY), with the steps since its last pick as its age. One
               that is picked a second time within WINDOW steps takes the place of the one that is worth least, of any
               layer, if it is worth `margin` times as much; at most max_uploads a step, those first that are worth
               most. One whose bytes are not at hand is passed by, and nothing goes for it
    land       its bytes are there: the map names its slot from the next step on
    lend       the last slots are wanted for something else: the experts that are worth least go, others move out of
               them. reclaim: the best of those without a slot come back, by uploads

The margin follows from what uploads bring. Every 64 steps the hits of these steps are compared with those of the
experts that had a slot before them: where the difference is not worth the uploads, as with even routing, the margin
rises until next to nothing is uploaded, and falls again where it is.

Nothing reads a slot between `decide` and `land`, but steps that were launched before may: an Upload says after which
one its slot may be written. Deterministic: the same steps lead to the same choices. Knows no devices, bytes or models.

L layers of the pool, E experts of each, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_UPLOADS", "RECENCY", "WINDOW", "HotCosts", "HotExperts", "HotTotals", "Move", "Upload", "replay"]

WINDOW = 256
"""Steps within which an expert must be picked twice before it is uploaded."""

RECENCY = 16
"""Steps that are added to an age: the fewer, the more the last pick counts and the less the number of picks."""

MAX_UPLOADS = 16
"""Of a step, unless somebody knows better."""

# With even routing the one that is worth least has not been picked for long: hundreds of times less than the mean.
_LEAST_MARGIN, _MOST_MARGIN = 1.5, 4096.0
_RAISED, _LOWERED = 1.5, 1 / 1.2  # the margin, where uploads are not worth it, and where they are
_FAST, _CLEARLY = 3.0, 4.0  # where they are worth so many times less, or more, than what they cost
_HEAD_START = 0.5  # picks
_JUDGED_EVERY = 64  # steps
_LATER = 2.0  # hits of an upload, for each in the steps until it is judged
_REMEMBERED = 2048.0  # steps after which a pick counts half for the next start
_LARGEST = 1e12

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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


@dataclass(frozen=True, slots=True)
class Upload:
    """An expert on its way to a slot. after: the number of the last step launched that may read the slot."""

    layer: int
    expert: int
    slot: int
    after: int


@dataclass(frozen=True, slots=True)
class Move:
    """An expert whose bytes go from one slot to another, in which no expert is left."""

    source: int
    target: int


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


class _Counts:
    """Picks of each expert, [L * E], of which each counts half after so many steps: kept as multiples of what the
    newest counts, so that a step touches those alone that it used."""

    def __init__(self, size: int, half_life: float) -> None:
        self.scaled, self.newest = np.zeros(size), 1.0
        self._growth = 2.0 ** (1.0 / half_life)

    def add(self, used: Ints) -> None:
        self.newest *= self._growth
        self.scaled[used] += self.newest
        if self.newest > _LARGEST:
            self.scaled /= self.newest
            self.newest = 1.0

    def set(self, counts: Floats) -> None:
        self.scaled[:], self.newest = counts.ravel(), 1.0


@dataclass(slots=True)
class HotExperts:
    """The slots of one pool. Raises ValueError for sizes that make no sense.

    costs: what uploads have to be worth. margin: by which an expert has to be worth more than the one whose place it
    takes.
    """

    num_layers: int
    num_experts: int
    num_slots: int
    max_uploads: int
    half_life: float = 32.0
    costs: HotCosts = field(default_factory=HotCosts)
    margin: float = field(default=_LEAST_MARGIN, init=False)
    slot_of: npt.NDArray[np.int32] = field(init=False)
    totals: HotTotals = field(default_factory=HotTotals, init=False)
    num_lent: int = field(default=0, init=False)
    # By the number of an expert among those of all layers: layer * E + expert.
    _slots: npt.NDArray[np.int32] = field(init=False, repr=False)
    _recent: _Counts = field(init=False, repr=False)
    _remembered: _Counts = field(init=False, repr=False)
    _last: Ints = field(init=False, repr=False)
    _coming: set[int] = field(default_factory=set, init=False, repr=False)
    _wanted: Ints = field(init=False, repr=False)
    _launched: int = field(default=0, init=False, repr=False)
    _judged: HotTotals = field(default_factory=HotTotals, init=False, repr=False)  # when uploads were judged last
    _had_slot: npt.NDArray[np.bool_] = field(init=False, repr=False)  # at that time
    _would_hit: int = field(default=0, init=False, repr=False)  # since then, had nothing been uploaded

    def __post_init__(self) -> None:
        shape = self.num_layers, self.num_experts
        if min(*shape, self.num_slots, self.max_uploads) < 1 or self.half_life <= 0.0:
            raise ValueError("layers, experts, slots, uploads and the half-life must be positive")
        if self.num_slots > self.num_layers * self.num_experts:
            raise ValueError(f"{self.num_slots} slots are more than {self.num_layers} x {self.num_experts} experts")
        size = self.num_layers * self.num_experts
        self._slots = np.full(size, -1, np.int32)
        self.slot_of = self._slots.reshape(shape)
        self._recent, self._remembered = _Counts(size, self.half_life), _Counts(size, _REMEMBERED)
        self._last = np.full(size, -WINDOW - 1, np.int64)
        self._wanted, self._had_slot = np.empty(0, np.int64), np.zeros(size, np.bool_)

    @property
    def share(self) -> float:
        """Share of all experts that have a slot."""
        return self.num_slots / (self.num_layers * self.num_experts)

    def scores(self) -> Floats:
        """Return what `begin` takes at another start, [L, E]: picks, those of the last few thousand steps most."""
        scores: Floats = self._remembered.scaled / self._remembered.newest
        return scores.reshape(self.slot_of.shape)

    def begin(self, scores: Floats | None = None) -> list[Upload]:
        """Return the uploads that fill the slots at first: experts of the highest scores, and of equal ones as many of
        each layer. All must land before the first step.

        scores: of `scores`, an earlier time. Raises ValueError for those of other experts.
        """
        shape = self.slot_of.shape
        if (self._slots >= 0).any() or self._coming:
            raise RuntimeError("the slots are filled already")
        known = np.zeros(shape) if scores is None else scores
        if known.shape != shape or not np.isfinite(known).all() or known.min() < 0.0:
            raise ValueError(f"scores must be numbers of {list(shape)} experts")
        self._remembered.set(known)
        # As many recent picks as the newest steps would have had at this rate, the last one just now.
        self._recent.set(known * (self.half_life / _REMEMBERED))
        self._last[known.ravel() > 0.0] = 0
        best = np.argsort(-known.T.ravel(), kind="stable")[: self.num_slots]
        found = np.sort(best % self.num_layers * self.num_experts + best // self.num_layers)
        self._had_slot[found] = True
        return [self._sent(expert, slot) for slot, expert in enumerate(found.tolist())]

    def launch(self) -> int:
        """Count the launch of a step that reads the map as it is now; return its number."""
        self._launched += 1
        return self._launched

    def observe(self, picks: Ints) -> None:
        """Learn from a step that is over. picks: [L, E], how often each expert was picked in it."""
        used, totals = np.flatnonzero(picks != 0), self.totals
        if not len(used):
            return
        totals.steps += 1
        has_slot = self._slots[used] >= 0
        totals.reads += len(used)
        totals.hits += int(np.count_nonzero(has_slot))
        self._would_hit += int(np.count_nonzero(self._had_slot[used]))
        self._recent.add(used)
        self._remembered.add(used)
        self._wanted = used[~has_slot & (self._last[used] >= totals.steps - WINDOW)]
        self._last[used] = totals.steps
        if totals.steps % _JUDGED_EVERY == 0:
            self._judge()

    def decide(self, can_come: Callable[[int, int], bool] | None = None) -> list[Upload]:
        """Return the uploads to begin now. Their experts have no slot until they land; those that they replace have
        none now.

        can_come: whether (layer, expert) can be uploaded now. It is asked once, for one that is worth it: an upload
        follows if it says so. None: all can.
        """
        wanted, self._wanted = self._wanted, self._wanted[:0]
        wanted = wanted[self._slots[wanted] < 0]
        if self._coming:
            wanted = np.setdiff1d(wanted, np.array(sorted(self._coming)))
        there = np.flatnonzero(self._slots >= 0)
        if not len(wanted) or not len(there):
            return []
        # In pairs: the best of those that are wanted takes the place of the worst of those that are there.
        worth_of_wanted, worth_of_there = self._worth(wanted), self._worth(there)
        order = np.argsort(-worth_of_wanted, kind="stable")[: self.max_uploads]
        lowest = _lowest(worth_of_there, len(order))
        least = self.margin * worth_of_there[lowest] + _HEAD_START * self._recent.newest / RECENCY
        comers = list[int]()
        for at in order.tolist():
            if len(comers) == len(lowest) or not worth_of_wanted[at] > least[len(comers)]:
                break
            comer = int(wanted[at])
            if can_come is None or can_come(*divmod(comer, self.num_experts)):
                comers.append(comer)
        leavers = there[lowest[: len(comers)]]
        slots = self._slots[leavers].tolist()
        self._slots[leavers] = -1
        self.totals.uploads += len(comers)
        return [self._sent(comer, slot) for comer, slot in zip(comers, slots, strict=True)]

    def land(self, uploads: Iterable[Upload]) -> None:
        """Note that the bytes of these uploads are in their slots."""
        for upload in uploads:
            self._coming.remove(upload.layer * self.num_experts + upload.expert)
            self.slot_of[upload.layer, upload.expert] = upload.slot

    def lend(self, count: int) -> list[Move]:
        """Clear the last `count` slots until `reclaim`; return the moves to be made before the next step.

        Raises RuntimeError while slots are lent or uploads are on their way, ValueError for a count that leaves none.
        """
        if self.num_lent or self._coming:
            raise RuntimeError("slots are lent already, or uploads are on their way")
        if not 0 < count < self.num_slots:
            raise ValueError(f"{count} of {self.num_slots} slots cannot be lent")
        there, first = np.flatnonzero(self._slots >= 0), self.num_slots - count
        leavers = there[_lowest(self._worth(there), count)]
        free = np.sort(self._slots[leavers])
        self._slots[leavers] = -1
        movers = np.flatnonzero(self._slots >= first)
        targets = free[: len(movers)]
        moves = [Move(*pair) for pair in zip(self._slots[movers].tolist(), targets.tolist(), strict=True)]
        self._slots[movers] = targets
        self.num_lent = count
        self._compare_from_now()
        return moves

    def reclaim(self) -> list[Upload]:
        """Return the uploads that fill the slots that were lent: experts without a slot that are worth most, and of
        equal ones as many of each layer.
        """
        free, self.num_lent = range(self.num_slots - self.num_lent, self.num_slots), 0
        worth = self._worth(np.arange(len(self._slots)))
        worth[self._slots >= 0] = -1.0
        worth[sorted(self._coming)] = -1.0
        order = np.argsort(-worth.reshape(self.slot_of.shape).T.ravel(), kind="stable")[: len(free)]
        best = order % self.num_layers * self.num_experts + order // self.num_layers
        self.totals.uploads += len(free)
        self._compare_from_now()
        return [self._sent(expert, slot) for expert, slot in zip(best.tolist(), free, strict=True)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot has one expert at most, and none is lost."""
        held = self._slots[self._slots >= 0]
        assert len(np.unique(held)) == len(held), "a slot has two experts"
        assert not held.size or held.max() < self.num_slots - self.num_lent, "there is no such slot"
        assert not any(self._slots[number] >= 0 for number in self._coming), "an expert is there and on its way"
        assert len(held) + len(self._coming) in (0, self.num_slots - self.num_lent), "slots are miscounted"

    def _sent(self, number: int, slot: int) -> Upload:
        self._coming.add(number)
        return Upload(*divmod(number, self.num_experts), slot, self._launched)

    def _worth(self, numbers: Ints) -> Floats:
        """Of experts, in the picks of the newest step."""
        worth: Floats = self._recent.scaled[numbers] / (self.totals.steps - self._last[numbers] + RECENCY)
        return worth

    def _judge(self) -> None:
        """Were the uploads since the last time worth it?"""
        before, now = self._judged, self.totals
        saved = (now.hits - before.hits - self._would_hit) * _LATER * self.costs.read
        cost = (now.uploads - before.uploads) * self.costs.upload
        if saved < cost:
            self.margin = min(self.margin * (_FAST if saved * _CLEARLY < cost else _RAISED), _MOST_MARGIN)
        else:
            self.margin = max(self.margin * (1 / _FAST if 0 < cost * _CLEARLY < saved else _LOWERED), _LEAST_MARGIN)
        self._compare_from_now()

    def _compare_from_now(self) -> None:
        """Begin a comparison of hits with those of the experts that have a slot now."""
        now = self.totals
        self._judged = HotTotals(now.steps, now.reads, now.hits, now.uploads)
        self._had_slot, self._would_hit = self._slots >= 0, 0


def _lowest(values: Floats, count: int) -> Ints:
    """The places of the `count` lowest values, those first that are lower or, of equal ones, come first."""
    count = min(count, len(values))
    found = np.flatnonzero(values <= np.partition(values, count - 1)[count - 1])
    lowest: Ints = found[np.argsort(values[found], kind="stable")][:count]
    return lowest


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
