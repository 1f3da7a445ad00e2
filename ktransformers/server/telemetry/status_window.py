"""The service's last requests, without their texts, and its speed, for those who watch it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ktransformers.scheduler.commands import EngineTotals
from ktransformers.server.backend.balance_stats import BalanceStats
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.telemetry.metrics import Counts

__all__ = ["PastRequest", "RecentRequests", "SpeedMeter"]

Clock = Callable[[], float]

MAX_REQUESTS = 100
_WINDOW = 10.0


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A past request for answers, as the status view shows it. at: seconds since 1970, when it came. ttft, seconds:
    from then on.

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
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    ttft: float | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """at: seconds. Tokens of prompts that were computed, of answers, and the engine's figures: since the start."""

    at: float
    prompt_tokens: int
    answer_tokens: int
    engine: EngineTotals


class RecentRequests:
    """The last MAX_REQUESTS requests, in memory only."""

    def __init__(self) -> None:
        self._past: deque[PastRequest] = deque(maxlen=MAX_REQUESTS)

    def add(self, past: PastRequest) -> None:
        """Add a request, and forget the oldest when there are too many."""
        self._past.append(past)

    def described(self) -> list[dict[str, Any]]:
        """Return the requests as JSON, the newest first."""
        return [asdict(past) for past in reversed(self._past)]


class SpeedMeter:
    """Measures tokens per second over the last _WINDOW seconds, or since it was last asked if that is longer ago.

    Keeps nothing while nobody asks. clock: seconds, for tests. limit_gbps: what the memory gives at most, GB/s, None
    where nobody has measured it.
    """

    def __init__(
        self,
        backend: BackendInterfaceBase,
        counts: Counts,
        clock: Clock = time.monotonic,
        limit_gbps: float | None = None,
    ):
        self._backend, self._counts, self._clock, self._limit_gbps = backend, counts, clock, limit_gbps
        self._seen: deque[_Seen] = deque([_Seen(clock(), 0, 0, EngineTotals())])

    def _now(self) -> _Seen:
        stats, answers = self._backend.stats(), self._counts.answer_tokens
        if isinstance(stats, BalanceStats):  # counts chunk by chunk; the other counts a prompt when its answer begins
            return _Seen(self._clock(), max(stats.engine.num_tokens - answers, 0), answers, stats.engine)
        return _Seen(self._clock(), self._counts.prompt_tokens, answers, EngineTotals())

    def _move(self) -> tuple[_Seen, _Seen]:
        """What was seen at the beginning of the window, and what is seen now."""
        now = self._now()
        while len(self._seen) > 1 and self._seen[0].at < now.at - _WINDOW:
            self._seen.popleft()
        before = self._seen[0]
        if now.at - self._seen[-1].at >= _WINDOW / 20:  # many who ask at once fill no memory
            self._seen.append(now)
        return before, now

    def read(self) -> tuple[dict[str, float], dict[str, float | None] | None]:
        """Return prefill_tps and decode_tps; and gbps, the experts' weights that steps read from memory, while they
        ran.

        None without experts on the CPU, or when no step was looked at.
        """
        before, now = self._move()
        seconds = max(now.at - before.at, 1e-3)
        prefill, decode = now.prompt_tokens - before.prompt_tokens, now.answer_tokens - before.answer_tokens
        speed = {"prefill_tps": round(max(prefill, 0) / seconds, 3), "decode_tps": round(decode / seconds, 3)}
        rate = self._bytes_per_second(before.engine, now.engine)
        return speed, None if rate is None else {"gbps": round(rate / 1e9, 3), "limit_gbps": self._limit_gbps}

    def _bytes_per_second(self, before: EngineTotals, now: EngineTotals) -> float | None:
        stats = self._backend.stats()
        busy, samples = now.busy_seconds - before.busy_seconds, now.num_expert_samples - before.num_expert_samples
        if not isinstance(stats, BalanceStats) or not stats.expert_bytes or busy <= 0 or samples <= 0:
            return None
        touched = (now.num_touched_experts - before.num_touched_experts) / samples  # of a layer, in a step
        return touched * stats.expert_bytes * (now.num_steps - before.num_steps) / busy
