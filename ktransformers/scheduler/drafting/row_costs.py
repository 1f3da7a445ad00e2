"""Learns what steps of decodes take by their rows, drafted ones among them. Reads no clock.

Between sizes that were timed of late, steps take what lies on the line through both. Beyond the largest a row is taken
to cost a little less than the last one did: sizes up to twice as large are tried where that would pay, once, and known
from then on.
"""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["RowCosts"]

_KEPT = 7
"""Times of a size that count: their median does."""

_REFRESH = 8
"""Steps after which more times of a size count that has enough of them."""

_LIFETIME = 1024
"""Steps after which the times of a size are forgotten: contexts grow, loads change."""

_FIRST_SLOPE, _LATER_SLOPE = 0.1, 0.9
"""What a row more is assumed to add: of what a row takes, where nothing larger is known; of what the last one did."""


class RowCosts:
    """The seconds of steps by their rows, 1 .. most_rows; larger steps are not kept."""

    def __init__(self, most_rows: int) -> None:
        self._times: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}  # the step in which a size was last timed
        self._most, self._num_steps = most_rows, 0
        self._line: list[float] = []  # by rows, as far as it is told
        self._least: dict[tuple[int, float], float] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Note what a step of `rows` rows took."""
        self._num_steps += 1
        if not 0 < rows <= self._most or seconds <= 0:
            return
        times = self._times.get(rows)
        if times is None:
            times = self._times[rows] = deque(maxlen=_KEPT)
        times.append(seconds)
        self._last[rows] = self._num_steps
        if len(times) < _KEPT or self._num_steps % _REFRESH == 0:
            for size in [size for size, last in self._last.items() if self._num_steps - last > _LIFETIME]:
                del self._times[size], self._last[size]
            self._line, self._least = self._drawn(), {}

    def knows(self, rows: int) -> bool:
        """Whether steps of so many rows were timed of late."""
        return rows in self._times

    @property
    def most_rows(self) -> int:
        """The largest size that `seconds` says anything of: twice what was timed of late."""
        return len(self._line) - 1 if self._line else 0

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step of 1 .. most_rows rows, as far as they can be told."""
        return self._line[rows]

    def least_chance(self, rows: int, margin: float) -> float:
        """Return the chance that a draft token must have for any to pay beside so many rows, of which `knows` is true:
        tokens then come `margin` times as fast. It is the same for all calls, and as cheap as it can be."""
        least = self._least.get((rows, margin))
        if least is None:
            alone = self._line[rows]
            more = enumerate(self._line[rows + 1 :], 1)
            least = min(((margin * seconds / alone - 1.0) * rows / num for num, seconds in more), default=2.0)
            self._least[rows, margin] = least
        return least

    def _drawn(self) -> list[float]:
        """By rows, from 0 on; never less than for fewer rows."""
        known = {rows: median(times) for rows, times in sorted(self._times.items())}
        first = next(iter(known))
        line, slope = [known[first]] * (first + 1), _FIRST_SLOPE * known[first] / first
        for rows in sorted(known)[1:]:
            before = len(line) - 1
            slope = max(known[rows] - line[-1], 0.0) / (rows - before)
            line += [line[-1] + slope * i for i in range(1, rows - before + 1)]
        last = len(line) - 1
        more = min(2 * last, self._most) - last
        return line + [line[last] + _LATER_SLOPE * slope * i for i in range(1, more + 1)]
