"""Whether what a preempted run has computed is worth keeping elsewhere. Pure; the caller has measured the rates."""

from __future__ import annotations

__all__ = ["is_worth_saving"]


def is_worth_saving(num_bytes: int, copy_rate: float, num_tokens: int, prefill_rate: float) -> bool:
    """Whether copying a run's pages and states away and back takes less time than computing its tokens again.

    num_bytes: of its pages and states. copy_rate: bytes per second, of either way. num_tokens: that would have to be
    computed again; those that the prefix tree keeps do not count. prefill_rate: tokens per second. A rate of 0 has not
    been measured yet: nothing is saved on a guess.
    """
    if copy_rate <= 0.0 or prefill_rate <= 0.0 or num_tokens <= 0:
        return False
    return 2.0 * num_bytes / copy_rate < num_tokens / prefill_rate
