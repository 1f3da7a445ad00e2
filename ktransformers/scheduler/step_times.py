"""Learns how long steps take by their rows, from those that were run. Pure: it reads no clock.

    seconds(n decodes, p rows of prompts) = alone(n) + more(p)

Steps without decodes tell `more` of sizes that no step beside decodes has had: they take all of alone(1) less at most.
Both are curves that never fall. A curve keeps the last few times of each size, by powers of the square root of two; the
median of a size counts, so that one slow step among them does not, and sizes that contradict each other are pooled.
What `more` says outside of the sizes it has seen is the line from nothing through the nearest of them. A row costs less
the more there are, since they share weights: beyond the largest size that is too much, below the smallest too little.
So larger sizes are not tried in vain, smaller ones are, and what it learns then takes the line's place.

Times of long ago are forgotten, those of a size that was hardly ever tried sooner: contexts grow, loads change, and a
size that was slow once would never be tried again.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from statistics import median

__all__ = ["StepTimes", "pooled", "size_of"]

_KEPT = 9
"""Times of a size that count."""

_TRUSTED = 3
"""From so many times on the median is not moved by one slow step."""

_LIFETIME, _SHORT_LIFETIME = 512, 128
"""Steps for which times of a size count, and where there are fewer than _TRUSTED of them."""


def size_of(rows: int) -> int:
    """Return the size that so many rows count as: half a power of two."""
    return round(2 * math.log2(rows))


def pooled(knots: Iterable[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Return (rows, seconds) that do not fall, the nearest by least squares. knots: rows, seconds, how often; by
    rows."""
    pools: list[tuple[float, int, list[float]]] = []  # seconds, weight, rows of each
    for rows, seconds, count in knots:
        at = [rows]
        while pools and pools[-1][0] > seconds:
            other, weight, before = pools.pop()
            seconds = (seconds * count + other * weight) / (count + weight)
            count, at = count + weight, before + at
        pools.append((seconds, count, at))
    return [(rows, seconds) for seconds, _, at in pools for rows in at]


class _Line:
    """Seconds by rows, through knots that do not fall."""

    def __init__(self, knots: list[tuple[float, float]]) -> None:
        self._knots = knots

    @property
    def ends(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Rows and seconds of the smallest size and of the largest."""
        return (self._knots[0], self._knots[-1]) if self._knots else None

    def at(self, rows: int) -> float | None:
        """Seconds of `rows` rows: between sizes on the line through both, outside as the nearest of them; None where
        nothing is known."""
        if not self._knots:
            return None
        after = bisect.bisect_left(self._knots, (float(rows), 0.0))
        if after in (0, len(self._knots)):
            return self._knots[min(after, len(self._knots) - 1)][1]
        (x0, y0), (x1, y1) = self._knots[after - 1 : after + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


class _Times:
    """The last few times of each size. medians: by size: rows, seconds, how often."""

    def __init__(self) -> None:
        self._sizes: dict[int, deque[tuple[int, int, float]]] = {}  # (step, rows, seconds)
        self.medians: dict[int, tuple[float, float, int]] = {}

    def add(self, step: int, rows: int, seconds: float) -> None:
        """Note that a step of `rows` rows took `seconds`. step: counts up."""
        self._sizes.setdefault(size_of(rows), deque(maxlen=_KEPT)).append((step, rows, seconds))
        for size, times in list(self._sizes.items()):
            lifetime = _LIFETIME if len(times) >= _TRUSTED else _SHORT_LIFETIME
            while times and step - times[0][0] >= lifetime:
                times.popleft()
            if not times:
                del self._sizes[size]
        self.medians = {
            size: (sum(rows for _, rows, _ in times) / len(times), median(t for *_, t in times), len(times))
            for size, times in self._sizes.items()
        }

    def knows(self, rows: int) -> bool:
        """Whether steps of about so many rows were timed of late."""
        return rows > 0 and size_of(rows) in self._sizes


def _line(medians: dict[int, tuple[float, float, int]]) -> _Line:
    return _Line(pooled(medians[size] for size in sorted(medians)))


class StepTimes:
    """The seconds that steps take by their rows, learnt from those that were run. Rows are counted from 1."""

    def __init__(self) -> None:
        self._alone_times, self._more_times, self._prompt_times = _Times(), _Times(), _Times()
        self._alone, self._more = _line({}), _line({})
        self._num_alone = self._num_mixed = self._num_prompts = 0

    def add(self, decodes: int, prefill_rows: int, seconds: float) -> None:
        """Note how long a step took. A mixed one before any of decodes alone says nothing yet."""
        if not prefill_rows:
            self._num_alone += 1
            self._alone_times.add(self._num_alone, decodes, seconds)
            self._alone = _line(self._alone_times.medians)
            return
        alone = self._alone.at(decodes) if decodes else None
        if not decodes:
            self._num_prompts += 1
            self._prompt_times.add(self._num_prompts, prefill_rows, seconds)
        elif alone is not None:
            self._num_mixed += 1
            self._more_times.add(self._num_mixed, prefill_rows, max(seconds - alone, 0.0))
        self._more = _line(self._prompt_medians() | self._more_times.medians)

    def _prompt_medians(self) -> dict[int, tuple[float, float, int]]:
        """Of prompts alone, as if beside a decode."""
        alone = self._alone.at(1) or 0.0
        known = self._prompt_times.medians
        return {size: (rows, max(seconds - alone, 0.0), count) for size, (rows, seconds, count) in known.items()}

    def knows(self, decodes: int) -> bool:
        """Whether steps of about so many decodes, alone, were timed of late."""
        return self._alone_times.knows(decodes)

    def knows_more(self, prefill_rows: int) -> bool:
        """Whether steps with about so many rows of prompts were timed of late."""
        return self._more_times.knows(prefill_rows) or self._prompt_times.knows(prefill_rows)

    @property
    def largest(self) -> int | None:
        """The most rows of prompts that were timed of late."""
        ends = self._more.ends
        return None if ends is None else round(ends[1][0])

    def alone(self, decodes: int) -> float | None:
        """Return the seconds of a step of so many decodes; None before any was timed."""
        return self._alone.at(decodes)

    def more(self, prefill_rows: int) -> float | None:
        """Return the seconds that prefill_rows rows of prompts add to a step; None where that cannot be told: nothing
        was timed, or nothing of at least half as many rows."""
        ends = self._more.ends
        if ends is None or prefill_rows > 2 * ends[1][0] + 1:
            return None
        for rows, seconds, is_outside in ((*ends[0], prefill_rows < ends[0][0]), (*ends[1], prefill_rows > ends[1][0])):
            if is_outside:
                return seconds * prefill_rows / rows
        return self._more.at(prefill_rows)
