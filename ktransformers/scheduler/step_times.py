"""How long steps take by their rows, learnt from those that were run. Pure: nobody asks a clock here.

    seconds(n decodes, p rows of prompts) = alone(n) + more(p)

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

__all__ = ["StepTimes"]

_KEPT = 9
"""Times of a size that count."""

_TRUSTED = 3
"""From so many times on the median is not moved by one slow step."""

_LIFETIME, _SHORT_LIFETIME = 512, 128
"""Steps for which times of a size count, and where there are fewer than _TRUSTED of them."""


def _size_of(rows: int) -> int:
    return round(2 * math.log2(rows))


def _pooled(knots: Iterable[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """(rows, seconds) that do not fall, the nearest by least squares. knots: rows, seconds, how often; by rows."""
    pools: list[tuple[float, int, list[float]]] = []  # seconds, weight, rows of each
    for rows, seconds, count in knots:
        at = [rows]
        while pools and pools[-1][0] > seconds:
            other, weight, before = pools.pop()
            seconds = (seconds * count + other * weight) / (count + weight)
            count, at = count + weight, before + at
        pools.append((seconds, count, at))
    return [(rows, seconds) for seconds, _, at in pools for rows in at]


class _Curve:
    """Seconds by rows, never falling."""

    def __init__(self) -> None:
        self._sizes: dict[int, deque[tuple[int, int, float]]] = {}  # (step, rows, seconds)
        self._knots: list[tuple[float, float]] = []

    def add(self, step: int, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. step: counts up."""
        self._sizes.setdefault(_size_of(rows), deque(maxlen=_KEPT)).append((step, rows, seconds))
        for size, times in list(self._sizes.items()):
            lifetime = _LIFETIME if len(times) >= _TRUSTED else _SHORT_LIFETIME
            while times and step - times[0][0] >= lifetime:
                times.popleft()
            if not times:
                del self._sizes[size]
        self._knots = _pooled(
            (sum(rows for _, rows, _ in times) / len(times), median(t for *_, t in times), len(times))
            for _, times in sorted(self._sizes.items())
        )

    def knows(self, rows: int) -> bool:
        """Whether steps of about so many rows were timed of late."""
        return _size_of(rows) in self._sizes

    @property
    def ends(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Rows and seconds of the smallest size and of the largest."""
        return (self._knots[0], self._knots[-1]) if self._knots else None

    def at(self, rows: int) -> float | None:
        """Between sizes on the line through both, outside as the nearest of them; None where nothing is known."""
        if not self._knots:
            return None
        after = bisect.bisect_left(self._knots, (float(rows), 0.0))
        if after in (0, len(self._knots)):
            return self._knots[min(after, len(self._knots) - 1)][1]
        (x0, y0), (x1, y1) = self._knots[after - 1 : after + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)


class StepTimes:
    """See the module's docstring. Rows are counted from 1."""

    def __init__(self) -> None:
        self._alone, self._more = _Curve(), _Curve()
        self._num_alone = self._num_mixed = 0

    def add(self, decodes: int, prefill_rows: int, seconds: float) -> None:
        """A step with at least one decode took so long. A mixed one before any of decodes alone says nothing yet."""
        if not prefill_rows:
            self._num_alone += 1
            self._alone.add(self._num_alone, decodes, seconds)
            return
        alone = self._alone.at(decodes)
        if alone is not None:
            self._num_mixed += 1
            self._more.add(self._num_mixed, prefill_rows, max(seconds - alone, 0.0))

    def knows(self, decodes: int) -> bool:
        """Whether steps of about so many decodes, alone, were timed of late."""
        return self._alone.knows(decodes)

    def knows_more(self, prefill_rows: int) -> bool:
        """Whether steps with about so many rows of prompts beside decodes were timed of late."""
        return self._more.knows(prefill_rows)

    def alone(self, decodes: int) -> float | None:
        """Seconds of a step of so many decodes; None before any was timed."""
        return self._alone.at(decodes)

    def more(self, prefill_rows: int) -> float | None:
        """Seconds that so many rows of prompts add to it; None where that cannot be told: nothing was timed, or nothing
        of at least half as many rows."""
        ends = self._more.ends
        if ends is None or prefill_rows > 2 * ends[1][0] + 1:
            return None
        for rows, seconds, is_outside in ((*ends[0], prefill_rows < ends[0][0]), (*ends[1], prefill_rows > ends[1][0])):
            if is_outside:
                return seconds * prefill_rows / rows
        return self._more.at(prefill_rows)
