"""The rate at which decode steps would find experts on the GPU, for every amount of memory, by a recorded trace.

The experts that decoding tokens chose are replayed, step by step. An expert is read once a step, however many rows use
it; a read is a hit when the expert is on the GPU before the step. Four ways to choose which experts are there:

    lru      each layer keeps the experts that it used last
    lfu      each layer keeps those that it used most often so far
    static   those used most in the whole trace: the best that a fixed choice could have done, known only afterwards
    hot      what ktransformers does with --hot_experts: the policy itself, one pool of slots for all layers, run at a
             few sizes, with a straight line between two
    layers   whole layers from the last one: what ktransformers does with what --gpu_memory leaves

lru and lfu have the same number of slots in each layer. They are stack algorithms (Mattson et al., 1970): what n slots
hold, n + 1 hold too, so that one pass gives the rates for all sizes: an expert's rank among its layer's is the least
number of slots with which it is a hit. They take in whatever is read, at once; hot's uploads take a step and are few.
Tokens of prefill are left out: their steps touch nearly all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktransformers.cache.hot_experts import MAX_UPLOADS, HotExperts, replay
from ktransformers.profiling.tables import Profile

__all__ = ["MAX_STEPS", "POLICIES", "HitRates", "simulate"]

POLICIES = ("lru", "lfu", "hot", "static", "layers")
MAX_STEPS = 2000
"""A longer trace is cut to its last steps."""

_LEAST_GAIN = 0.05
_HOT_SIZES = 8  # at which the policy is run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HitRates:
    """The share of expert reads that are hits, 0 to 1, for each budget. budgets: bytes of experts on the GPU, [n]."""

    budgets: Ints
    rates: dict[str, Floats]
    num_steps: int
    num_reads: int

    @property
    def knee(self) -> int | None:
        """The index of the budget at which the static choice is furthest above an even use of experts.

        That is the budget that it gains most from. None where no budget is 5 % above.
        """
        even = self.budgets / self.budgets[-1]
        gain = self.rates["static"] - even
        best = int(np.argmax(gain))
        return best if gain[best] >= _LEAST_GAIN else None


def simulate(profile: Profile, max_steps: int = MAX_STEPS) -> HitRates | None:
    """Replay a profile's decode steps; None where none has its experts, or where the size of experts is not known."""
    model = profile.meta.model
    nbytes = np.array(model.expert_bytes, np.int64)
    layers = np.flatnonzero(nbytes)
    if not len(layers) or len(nbytes) != model.num_layers or not model.num_experts:
        return None
    recency = _Ranks(len(layers), model.num_experts)
    frequency = _Ranks(len(layers), model.num_experts)
    used = np.zeros((len(layers), model.num_experts), np.int64)
    num_steps = 0
    trace = list(_steps(profile, layers, max_steps))
    for layer, expert in trace:
        recency.touch(layer, expert, np.full(len(layer), num_steps + 1))
        used[layer, expert] += 1
        frequency.touch(layer, expert, used[layer, expert] * (max_steps + 2) + num_steps + 1)
        num_steps += 1
    if not num_steps:
        return None
    budgets = np.arange(model.num_experts + 1) * nbytes[layers].sum()
    reads = int(used.sum())
    hits = {
        "lru": recency.hits(),
        "lfu": frequency.hits(),
        "hot": _hot(trace, len(layers), model.num_experts),
        "static": _static(used, nbytes[layers], budgets),
        "layers": _whole_layers(used, nbytes[layers], budgets),
    }
    return HitRates(
        budgets, {name: np.asarray(counts, np.float64) / reads for name, counts in hits.items()}, num_steps, reads
    )


class _Ranks:
    """The experts of each layer in an order, and at which ranks those were that a step asked for."""

    def __init__(self, num_layers: int, num_experts: int):
        # Never used is below everything; experts that are equal are ordered by their number.
        self._num_experts = num_experts
        self._order = np.arange(num_experts)[::-1]
        self._priority = np.tile(self._order, (num_layers, 1)).astype(np.int64)
        self._rank = np.empty_like(self._priority)
        self._ranks = np.arange(num_experts)[None]
        self._at_rank = np.zeros(num_experts, np.int64)

    def touch(self, layer: Ints, expert: Ints, priority: Ints) -> None:
        """Count the ranks of a step's experts, then give them their new priority (above 0)."""
        was_used = self._priority[layer, expert] >= self._num_experts
        order = np.argsort(-self._priority, axis=1)
        np.put_along_axis(self._rank, order, self._ranks, axis=1)
        ranks = self._rank[layer, expert][was_used]
        self._at_rank += np.bincount(ranks, minlength=self._num_experts)
        self._priority[layer, expert] = priority * self._num_experts + self._order[expert]

    def hits(self) -> Ints:
        """Return the number of reads that are hits with 0, 1, ... slots per layer."""
        return np.concatenate([[0], np.cumsum(self._at_rank)])


def _steps(profile: Profile, layers: Ints, max_steps: int) -> Iterator[tuple[Ints, Ints]]:
    """(layer, expert) of each decode step, [n] each, every pair once."""
    scalars = profile.tokens.read("step", "index")
    steps = np.unique(scalars["step"][scalars["index"] > 0])[-max_steps:]
    if not len(steps):
        return
    rows: list[npt.NDArray[np.int16]] = []
    of_step: list[Ints] = []
    for batch in profile.tokens.batches("step", "index", "experts", since_step=int(steps[0])):
        chosen = batch["index"] > 0
        rows.append(batch["experts"][chosen][:, layers])
        of_step.append(batch["step"][chosen])
    step, ids = np.concatenate(of_step), np.concatenate(rows)
    order = np.argsort(step, kind="stable")
    cuts = np.flatnonzero(np.diff(step[order])) + 1
    num_experts = profile.meta.model.num_experts
    for group in np.split(order, cuts):
        layer = np.broadcast_to(np.arange(len(layers))[None, :, None], ids[group].shape)
        is_read = ids[group] >= 0
        touched = np.zeros(len(layers) * num_experts, np.bool_)
        touched[layer[is_read] * num_experts + ids[group][is_read]] = True
        pairs = np.flatnonzero(touched)
        if len(pairs):
            yield pairs // num_experts, pairs % num_experts


def _hot(trace: list[tuple[Ints, Ints]], num_layers: int, num_experts: int) -> Floats:
    """With 0, 1, ... times as many slots as layers."""
    sizes = np.unique(np.linspace(0, num_experts, _HOT_SIZES + 1).round().astype(np.int64))
    found = [0]
    for slots in sizes[1:].tolist():
        policy = HotExperts(num_layers, num_experts, slots * num_layers, MAX_UPLOADS)
        policy.land(policy.begin())
        found.append(sum(replay(policy, trace)))
    return np.interp(np.arange(num_experts + 1), sizes, found)


def _static(used: Ints, nbytes: Ints, budgets: Ints) -> Ints:
    """Those first that are read most often per byte."""
    sizes = np.repeat(nbytes, used.shape[1])
    order = np.argsort(-used.ravel() / sizes, kind="stable")
    fits = np.searchsorted(np.cumsum(sizes[order]), budgets, side="right")
    return np.concatenate([[0], np.cumsum(used.ravel()[order])])[fits]


def _whole_layers(used: Ints, nbytes: Ints, budgets: Ints) -> Ints:
    sizes = np.cumsum(nbytes[::-1] * used.shape[1])
    hits = np.concatenate([[0], np.cumsum(used.sum(axis=1)[::-1])])
    return hits[np.searchsorted(sizes, budgets, side="right")]
