"""How many rows of prompts a step may carry beside decodes, so that those who read answers as they come hardly notice.

    seconds(decodes and prompts) <= max_itl_ratio * seconds(the same decodes alone)

by what steps took of late (scheduler/step_times.py). Prompts must not starve: they have FEWEST_ROWS where these take at
most twice the time that there is for them. Where they take more, each row costs nearly as much as the first, as with
experts in RAM: the ratio cannot be kept, tiny steps would only keep both waiting longer, and a step has LEAST_ROWS. So
it has while nothing is known. Steps without decodes are as long as chunk_size.

What decodes take alone must be known: where it is not, and after REFRESH steps with prompts in a row, one step carries
none. So a server with a prompt in every step knows it too.
"""

from __future__ import annotations

from ktransformers.scheduler.step_times import StepTimes

__all__ = ["FEWEST_ROWS", "LEAST_ROWS", "REFRESH", "Pacer", "paced_rows"]

LEAST_ROWS = 64
"""Of a step with decodes and prompts, together; at least half of them are of prompts, however many decode."""

FEWEST_ROWS = 15
"""Of prompts beside decodes, where the time for them is short: 16 less the one decode that there often is."""

REFRESH = 32
"""Steps with decodes and prompts in a row before one of decodes alone."""

_RETRY = 4
"""The same while steps of so many decodes were never timed alone: results come two steps later."""


def _totals(most: int) -> list[int]:
    """Rows of whole steps to choose among, largest first: 16, 24, 32, 48, ... Graphs are padded to some of them."""
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
    more = times.more(fewest)
    return fewest if more is not None and more <= 2 * budget else least


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
