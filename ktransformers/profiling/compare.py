"""Two profiles side by side: medians, their ratio, and how sure it is.

The interval of a ratio is a bootstrap's (Efron, 1979) of both medians: 95 of 100 such runs would lie in it, if values
were independent. Neighbouring steps are not quite, so an interval is rather too narrow. The median of a resample is an
order statistic whose rank has a beta distribution, so no resample is ever drawn, and a million values cost a sort.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktransformers.profiling.records import PARTS
from ktransformers.profiling.summary import StepSums, latencies, step_sums
from ktransformers.profiling.tables import Profile

__all__ = ["ComparedFigure", "Comparison", "compare", "differences", "median_ratio"]

Floats = npt.NDArray[np.float64]

_RESAMPLES = 4000
_LEAST = 5  # values, for an interval


@dataclass(frozen=True)
class ComparedFigure:
    """Figures of two profiles. ratio: of medians, b over a; low, high: its 95 % interval. NaN where it is not known."""

    name: str
    unit: str
    a: float
    b: float
    count_a: int
    count_b: int
    ratio: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes that nothing changed."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Comparison:
    """The figures of two profiles side by side. differences: why they may not be comparable."""

    differences: tuple[str, ...]
    rows: tuple[ComparedFigure, ...]


def compare(a: Profile, b: Profile) -> Comparison:
    """Compare two profiles, from the steps and tokens of both."""
    found_a, found_b = _figures(a), _figures(b)
    rng = np.random.default_rng(0)
    rows = []
    for name, unit in found_a:
        values_a, values_b = found_a[name, unit], found_b[name, unit]
        if len(values_a) or len(values_b):
            ratio = median_ratio(values_a, values_b, rng)
            medians = (_median(values_a), _median(values_b))
            rows.append(ComparedFigure(name, unit, *medians, len(values_a), len(values_b), *ratio))
    return Comparison(differences(a, b), tuple(rows))


def differences(a: Profile, b: Profile) -> tuple[str, ...]:
    """Return what is not the same in both runs, one sentence each."""
    pairs = [
        ("models", a.meta.model.name, b.meta.model.name),
        ("shapes of models", _shape(a), _shape(b)),
        ("types of weights", str(a.meta.model.types), str(b.meta.model.types)),
        ("processors", a.meta.machine.cpu, b.meta.machine.cpu),
        ("threads", str(a.meta.machine.num_threads), str(b.meta.machine.num_threads)),
        ("instruction sets", a.meta.machine.isa, b.meta.machine.isa),
        ("GPUs", *(", ".join(gpu.name for gpu in one.meta.machine.gpus) or "none" for one in (a, b))),
        ("backends", a.meta.backend, b.meta.backend),
        ("versions", a.meta.version, b.meta.version),
        ("experts on GPUs", *(str(sum(one.meta.experts_on_gpu)) for one in (a, b))),
    ]
    return tuple(
        f"{what} differ: {left or 'unknown'} and {right or 'unknown'}" for what, left, right in pairs if left != right
    )


def _shape(profile: Profile) -> str:
    model = profile.meta.model
    return f"{model.num_layers} layers, {model.num_experts} experts, {model.top_k} per token"


def median_ratio(a: Floats, b: Floats, rng: np.random.Generator) -> tuple[float, float, float]:
    """Return the ratio of medians, b over a, and the ends of its 95 % interval; NaN where it is not known."""
    if not len(a) or not len(b) or _median(a) == 0:
        return math.nan, math.nan, math.nan
    ratio = _median(b) / _median(a)
    if min(len(a), len(b)) < _LEAST:
        return ratio, math.nan, math.nan
    below, above = _medians(a, rng), _medians(b, rng)
    known = below != 0
    low, high = np.percentile(above[known] / below[known], [2.5, 97.5])
    return ratio, float(low), float(high)


def _medians(values: Floats, rng: np.random.Generator) -> Floats:
    """Medians of resamples (the lower of the two middle values)."""
    middle = (len(values) + 1) // 2
    ranks = rng.beta(middle, len(values) - middle + 1, _RESAMPLES) * len(values)
    return np.sort(values)[np.minimum(ranks.astype(np.int64), len(values) - 1)]


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _figures(profile: Profile) -> dict[tuple[str, str], Floats]:
    """Values by (name, unit), in the order in which they are shown. NaN is left out."""
    found = {("time to first token", "ms"): latencies(profile)["ttft"]}
    found["token to token", "ms"] = latencies(profile)["itl"]
    sums = step_sums(profile)
    for kind in ("decode", "prefill"):
        chosen = sums.of_kind(kind)
        found[f"{kind} step", "ms"] = sums.ms[chosen]
        found[f"{kind} rows per step", "rows"] = sums.rows[chosen].astype(np.float64)
        for index, part in enumerate(PARTS):
            micros = sums.parts_us[chosen, index]
            found[f"{kind}: {part}", "us"] = micros if micros.any() else micros[:0]
        found[f"{kind}: experts read", "GB/s"] = _rates(sums, chosen, PARTS.index("experts"))
    return {key: values[~np.isnan(values)] for key, values in found.items()}


def _rates(sums: StepSums, chosen: npt.NDArray[np.bool_], part: int) -> Floats:
    nbytes, micros = sums.nbytes[chosen, part], sums.busy_us[chosen, part]
    known = (nbytes > 0) & (micros > 0)
    return np.asarray(nbytes[known] / micros[known] / 1e3)
