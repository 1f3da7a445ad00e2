"""Divides a layer's experts between a GPU, to which their weights are copied, and the CPU, which computes meanwhile.

Pure: counts and rates in, a choice out. The copies and the CPU work at the same time, so a layer takes as long as the
longer of the two; experts with many rows are copied, for a copy costs the same whatever the rows, and the others stay.
Experts that the GPU holds already cost no copy, so that it computes them whatever their rows.
Knows no devices, weights or tensors.

E experts of a layer. Times are in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "NEVER",
    "STEP_COST",
    "AheadShare",
    "CpuOverhead",
    "CpuRate",
    "PrefillRates",
    "Split",
    "choose_split",
    "even_counts",
    "threshold_of",
]

NEVER = 1 << 30
"""A threshold that no step reaches."""

STEP_COST = 2e-3
"""What the host adds to a layer whose experts are copied: it waits for the router's ids, sorts, and launches copies and
kernels one by one, where a step that copies nothing is replayed. Measured steps of 17 to 512 tokens (H200 with 16 Xeon
cores; shapes of Qwen3-30B and Qwen3.6-35B) were 2.0 to 2.6 ms a layer longer than the rates say."""
_MIN_GAIN = 0.05
_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CpuRate:
    """The CPU's time for one expert when many are computed together, by its number of rows.

    rows: increasing, from 1. seconds: for so many rows. Between two points on a straight line, behind the last on the
    line through the last two, and never less for more rows: reading the weights costs the same for few rows, the
    products grow with them.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        is_ordered = all(a < b for a, b in itertools.pairwise(self.rows))
        if not self.rows or len(self.rows) != len(self.seconds) or self.rows[0] < 1 or not is_ordered:
            raise ValueError(f"rows must increase from at least 1, one time each: {self.rows}, {self.seconds}")
        if min(self.seconds) <= 0.0 or not np.isfinite(self.seconds).all():
            raise ValueError(f"times must be positive: {self.seconds}")

    def of(self, counts: _Ints) -> _Floats:
        """Return the seconds of experts with `counts` rows; nothing for an expert without rows."""
        xs = np.asarray(self.rows, dtype=np.float64)
        ys = np.maximum.accumulate(np.asarray(self.seconds))
        times = np.interp(counts, xs, ys)
        if len(xs) > 1:
            slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
            times = np.where(counts > xs[-1], ys[-1] + slope * (counts - xs[-1]), times)
        else:
            times = ys[0] * np.maximum(counts / xs[0], 1.0)
        return np.where(counts > 0, times, 0.0)


@dataclass(frozen=True, slots=True)
class PrefillRates:
    """Seconds that a machine takes for the experts of one shape.

    copy: to bring one expert to the GPU. gpu_row: the GPU's time for one (token, expert) pair. cpu: on the CPU alone;
    shared_cpu: while copies take their part of the memory's bandwidth.
    """

    copy: float
    gpu_row: float
    cpu: CpuRate
    shared_cpu: CpuRate

    def __post_init__(self) -> None:
        if not (0.0 < self.copy < 1e3 and 0.0 <= self.gpu_row < 1e3):
            raise ValueError(f"no rates: copy {self.copy}, gpu_row {self.gpu_row}")


class CpuOverhead:
    """The time of the CPU's part of a layer beside the products that CpuRate knows: learned while steps run.

    Rows are converted on their way to the CPU's kernels and back, and memory is shared with copies that no measurement
    before the first request has seen. Kept by the row, apart for each power of two of a step's rows.
    """

    _WEIGHT, _KEPT = 0.1, 0.999
    """Of the newest call; a step has one in each layer, so that a step teaches nearly all. And what is left
    after a call without a part for the CPU: a time of distress is forgotten, so that the CPU is tried again."""

    def __init__(self) -> None:
        self._per_row: dict[int, float] = {}

    def learn(self, rows: int, expected: float, took: float) -> None:
        """Learn from a call with so many rows of a step that was expected to take, and took, so many seconds."""
        size, new = rows.bit_length(), (took - expected) / rows
        old = self._per_row.get(size, new)
        self._per_row[size] = old + self._WEIGHT * (new - old)

    def forget(self) -> None:
        """Let what was learned decay: a call went by without a part for the CPU."""
        for size in self._per_row:
            self._per_row[size] *= self._KEPT

    def seconds(self, rows: int) -> float:
        """Return the overhead of a step of so many rows; by the nearest size that was met, 0 before any was."""
        if not self._per_row:
            return 0.0
        nearest = min(self._per_row, key=lambda size: abs(size - rows.bit_length()))
        return max(self._per_row[nearest] * rows, 0.0)


class AheadShare:
    """Share of a layer's copies that is made ahead of the next layer's choice: as much as keeps the copies running.

    A copy that nobody asked for yet is a guess, so that the share falls again where copies are still under way when the
    choice is made.
    """

    _LEAST, _MOST, _UP, _DOWN = 0.25, 1.0, 1.15, 0.95

    def __init__(self) -> None:
        self.value = 0.5

    def learn(self, is_idle: bool) -> None:
        """Raise or lower the share. is_idle: whether all copies were through when the choice was made."""
        self.value = min(max(self.value * (self._UP if is_idle else self._DOWN), self._LEAST), self._MOST)


@dataclass(frozen=True, slots=True)
class Split:
    """The GPU's experts of a layer: held in slots, there in staging buffers, and copied for this step, each in order of
    their numbers. The rest is the CPU's. seconds: what the layer is expected to take.
    """

    there: tuple[int, ...]
    copied: tuple[int, ...]
    seconds: float
    held: tuple[int, ...] = ()

    @property
    def on_gpu(self) -> tuple[int, ...]:
        return self.held + self.there + self.copied

    @property
    def passing(self) -> tuple[int, ...]:
        """The experts whose bytes come over PCIe for this step."""
        return self.there + self.copied


def choose_split(
    counts: _Ints,
    rates: PrefillRates,
    there: Sequence[int] = (),
    ahead: float = 0.0,
    overhead: float = 0.0,
    held: Sequence[int] = (),
) -> Split:
    """Return the fastest split by the rates among those that give the GPU the experts that it holds and then those with
    most rows.

    counts: int64 [E], rows of each expert. there: experts that are in staging buffers, or on their way, which takes
    `ahead` more seconds; they are used, or nothing is copied. overhead: seconds that the CPU's part takes beside its
    products, whatever its experts: rows to it and results back. held: experts in slots of the GPU, none of them in
    `there`; those without rows are left out of the choice. So the choice is never slower, by the same rates, than
    copying every other expert that has rows, than copying none, or than leaving all to the CPU.
    """
    held = [expert for expert in held if counts[expert]]
    busy = rates.shared_cpu.of(counts)
    ready = np.asarray([*held, *there], dtype=np.int64)
    is_left = counts > 0
    is_left[ready] = False
    left = np.flatnonzero(is_left)
    left = left[np.argsort(-counts[left], kind="stable")]
    steps = np.arange(len(left) + 1)
    copying = ahead + steps * rates.copy
    computing = rates.gpu_row * (counts[ready].sum() + np.concatenate(([0], np.cumsum(counts[left]))))
    cpu_left = np.concatenate((np.cumsum(busy[left][::-1])[::-1] + overhead, [0.0]))
    times = np.maximum(np.maximum(copying, computing), cpu_left)
    best = int(times.argmin())
    copying_none = _without_copies(counts, rates, overhead, held)
    if copying_none.seconds <= times[best]:
        return copying_none
    return Split(tuple(there), tuple(sorted(left[:best].tolist())), float(times[best]), tuple(held))


def _without_copies(counts: _Ints, rates: PrefillRates, overhead: float, held: Sequence[int]) -> Split:
    """The CPU computes what the GPU does not hold, or all, at the rate that it has beside no copies."""
    alone = float(rates.cpu.of(counts).sum()) + overhead
    if not held:
        return Split((), (), alone)
    rest = counts.copy()
    rest[list(held)] = 0
    of_cpu = float(rates.cpu.of(rest).sum()) + (overhead if rest.any() else 0.0)
    both = max(of_cpu, rates.gpu_row * float(counts[list(held)].sum()))
    return Split((), (), both, tuple(held)) if both <= alone else Split((), (), alone)


def even_counts(num_tokens: int, top_k: int, num_experts: int) -> _Ints:
    """Return the rows of each expert when num_tokens take top_k experts each as evenly as chance spreads them: the
    quantiles of the Poisson distribution that has the same mean.
    """
    mean = num_tokens * top_k / num_experts
    most = int(mean + 8.0 * mean**0.5 + 8.0)
    logs = np.concatenate(([0.0], np.log(np.arange(1, most + 1)))).cumsum()
    mass = np.exp(np.arange(most + 1) * np.log(max(mean, 1e-9)) - mean - logs)
    at = (np.arange(num_experts) + 0.5) / num_experts
    return np.minimum(np.searchsorted(mass.cumsum(), at), most).astype(np.int64)


def threshold_of(rates: PrefillRates, top_k: int, num_experts: int, num_held: int = 0) -> int:
    """Return the fewest rows of a step from which copying some experts is worth it; NEVER when it never is.

    num_held: experts of a layer that the GPU holds, with as many rows as others have: copying is compared with the CPU
    computing what the GPU does not hold.
    """
    threshold = NEVER
    held = np.linspace(0, num_experts - 1, num_held).astype(np.int64).tolist()  # of the counts, which are in order
    for num_tokens in reversed(_SIZES):
        counts = even_counts(num_tokens, top_k, num_experts)
        alone = _without_copies(counts, rates, 0.0, held).seconds
        if choose_split(counts, rates, held=held).seconds + STEP_COST > (1.0 - _MIN_GAIN) * alone:
            break
        threshold = num_tokens
    return threshold
