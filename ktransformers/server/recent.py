"""What the service did lately, for those who watch it: its last requests, without their texts, and its speed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ktransformers.server.backend.balance_stats import BalanceStats
from ktransformers.server.backend.base import Backend
from ktransformers.server.metrics import Counts

__all__ = ["PastRequest", "RecentRequests", "SpeedMeter"]

Clock = Callable[[], float]

MAX_REQUESTS = 100
_WINDOW = 10.0


@dataclass(frozen=True, slots=True)
class PastRequest:
    """One request for answers. at: seconds since 1970, when it came. ttft, seconds: from then on.

    Counts are of all its answers together; what a refused one did not get to is None. key: the name of the API key.
    """

    id: str
    at: float
    path: str
    status: int
    seconds: float
    key: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    ttft: float | None = None
    finish_reason: str | None = None


class RecentRequests:
    """The last MAX_REQUESTS, in memory only."""

    def __init__(self) -> None:
        self._past: deque[PastRequest] = deque(maxlen=MAX_REQUESTS)

    def add(self, past: PastRequest) -> None:
        """Forgets the oldest when there are too many."""
        self._past.append(past)

    def described(self) -> list[dict[str, Any]]:
        """As JSON, the newest first."""
        return [asdict(past) for past in reversed(self._past)]


class SpeedMeter:
    """Tokens per second over the last _WINDOW seconds, or since it was last asked if that is longer ago.

    Keeps nothing while nobody asks. clock: seconds, for tests.
    """

    def __init__(self, backend: Backend, counts: Counts, clock: Clock = time.monotonic):
        self._backend, self._counts, self._clock = backend, counts, clock
        self._seen: deque[tuple[float, int, int]] = deque([(clock(), 0, 0)])

    def _now(self) -> tuple[float, int, int]:
        """When, tokens of prompts that were computed, tokens of answers; since the start."""
        stats, answers = self._backend.stats(), self._counts.answer_tokens
        if isinstance(stats, BalanceStats):  # counts chunk by chunk; the other counts a prompt when its answer begins
            return self._clock(), max(stats.engine.num_tokens - answers, 0), answers
        return self._clock(), self._counts.prompt_tokens, answers

    def read(self) -> dict[str, float]:
        """prefill_tps and decode_tps."""
        now = self._now()
        while len(self._seen) > 1 and self._seen[0][0] < now[0] - _WINDOW:
            self._seen.popleft()
        before = self._seen[0]
        seconds = max(now[0] - before[0], 1e-3)
        if now[0] - self._seen[-1][0] >= _WINDOW / 20:  # many who ask at once fill no memory
            self._seen.append(now)
        prefill, decode = (max(now[i] - before[i], 0) / seconds for i in (1, 2))
        return {"prefill_tps": round(prefill, 3), "decode_tps": round(decode, 3)}
