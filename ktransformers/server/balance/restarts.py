"""Policy for replacing an engine that died: how many deaths are too many, how long to wait, what must not change.

Pure but for SystemClock: whoever decides passes times in.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from typing_extensions import override

from ktransformers.config import EngineConfig
from ktransformers.server.balance.messages import EngineFacts

__all__ = [
    "RESTART_SECONDS",
    "Clock",
    "DeathLimit",
    "SystemClock",
    "delays",
    "ending",
    "pinned",
    "shortfall",
    "was_killed",
]

RESTART_SECONDS = 600.0
"""The time in which deaths of engines are counted."""

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0


class Clock(Protocol):
    """A clock of seconds from any beginning. Tests have one that stands still."""

    def now(self) -> float:
        """Return the seconds on this clock."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` by this clock."""
        ...


class SystemClock(Clock):
    """The system's monotonic clock."""

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class DeathLimit:
    """Counts the engine deaths of the last RESTART_SECONDS that nothing explains."""

    def __init__(self, most: int):
        self.most = most
        self._died_at: dict[int, float] = {}  # by epoch

    def count(self, epoch: int, now: float) -> None:
        """Count the death of the engine of this epoch."""
        self._died_at = {e: at for e, at in self._died_at.items() if now - at < RESTART_SECONDS} | {epoch: now}

    def excuse(self, epochs: Iterable[int]) -> None:
        """Stop counting the deaths of these epochs, which do not speak against the engine."""
        for epoch in epochs:
            self._died_at.pop(epoch, None)

    @property
    def num_deaths(self) -> int:
        """Number of deaths at the time of the last `count`."""
        return len(self._died_at)

    @property
    def is_exceeded(self) -> bool:
        return self.num_deaths > self.most


def delays() -> Iterator[float]:
    """Yield the seconds to wait before each new try to start an engine that reports that it cannot start."""
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _LONGEST_DELAY)


def pinned(config: EngineConfig, facts: EngineFacts) -> EngineConfig:
    """Return the configuration in which an engine loads as the one with these facts did, whatever memory is free now.

    Where it does not fit any more it says so, instead of becoming a smaller one or one without GPUs.
    """
    return replace(
        config,
        cache_lens=facts.num_pages * facts.page_size,
        chunk_size=facts.chunk_size,
        use_cuda=facts.uses_gpus if config.use_cuda is None else config.use_cuda,
    )


def shortfall(first: EngineFacts, now: EngineFacts) -> str | None:
    """Return why an engine with the facts `now` cannot go on with the plans made for the `first` one; None when it
    can.
    """
    for name in ("num_pages", "chunk_size", "num_states"):
        had, has = getattr(first, name), getattr(now, name)
        if has < had:
            return f"{name} is {has}, and the scheduler counts on {had}"
    for name in ("page_size", "vocab_size", "eos_token_ids", "max_model_len", "tiers"):
        had, has = getattr(first, name), getattr(now, name)
        if has != had:
            return f"{name} is {has}, and was {had}"
    return None


_OWN_FAULTS = frozenset(
    {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)


def was_killed(code: int) -> bool:
    """Whether a process with this return code was ended from outside: by the system for want of memory, by a person."""
    return code < 0 and -code not in _OWN_FAULTS


def ending(code: int) -> str:
    """Return in words how a process ended, by its return code."""
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGBUS:
        return f"signal {-code} (SIGBUS: a model file was cut short while it was mapped, or its disk failed)"
    return f"signal {-code}"
