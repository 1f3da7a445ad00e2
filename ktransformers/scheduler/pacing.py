"""How many rows of prompts a step may carry beside decodes, so that those who read answers as they come hardly notice.

    seconds(decodes and prompts) <= max_itl_ratio * seconds(the same decodes alone)

by what steps took of late (scheduler/step_times.py). Where that allows less than LEAST_ROWS, or nothing is known yet, a
step has LEAST_ROWS: prompts must not starve, and their steps teach. Steps without decodes are as long as chunk_size.

What decodes take alone must be known: where it is not, and after REFRESH steps with prompts in a row, one step carries
none. So a server with a prompt in every step knows it too.
"""

from __future__ import annotations

from ktransformers.scheduler.step_times import StepTimes

__all__ = ["LEAST_ROWS", "REFRESH", "Pacer", "paced_rows"]

LEAST_ROWS = 64
"""Of a step with decodes and prompts, together; at least half of them are of prompts, however many decode."""

REFRESH = 64
"""Steps with decodes and prompts in a row before one of decodes alone."""

_RETRY = 4
"""The same while steps of so many decodes were never timed alone: results come two steps later."""


def _totals(most: int) -> list[int]:
    """Rows of whole steps to choose among, largest first: 64, 96, 128, 192, ... Graphs are padded to some of them."""
    sizes = []
    size = LEAST_ROWS
    while size <= most:
        sizes += [size, size + size // 2]
        size *= 2
    return [size for size in reversed(sizes) if size <= most]


def paced_rows(times: StepTimes, ratio: float, decodes: int, most: int) -> int:
    """Rows of prompts beside so many decodes, at most `most`, and at least LEAST_ROWS // 2 where `most` is."""
    least = min(max(LEAST_ROWS - decodes, LEAST_ROWS // 2), most)
    alone = times.alone(decodes)
    if alone is None:
        return least
    for rows in (most, *(total - decodes for total in _totals(most + decodes))):
        if rows <= least:
            break
        more = times.more(rows)
        if more is not None and more <= (ratio - 1) * alone:
            return rows
    return least


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
