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
        self._line: list[float] | None = None

    def add(self, rows: int, seconds: float) -> None:
        """Note what a step of `rows` rows took."""
        self._num_steps += 1
        if not 0 < rows <= self._most or seconds <= 0:
            return
        self._times.setdefault(rows, deque(maxlen=_KEPT)).append(seconds)
        self._last[rows] = self._num_steps
        for size in [size for size, last in self._last.items() if self._num_steps - last > _LIFETIME]:
            del self._times[size], self._last[size]
        self._line = None

    def knows(self, rows: int) -> bool:
        """Whether steps of so many rows were timed of late."""
        return rows in self._times

    @property
    def most_rows(self) -> int:
        """The largest size that `seconds` says anything of: twice what was timed of late."""
        return min(2 * max(self._times, default=0), self._most)

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step of 1 .. most_rows rows, as far as they can be told."""
        line = self._line = self._line or self._drawn()
        return line[rows]

    def _drawn(self) -> list[float]:
        """By rows, from 0 to most_rows; never less than for fewer rows."""
        known = {rows: median(times) for rows, times in sorted(self._times.items())}
        first = next(iter(known))
        line, slope = [known[first]] * (first + 1), _FIRST_SLOPE * known[first] / first
        for rows in sorted(known)[1:]:
            before = len(line) - 1
            slope = max(known[rows] - line[-1], 0.0) / (rows - before)
            line += [line[-1] + slope * i for i in range(1, rows - before + 1)]
        last = len(line) - 1
        return line + [line[last] + _LATER_SLOPE * slope * i for i in range(1, self.most_rows - last + 1)]
