"""Notices an engine that hangs: alive, with a step to compute, and no result. Knows counts and times, not engines."""

from __future__ import annotations

from collections import deque

__all__ = ["TOKENS_PER_LIMIT", "StepWatch"]

TOKENS_PER_LIMIT = 256
"""Tokens of a step that it may take another `seconds` for."""

_LOOKS_PER_LIMIT = 4


class StepWatch:
    """Limit on how long the oldest step in flight takes, `seconds * (1 + tokens / TOKENS_PER_LIMIT)`.

    Time is counted from look to look, and no more of it than is planned between two: a machine or a process group
    that was stopped for an hour has not computed for an hour. All times are seconds of one clock; 0 watches nothing.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._steps: deque[float] = deque()  # the limit of each step in flight
        self._waited = 0.0
        self._looked_at = 0.0

    def sent(self, num_tokens: int, now: float) -> None:
        """Note that a step was given to the engine."""
        if not self._steps:
            self._begin(now)
        self._steps.append(self._seconds * (1 + num_tokens / TOKENS_PER_LIMIT))

    def finished(self, now: float) -> None:
        """Note that the result of the oldest step has come."""
        if self._steps:
            self._steps.popleft()
        self._begin(now)

    def clear(self) -> None:
        """Forget all steps: nothing is in flight any more."""
        self._steps.clear()

    def _begin(self, now: float) -> None:
        self._waited, self._looked_at = 0.0, now

    @property
    def next_look(self) -> float | None:
        """Time at which `is_overdue` should be asked again, if nothing happens before."""
        return self._looked_at + self._pause if self._seconds and self._steps else None

    @property
    def _pause(self) -> float:
        return self._steps[0] / _LOOKS_PER_LIMIT

    def is_overdue(self, now: float) -> bool:
        """Whether the oldest step has taken longer than it may."""
        if not self._seconds or not self._steps:
            return False
        self._waited += min(now - self._looked_at, self._pause)
        self._looked_at = now
        return self._waited >= self._steps[0]
