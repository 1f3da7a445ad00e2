"""How many rows of prompts a step may carry beside decodes, so that those who read answers as they come hardly notice.

    seconds(decodes and prompts) <= max_itl_ratio * seconds(the same decodes alone)

by what steps took of late (scheduler/step_times.py). Prompts must not starve: where not even FEWEST_ROWS fit, they have
twice as many if these take at most twice the time that there is for them. Where they take more the ratio is far from
being kept, and tiny steps would keep both waiting longer: a step has LEAST_ROWS, and twice as many as long as twice the
rows take less than 1.5 times as long. With experts in RAM, whose weights are read or cross a bus whatever the rows, one
long step ends sooner than thirty that are nearly as long; sizes that were not timed are tried. LEAST_ROWS it has while
nothing is known. Steps without decodes are as long as chunk_size.

What decodes take alone must be known: where it is not, and after REFRESH steps with prompts in a row, one step carries
none. So a server with a prompt in every step knows it too.
"""

from __future__ import annotations

from ktransformers.scheduler.step_times import StepTimes

__all__ = ["FEWEST_ROWS", "LEAST_ROWS", "REFRESH", "Pacer", "paced_rows"]

LEAST_ROWS = 64
"""Of a step with decodes and prompts, together; at least half of them are of prompts, however many decode."""

FEWEST_ROWS = 7
"""Of prompts beside decodes, where the time for them is short: 8 less the one decode that there often is."""

_SHORT_OF_TIME = 15
"""The same where these take longer than there is time for."""

REFRESH = 32
"""Steps with decodes and prompts in a row before one of decodes alone."""

_WORTH = 1.5
"""Twice the rows of a step that keeps no ratio are worth less than so many times its time."""

_RETRY = 4
"""The same while steps of so many decodes were never timed alone: results come two steps later."""


def _totals(most: int) -> list[int]:
    """Rows of whole steps to choose among, largest first: 8, 12, 16, 24, ... Graphs are padded to some of them."""
    sizes = []
    size = FEWEST_ROWS + 1
    while size <= most:
        sizes += [size, size + size // 2]
        size *= 2
    return [size for size in reversed(sizes) if size <= most]


def paced_rows(times: StepTimes, ratio: float, decodes: int, most: int) -> int:
    """Rows of prompts beside so many decodes, at most `most`, and at least FEWEST_ROWS where `most` is."""
    least = min(max(LEAST_ROWS - decodes, LEAST_ROWS // 2), most)
    fewest, alone = min(FEWEST_ROWS, most), times.alone(decodes)
    if alone is None:
        return least
    budget = (ratio - 1) * alone
    for rows in (most, *(total - decodes for total in _totals(most + decodes)), fewest):
        more = times.more(rows)
        if rows >= fewest and more is not None and more <= budget:
            return rows
    few = min(_SHORT_OF_TIME, most)
    more = times.more(few)
    if more is None:
        return least
    return few if more <= 2 * budget else _worthwhile_rows(times, least, most)


def _worthwhile_rows(times: StepTimes, least: int, most: int) -> int:
    """Rows of prompts where the ratio cannot be kept: more of them, while that shortens the whole."""
    rows = least
    while rows < most:
        here, twice = times.more(rows), min(2 * rows, most)
        if here is None or not times.knows_more(rows):
            return rows
        there = times.more(twice)
        if there is None or not times.knows_more(twice):
            return twice
        if there * rows >= _WORTH / 2 * twice * here:
            return rows
        rows = twice
    return rows


class Pacer:
    """Of one scheduler. ratio: max_itl_ratio, more than 1."""

    def __init__(self, ratio: float):
        self.ratio, self.times = ratio, StepTimes()
        self._since_alone = REFRESH

    def rows(self, decodes: int, most: int, *, has_prompts: bool) -> int:
        """Rows of prompts that the step being planned may carry beside its decodes; 0: none, to time these alone."""
        if not has_prompts:
            self._since_alone = 0
            return most
        self._since_alone += 1
        if self._since_alone > (REFRESH if self.times.knows(decodes) else _RETRY):
            self._since_alone = 0
            return 0
        return paced_rows(self.times, self.ratio, decodes, most)

    def took(self, decodes: int, prefill_rows: int, seconds: float) -> None:
        """A step has been run. Those without decodes say nothing of this, nor does a time that nobody measured."""
        if decodes and seconds > 0:
            self.times.add(decodes, prefill_rows, seconds)
