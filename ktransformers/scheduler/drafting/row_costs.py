"""Learns what steps of decodes take by their rows, plain ones and those with draft tokens. Reads no clock.

A step is plain where nobody looked for draft tokens: those are what drafts have to pay for. Sizes are as in
step_times.py, half powers of two, and are timed apart for both kinds. Of the last few times of each the second least
counts: what else the machine does only ever adds to them, and a median of a busy moment would make draft tokens look
cheap until plain steps are run again. So they are, now and then. Between sizes that were timed of late, steps take
what lies on the line through both. Beyond the largest a row is taken to cost a little less than the last one did: sizes
up to twice as large are tried where that would pay, a few times, and known from then on.

Where steps are planned ahead, those with draft tokens are not: what they draw has to be known before the next step is
planned, and so has what is drawn before they are planned. Meanwhile nothing is computed:

    planned ahead      | step | step | step |
    with draft tokens  | step | -- | drafted | -- | step | step |

How long that is, `wait`, is learnt from plain steps that begin behind one. It is no part of what rows take, and is
added to what draft tokens do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from statistics import median
from typing import TypeAlias

from ktransformers.scheduler.step_times import pooled, size_of

__all__ = ["DraftCost", "RowCosts"]

_KEPT = 7
"""Times of a size that count."""

_TRIES = 4
"""Steps with draft tokens of a size of whose times the least is the first that counts: where such steps are rare they
find nothing in caches, and what seems slow is not tried again for long."""

_REFRESH = 16
"""Of a size with draft tokens that has enough times, the steps after which another one counts."""

_NEARLY = 0.02
"""The share by which what a size takes has to change before the line is drawn anew, which takes as long as planning
several steps."""

_LIFETIME, _WAIT_LIFETIME = 1024, 256
"""Steps after which the times of a size are forgotten, or what waiting took: contexts grow, loads change. What a bad
moment made look slow is tried again then, and waits come with draft tokens only."""

_NUM_WAITS = 15
"""Times of waiting that count."""

_LEAST_SHARE = 0.1
"""Of a step that waited, the share that is its own at least: waits were learnt of steps of other sizes, too."""

_STALE = 64
"""Steps after which plain ones have to be timed again, to be compared with."""

_FIRST_SLOPE, _LATER_SLOPE = 0.1, 0.9
"""What a row more is assumed to add: of what a row takes, where nothing larger is known; of what the last one did."""


_Size: TypeAlias = tuple[int, bool]
"""The size of a step by its rows, and whether it had draft tokens."""

_Time: TypeAlias = tuple[int, float, bool]
"""Rows of a step, its seconds, and whether it waited."""


class DraftCost:
    """The seconds that the engine takes to find one more token of a step's drafts; 0 where it finds none, or nobody
    knows yet.

    Behind steps without drafts it first runs what has waited meanwhile, a prompt's end say. What that takes is no part
    of what one more token does, which it only says the most of.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)
        self.seconds = 0.0

    def add(self, depth: int, seconds: float, *, is_behind: bool = False) -> None:
        """Note what finding a step's drafts took, of which the longest has `depth` tokens. is_behind: the step before
        it had none."""
        if is_behind and seconds / depth >= self.seconds:
            return
        self._times.append(seconds / depth)
        self.seconds = median(self._times)


class RowCosts:
    """The seconds of steps by their rows, 1 .. most_rows; larger steps are not kept. wait: the seconds by which the
    step behind one with draft tokens begins later than another one."""

    def __init__(self, most_rows: int) -> None:
        self._times: dict[_Size, deque[_Time]] = {}
        self._tries: dict[_Size, list[_Time]] = {}  # of sizes with draft tokens that are not known yet
        self._waits: deque[float] = deque(maxlen=_NUM_WAITS)
        self._plans_ahead, self.wait, self._waited_in = False, 0.0, 0
        self._last: dict[_Size, int] = {}  # the step in which a size was last timed
        self._most, self._num_steps = most_rows, 0
        self._sizes = [0, *map(size_of, range(1, most_rows + 1))]  # by rows
        self._seconds: dict[_Size, float] = {}
        self._drawn: list[float] = []  # by rows, as far as it can be told
        self._is_due = False  # it is to be drawn anew before it is used
        self._losses: dict[int, list[float]] = {}

    def skip(self, num_steps: int) -> None:
        """Count steps that were not timed."""
        self._num_steps += num_steps

    def add(self, rows: int, seconds: float, *, is_ahead: bool = False, is_drafted: bool = False) -> None:
        """Note what a step of `rows` rows took, from the end of the one before it, without looking for draft tokens.

        is_ahead: it was planned while another one was in flight. is_drafted: it had draft tokens; else it was plain.
        """
        self._num_steps += 1
        if not 0 < rows <= self._most or seconds <= 0:
            return
        self._plans_ahead |= is_ahead
        size, has_waited = (self._sizes[rows], is_drafted), self._plans_ahead and not is_ahead
        if has_waited and not is_drafted:
            self._add_wait(size, seconds)
            return
        times, time = self._times.get(size), (rows, seconds, has_waited)
        if times is None:
            if is_drafted:
                tries = self._tries.setdefault(size, [])
                tries.append(time)
                if len(tries) < _TRIES:
                    return
                time = min(self._tries.pop(size), key=itemgetter(1))
            times = self._times[size] = deque(maxlen=_KEPT)
        times.append(time)
        self._last[size] = self._num_steps
        if not is_drafted or len(times) < _KEPT or self._num_steps % _REFRESH == 0:
            self._is_due |= self._is_other(size, times) or self._num_steps % _WAIT_LIFETIME < _REFRESH

    def _is_other(self, size: _Size, times: deque[_Time]) -> bool:
        """Whether what a size takes is no longer what the line was drawn with."""
        drawn = self._seconds.get(size, 0.0)
        return abs(self._usual(times) - drawn) > _NEARLY * drawn

    @property
    def _line(self) -> list[float]:
        """Seconds by rows, of the times that are not too old."""
        if self._is_due:
            for old in [size for size, last in self._last.items() if self._num_steps - last > _LIFETIME]:
                del self._times[old], self._last[old]
            if self._num_steps - self._waited_in > _WAIT_LIFETIME:
                self._waits.clear()
                self.wait = 0.0
            self._drawn, self._is_due = self._redrawn(), False
            self._losses = {}
        return self._drawn

    def _add_wait(self, size: _Size, seconds: float) -> None:
        """Of a plain step that began behind a wait: how much longer it took than those of its size."""
        alone = self._seconds.get(size) if self._line else None
        if alone is not None:
            self._waits.append(seconds - alone)
            self._waited_in = self._num_steps
            self.wait = max(median(self._waits), 0.0)
            self._losses = {}

    def knows(self, rows: int) -> bool:
        """Whether plain steps of about so many rows were timed of late."""
        return rows > 0 and rows < len(self._line) and (self._sizes[rows], False) in self._times

    def is_stale(self, rows: int) -> bool:
        """Whether plain steps of about so many rows, of which `knows` is true, are to be timed again before others are
        compared with them."""
        return self._num_steps - self._last[self._sizes[rows], False] > _STALE

    @property
    def most_rows(self) -> int:
        """The largest size that `seconds` says anything of: twice what was timed of late."""
        return max(len(self._line) - 1, 0)

    def seconds(self, rows: int, more: int = 0) -> float:
        """Return the seconds of a step of `rows` rows and `more` draft tokens, up to most_rows together, as far as they
        can be told; `knows` is true of `rows`. What other sizes took says what more rows add, not what these take:
        loads change meanwhile."""
        line = self._line
        alone = self._seconds.get((self._sizes[rows], False), line[rows])
        return alone + line[rows + more] - line[rows] + (self.wait if more else 0.0)

    def losses(self, rows: int) -> list[float]:
        """Return what 0, 1, ... draft tokens beside so many rows, of which `knows` is true, lose as far as that can be
        told: `rows` times the logarithm of how many times as long the step takes. Kept until times are added."""
        line, found = self._line, self._losses.get(rows)
        if found is None:
            alone, here, ends = self.seconds(rows), line[rows], line[rows + 1 :]
            found = [rows * math.log1p((end - here + self.wait) / alone) for end in ends]
            found = self._losses[rows] = [0.0, *found]
        return found

    def _usual(self, times: Iterable[_Time]) -> float:
        """The second least of the times of a size, without waiting; the least of two."""
        wait, least = self.wait, _LEAST_SHARE
        own = [max(seconds - wait, least * seconds) if has_waited else seconds for _, seconds, has_waited in times]
        return sorted(own)[1 if len(own) > 2 else 0]

    def _redrawn(self) -> list[float]:
        """By rows, from 0 on; never less than for fewer rows."""
        self._seconds = {size: self._usual(times) for size, times in self._times.items()}
        knots = sorted(
            (sum(rows for rows, *_ in times) / len(times), self._seconds[size], len(times))
            for size, times in self._times.items()
        )
        known = pooled(knots)
        (before, alone), (largest, _) = known[0], known[-1]
        line, slope, at = [alone], _FIRST_SLOPE * alone / before, 0
        for rows in range(1, min(round(2 * largest), self._most) + 1):
            while at + 1 < len(known) and known[at + 1][0] < rows:
                at += 1
            (x, y), inside = known[at], at + 1 < len(known)
            if inside and rows > x:
                slope = (known[at + 1][1] - y) / (known[at + 1][0] - x)
            line.append(y + max(rows - x, 0.0) * (slope if inside else _LATER_SLOPE * slope))
        return line
