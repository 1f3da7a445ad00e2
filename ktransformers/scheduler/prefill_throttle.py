"""Decides how many rows of prompts a step may carry beside decodes: prompts get a share of the time, not of each step.

With experts in RAM a step of 64 rows costs nearly what one of 2,000 costs, since both read all experts: rationed to a
few rows a step, the same bytes are read dozens of times. So a prompt is computed in chunks of the size whose rows are
cheap, as soon as streams can spare the time:

    chunk   the fewest rows whose rate is within WORTH of the best that ends in time (max_gap)
    goes    where prompts then have at most 1 - 1 / max_itl_ratio of the WINDOW seconds that end with it

A stream so has at least 1 / max_itl_ratio of its rate over any WINDOW seconds, and gaps of at most max_gap. Where small
chunks are as cheap as large ones, each step carries what max_itl_ratio allows, and gaps stay even. A short prompt goes
where a chunk would not fit. Steps without decodes are as long as chunk_size.

Times are those that steps took of late (scheduler/step_times.py). Sizes that were not timed are tried: LEAST_ROWS while
nothing is known, twice the largest while rows become cheaper. What decodes take alone must be known: where it is not,
and after REFRESH steps with prompts in a row, one step carries none.

Not known here: who the prompts are, and what time it is (callers say what steps took).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ktransformers.scheduler.step_times import StepTimes

__all__ = [
    "FEWEST_ROWS",
    "LEAST_ROWS",
    "REFRESH",
    "WINDOW",
    "WORTH",
    "PendingPrefill",
    "PrefillThrottle",
    "cheapest_rows",
]

LEAST_ROWS = 64
"""Of a step with decodes and prompts, together, while nothing is known; at least half of them are of prompts."""

FEWEST_ROWS = 7
"""Of prompts beside decodes, unless fewer are left: 8 less the one decode that there often is."""

_LARGE = 1024
"""Rows from which on sizes are not powers of two."""

REFRESH = 32
"""Steps with decodes and prompts in a row before one of decodes alone."""

_RETRY = 4
"""The same while steps of so many decodes were never timed alone: results come two steps later."""

WORTH = 1.1
"""Smaller chunks are worth rows that cost so many times the cheapest: gaps are shorter."""

_GAIN = 1.1
"""Four times the rows must make them so many times cheaper for more to be tried."""

WINDOW = 2.0
"""Seconds in which each stream has its share, where steps are not long."""

_SURE = 0.9
"""Of the longest gap, what a step may take by those before it: the next one may be slower."""

_GAP_IN_STEPS = 4
"""Steps of decodes alone that a gap may always last: where each takes a second, max_gap cannot be kept. The window is
twice as long at least."""


@dataclass(frozen=True, slots=True)
class PendingPrefill:
    """The prompts that wait for rows. rows: of all of them, None where that is not known yet. shortest: of the one with
    the fewest, if it may pass the others, else 0."""

    rows: int | None = None
    shortest: int = 0


def _totals(most: int) -> list[int]:
    """Rows of whole steps to choose among: 8, 12, 16, 24, ... 1024, since graphs are padded to some of them, and then
    1280, 1536, ..."""
    sizes = []
    size = FEWEST_ROWS + 1
    while size < _LARGE:
        sizes += [size, size + size // 2]
        size *= 2
    sizes += range(_LARGE, most + 1, _LARGE // 4)
    return [size for size in sizes if size <= most]


def _choices(decodes: int, most: int) -> list[int]:
    """Rows of prompts beside so many decodes, ascending; the last is `most`."""
    fewest = min(FEWEST_ROWS, most)
    sizes = {rows for total in _totals(most + decodes) if fewest <= (rows := total - decodes) < most}
    return sorted(sizes | {fewest, most})


def cheapest_rows(times: StepTimes, decodes: int, most: int, limit: float, share: float = math.inf) -> int | None:
    """Find the fewest rows of prompts, at most `most`, whose rate is within WORTH of the best that takes `limit`
    seconds.

    share: seconds of a window that prompts have; chunks of which a whole number does not fill it are paid as if it did.
    The fewest rows that there are where none keeps to the limit; None where nothing is known.
    """
    choices = _choices(decodes, most)
    costs = [(rows, seconds) for rows in choices if (seconds := times.more(rows)) is not None]
    if not costs:
        return None
    fitting = [(rows, _paid(seconds, share)) for rows, seconds in costs if seconds <= limit]
    if not fitting:
        return choices[0]
    best = max(rows / paid for rows, paid in fitting)
    found = min(rows for rows, paid in fitting if WORTH * rows / paid >= best)
    return max(found, _untried(times, choices, limit))


def _paid(seconds: float, share: float) -> float:
    """Seconds of its share that a chunk uses up."""
    seconds = max(seconds, 1e-9)
    count = share // seconds
    return share / count if 1 <= count < math.inf else seconds


def _untried(times: StepTimes, choices: list[int], limit: float) -> int:
    """Rows beyond all that were timed, up to twice as many, unless four times the rows made them no cheaper; else 0."""
    largest = times.largest
    if largest is None or largest >= choices[-1]:
        return 0
    here, quarter = times.more(largest), times.more(max(largest // 4, 1))
    if here is None or quarter is None or (times.knows_more(largest // 4) and 4 * quarter < _GAIN * here):
        return 0
    # Where rows share what is read, a curve is ever less steep: at most as steep as it was up to here.
    half = max(largest // 2, 1)
    slope = (here - (times.more(half) or 0.0)) / (largest - half) if largest > 1 else here
    longer = (rows for rows in choices if largest < rows <= 2 * largest)
    return max((rows for rows in longer if here + slope * (rows - largest) <= limit), default=0)


@dataclass(slots=True)
class _Ledger:
    """What prompts took of the time of streams. ratio: max_itl_ratio. window: seconds. now: those counted so far."""

    ratio: float
    window: float = WINDOW
    now: float = 0.0
    spent: deque[tuple[float, float]] = field(default_factory=deque)  # from, to: of prompts, within the window

    def add(self, alone: float, more: float) -> None:
        """Count a step whose decodes take `alone`, and its prompts `more` beside them."""
        self.now += alone
        if more > 0:
            self.spent.append((self.now, self.now + more))
            self.now += more
        while self.spent and self.spent[0][1] <= self.now - self.window:
            self.spent.popleft()

    def after(self, steps: deque[tuple[float, float]]) -> _Ledger:
        """Return the ledger as it will be behind the steps in flight."""
        ledger = _Ledger(self.ratio, self.window, self.now, self.spent.copy())
        for alone, more in steps:
            ledger.add(alone, more)
        return ledger

    def allows(self, alone: float, more: float) -> bool:
        """Whether prompts keep to their share of the window that ends with such a step, but for less than a token of
        the streams, whose steps are whole. One alone always does."""
        begin = self.now + alone + more - self.window
        spent = sum(min(end - begin, end - start) for start, end in self.spent if end > begin)
        return not spent or spent + more <= (1 - 1 / self.ratio) * self.window + (self.ratio - 1) * alone


class PrefillThrottle:
    """Limits the prompt rows of each step so that running streams keep their pace.

    ratio: max_itl_ratio, more than 1. max_gap: seconds, 0 for no limit.
    """

    def __init__(self, ratio: float, max_gap: float = 0.0):
        self.ratio, self.max_gap, self.times = ratio, max_gap, StepTimes()
        self._since_alone = REFRESH
        self._ledger = _Ledger(ratio)
        self._in_flight: deque[tuple[float, float]] = deque()

    def rows(self, decodes: int, most: int, pending: PendingPrefill | None) -> int:
        """Return how many rows of prompts the step being planned may carry beside its decodes, at most `most`.

        0: none now, to time decodes alone or because streams have their turn. pending: None where no prompts wait.
        """
        if pending is None:
            self._since_alone = 0
            return most
        self._since_alone += 1
        if self._since_alone > (REFRESH if self.times.knows(decodes) else _RETRY):
            self._since_alone = 0
            return 0
        rows = self._throttled(decodes, most, pending)
        if not rows:
            self._since_alone = 0
        return rows

    def _throttled(self, decodes: int, most: int, pending: PendingPrefill) -> int:
        alone = self.times.alone(decodes)
        least = min(max(LEAST_ROWS - decodes, LEAST_ROWS // 2), most)
        if alone is None:
            return least
        self._ledger.window = max(WINDOW, 2 * _GAP_IN_STEPS * alone)
        budget, ledger = (self.ratio - 1) * alone, self._ledger.after(self._in_flight)
        share = (1 - 1 / self.ratio) * self._ledger.window
        chunk = cheapest_rows(self.times, decodes, most, self._longest(alone, share), share)
        if chunk is None:
            chunk = least
        known = ((rows, self.times.more(rows)) for rows in _choices(decodes, most))
        even = max((rows for rows, seconds in known if seconds is not None and seconds <= budget), default=0)
        chunk = max(chunk, even)
        cost = self._cost(chunk if pending.rows is None else min(chunk, pending.rows))
        if ledger.allows(alone, cost):
            return chunk
        if 0 < pending.shortest <= chunk and ledger.allows(alone, self._cost(pending.shortest)):
            return pending.shortest
        return 0

    def _longest(self, alone: float, share: float) -> float:
        """Seconds that a chunk may add to decodes that take `alone`, where prompts have `share` of a window."""
        if not self.max_gap:
            return share
        return min(share, _SURE * max(self.max_gap, _GAP_IN_STEPS * alone) - alone)

    def _cost(self, rows: int) -> float:
        return self.times.more(rows) or 0.0

    def planned(self, decodes: int, prefill_rows: int) -> None:
        """Note that a step is in flight."""
        alone = (self.times.alone(decodes) or 0.0) if decodes else 0.0
        self._in_flight.append((alone, self._cost(prefill_rows) if decodes and prefill_rows else 0.0))

    def took(self, decodes: int, prefill_rows: int, seconds: float) -> None:
        """Note how long the oldest step in flight took. 0 seconds: nobody knows."""
        if self._in_flight:
            self._in_flight.popleft()
        if seconds > 0:
            self.times.add(decodes, prefill_rows, seconds)
        if not decodes:  # nobody had to wait
            self._ledger = _Ledger(self.ratio)
            return
        alone = min(self.times.alone(decodes) or 0.0, seconds) if prefill_rows else seconds
        self._ledger.add(alone, seconds - alone)

    def lost(self) -> None:
        """Forget the steps in flight, which went down with their engine."""
        self._in_flight.clear()
        self._ledger = _Ledger(self.ratio)
