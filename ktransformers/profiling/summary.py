"""The numbers in a profile: distributions, time and bytes by part, the slowest steps and why.

One pass over steps.jsonl and one over its experts; no more is held than some numbers per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktransformers.profiling.records import PARTS
from ktransformers.profiling.tables import Profile

__all__ = ["ExpertUse", "Quantiles", "SlowStep", "StepSums", "expert_use", "latencies", "slow_steps", "step_sums"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COLD_STEPS = 256
"""An expert that no row chose in as many steps is cold: its bytes have left the caches of the processor."""

_GROUP = 8  # steps of one size, for a median of their own


@dataclass(frozen=True)
class Quantiles:
    """The quantiles and the mean of `count` values. NaN where there are none."""

    count: int
    p50: float
    p90: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: Floats) -> Quantiles:
        """Return the quantiles of some values, of which NaN is left out."""
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(0, np.nan, np.nan, np.nan, np.nan)
        p50, p90, p99 = np.percentile(known, [50, 90, 99])
        return cls(len(known), float(p50), float(p90), float(p99), float(known.mean()))


@dataclass(frozen=True)
class StepSums:
    """The figures of all steps: those with rows of prompts ("prefill") and those without ("decode"), see is_prefill."""

    step: Ints
    t: Floats
    ms: Floats
    rows: Ints
    prefill_rows: Ints
    seqs: Ints
    waiting: Floats
    parts_us: Floats
    """[steps, parts]: what each part adds to the step's time; adds up to ms."""
    busy_us: Floats
    """[steps, parts]: how long each part computed, beside others too; at least parts_us."""
    nbytes: Floats
    """[steps, parts]: weights and cache that were read."""
    layers_us: dict[str, Floats]
    """By kind of step, [parts, layers]: the mean of its steps."""

    @property
    def is_prefill(self) -> npt.NDArray[np.bool_]:
        """Whether each step has rows of prompts, bool [steps]."""
        return self.prefill_rows > 0

    def of_kind(self, kind: str) -> npt.NDArray[np.bool_]:
        """Return which steps are "prefill" or "decode", bool [steps]."""
        return self.is_prefill if kind == "prefill" else ~self.is_prefill

    def gbps(self, kind: str) -> Floats:
        """Return [parts]: bytes read over the time of computing, 1e9 bytes/s; NaN where a part read nothing."""
        chosen = self.of_kind(kind)
        nbytes, micros = self.nbytes[chosen].sum(axis=0), self.busy_us[chosen].sum(axis=0)
        rates = np.full(len(PARTS), np.nan)
        known = (nbytes > 0) & (micros > 0)
        rates[known] = nbytes[known] / micros[known] / 1e3
        return rates


def step_sums(profile: Profile) -> StepSums:
    """Sum up a profile's steps; reads steps.jsonl once."""
    names = ("step", "t", "ms", "rows", "prefill_rows", "seqs", "waiting", "parts_us", "bytes")
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*names, "busy_us")}
    num_layers = profile.meta.model.num_layers
    layers = {kind: np.zeros((len(PARTS), num_layers)) for kind in ("decode", "prefill")}
    for batch in profile.steps.batches(*names, "layers_us"):
        for name in names:
            found[name].append(batch[name])
        by_layer = batch["layers_us"]
        found["busy_us"].append(np.maximum(batch["parts_us"], by_layer.sum(axis=2)))
        is_prefill = batch["prefill_rows"] > 0
        layers["prefill"] += by_layer[is_prefill].sum(axis=0)
        layers["decode"] += by_layer[~is_prefill].sum(axis=0)
    empty = {"parts_us": (0, len(PARTS)), "bytes": (0, len(PARTS)), "busy_us": (0, len(PARTS))}
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.concatenate(batches) if batches else np.zeros(empty.get(name, 0)) for name, batches in found.items()
    }
    num_prefill = int((columns["prefill_rows"] > 0).sum())
    counts = {"prefill": num_prefill, "decode": len(columns["step"]) - num_prefill}
    means = {kind: total / max(1, counts[kind]) for kind, total in layers.items()}
    return StepSums(nbytes=columns.pop("bytes"), layers_us=means, **columns)


def latencies(profile: Profile) -> dict[str, Floats]:
    """Return milliseconds: "ttft" from a request's arrival to its first token, "itl" from each token to the next."""
    columns = profile.tokens.read("index", "ms")
    is_first = columns["index"] == 0
    return {"ttft": columns["ms"][is_first], "itl": columns["ms"][~is_first]}


@dataclass(frozen=True)
class ExpertUse:
    """The use of experts in a profile. rows: of all steps, exact, [layers, experts].

    touched, cold: experts per step, by step.
    """

    rows: Ints
    touched: dict[int, int]
    cold: dict[int, int]


def expert_use(profile: Profile) -> ExpertUse:
    """Sum up the use of experts; reads the experts of steps.jsonl once. Ids beyond meta.json's model are left out."""
    model = profile.meta.model
    rows = np.zeros((model.num_layers, model.num_experts), np.int64)
    last = np.full(rows.size, -(COLD_STEPS + 1), np.int64)  # cold before the first step
    use = ExpertUse(rows, {}, {})
    for batch in profile.experts.batches("step", "layer", "expert", "rows"):
        known = (batch["layer"] < model.num_layers) & (batch["expert"] < model.num_experts)
        step, key = batch["step"][known], batch["layer"][known].astype(np.int64) * model.num_experts
        key += batch["expert"][known]
        rows += np.bincount(key, batch["rows"][known], minlength=rows.size).astype(np.int64).reshape(rows.shape)
        numbers, at = np.unique(step, return_inverse=True)
        order = np.argsort(key.astype(np.min_scalar_type(rows.size)), kind="stable")  # a radix sort while it is small
        step, key, at = step[order], key[order], at[order]
        is_first = np.diff(key, prepend=-1) != 0
        before = np.where(is_first, last[key], np.roll(step, 1))
        last[key] = step  # ordered by step within a key: the last one stays
        for counts, which in ((use.touched, at), (use.cold, at[step - before > COLD_STEPS])):
            found = np.bincount(which, minlength=len(numbers)).tolist()
            for number, count in zip(numbers.tolist(), found, strict=True):
                counts[number] = counts.get(number, 0) + count
    return use


@dataclass(frozen=True)
class SlowStep:
    """A step that took longer than others of its size. excess_ms: beyond their median; part: which one most of it."""

    step: int
    t: float
    ms: float
    usual_ms: float
    rows: int
    prefill_rows: int
    part: str
    part_excess_ms: float
    why: tuple[str, ...]

    @property
    def excess_ms(self) -> float:
        """The step's time beyond the usual, in milliseconds."""
        return self.ms - self.usual_ms


def slow_steps(profile: Profile, sums: StepSums, use: ExpertUse, most: int = 12) -> list[SlowStep]:
    """Return the steps with the greatest excess over the median of steps of the same kind and size, greatest first."""
    usual_ms, usual_us = _usual(sums)
    excess = sums.ms - usual_ms
    slow = []
    for at in np.argsort(-excess, kind="stable")[:most]:
        if excess[at] <= 0:
            break
        beyond = sums.parts_us[at] - usual_us[at]
        part = int(np.argmax(beyond))
        slow.append(
            SlowStep(
                step=int(sums.step[at]),
                t=float(sums.t[at]),
                ms=float(sums.ms[at]),
                usual_ms=float(usual_ms[at]),
                rows=int(sums.rows[at]),
                prefill_rows=int(sums.prefill_rows[at]),
                part=PARTS[part],
                part_excess_ms=float(beyond[part]) / 1e3,
                why=tuple(_reasons(profile, sums, use, int(at), part)),
            )
        )
    return slow


def _usual(sums: StepSums) -> tuple[Floats, Floats]:
    """Median ms [steps] and parts_us [steps, parts] of steps of the same kind, and rows where enough have them."""
    usual_ms, usual_us = np.zeros(len(sums.ms)), np.zeros(sums.parts_us.shape)
    for kind in ("decode", "prefill"):
        chosen = np.flatnonzero(sums.of_kind(kind))
        if not len(chosen):
            continue
        usual_ms[chosen], usual_us[chosen] = np.median(sums.ms[chosen]), np.median(sums.parts_us[chosen], axis=0)
        sizes, counts = np.unique(sums.rows[chosen], return_counts=True)
        for size in sizes[counts >= _GROUP]:
            same = chosen[sums.rows[chosen] == size]
            usual_ms[same], usual_us[same] = np.median(sums.ms[same]), np.median(sums.parts_us[same], axis=0)
    return usual_ms, usual_us


def _reasons(profile: Profile, sums: StepSums, use: ExpertUse, at: int, part: int) -> list[str]:
    """What else was different in that step."""
    step, why = int(sums.step[at]), []
    decoding = int(sums.rows[at] - sums.prefill_rows[at])
    if sums.prefill_rows[at] and decoding > 0:
        why.append(f"{sums.prefill_rows[at]} rows of prompts beside {decoding} decoding")
    if PARTS[part] in ("experts", "wait_cpu"):
        same = np.flatnonzero(sums.of_kind("prefill" if sums.prefill_rows[at] else "decode"))
        for counts, what in ((use.touched, "experts touched"), (use.cold, f"unused for {COLD_STEPS} steps")):
            others = float(np.median([counts.get(int(other), 0) for other in sums.step[same]]))
            if counts.get(step, 0) > max(1.2 * others, others + 2):
                why.append(f"{counts[step]} {what}, others {others:.0f}")
    if PARTS[part] == "host":
        why.append("Python, torch or the system between the operations")
    preempted = _preempted(profile, float(sums.t[at]))
    if preempted:
        why.append(f"{preempted} of the requests under way were preempted")
    return why


def _preempted(profile: Profile, t: float) -> int:
    requests = profile.requests.read("arrived", "ended", "preemptions")
    is_there = ~(requests["arrived"] > t) & ~(requests["ended"] < t)  # NaN: before the profile, or still there
    return int((is_there & (requests["preemptions"] > 0)).sum())
