"""Runs the generations behind one HTTP request side by side and adds up what they took. Knows no JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ktransformers.core import FinishReason, GenerationStats, TokenEvent
from ktransformers.server.backend.base import Backend, GenerationRequest
from ktransformers.server.metrics import Metrics

__all__ = ["Tally", "run_generations"]

_MAX_MERGED = 64  # events of all generations that wait for the one reader; each generation has its own buffer behind


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


async def run_generations(
    backend: Backend, requests: Sequence[GenerationRequest], ended: Container[int] = ()
) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """(index of the request, event) as they come. The first error of any of them ends all.

    ended: looked at after each event, indices of those that the reader wants no more of.

    Close it (`aclosing`) to stop what still runs.
    """
    if len(requests) == 1:
        async with aclosing(backend.generate(requests[0])) as events:
            async for event in events:
                yield 0, event
                if 0 in ended:
                    return
        return
    queue: asyncio.Queue[tuple[int, TokenEvent | None] | _Failed] = asyncio.Queue(_MAX_MERGED)
    tasks = [asyncio.create_task(_pump(backend, request, i, queue, ended)) for i, request in enumerate(requests)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, _Failed):
                raise item.error
            index, one = item
            if one is None:
                num_open -= 1
            else:
                yield index, one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    backend: Backend,
    request: GenerationRequest,
    index: int,
    queue: asyncio.Queue[tuple[int, TokenEvent | None] | _Failed],
    ended: Container[int],
) -> None:
    try:
        async with aclosing(backend.generate(request)) as events:
            async for event in events:
                if index in ended:
                    break
                await queue.put((index, event))
    except Exception as error:  # noqa: BLE001 - goes to the reader, who raises it
        await queue.put(_Failed(error))
    else:
        await queue.put((index, None))


class Tally:
    """Counts of all generations behind one request. num_choices per prompt: a prompt counts once, not n times."""

    def __init__(self, requests: Sequence[GenerationRequest], n: int, metrics: Metrics):
        self._stats: list[GenerationStats | None] = [None] * len(requests)
        self._n, self._metrics = n, metrics
        self._began = time.perf_counter()
        self._token_at = [0.0] * len(requests)
        self.first_token_seconds: float | None = None
        self.finish_reasons: list[str | None] = [None] * len(requests)
        self._open = set(range(len(requests)))
        metrics.counts.num_started += len(requests)

    def note(self, index: int, event: TokenEvent) -> None:
        """Count an event of choice `index`, now."""
        self._stats[index] = event.stats
        now = time.perf_counter()
        if event.token_id is not None:
            counts = self._metrics.counts
            counts.answer_tokens += 1
            if not self._token_at[index]:
                counts.prompt_tokens += event.stats.prompt_len - event.stats.cached_len
            if self._token_at[index]:
                self._metrics.inter_token.observe(now - self._token_at[index])
            else:
                self._metrics.first_token.observe(now - self._began)
                if self.first_token_seconds is None:
                    self.first_token_seconds = now - self._began
            self._token_at[index] = now
        if event.finish_reason is not None:
            self._open.discard(index)
            self._metrics.finished(event.finish_reason, event.stats, now - self._began)

    def close(self) -> None:
        """Count the answers that nobody waits for any more: their tokens were computed all the same."""
        for index in self._open:
            stats, reason = self._stats[index], self.finish_reasons[index]
            if stats is not None:
                self._metrics.finished(
                    FinishReason.ABORT if reason is None else FinishReason.STOP,
                    stats,
                    time.perf_counter() - self._began,
                )
        self._open.clear()

    @property
    def total(self) -> GenerationStats:
        """The sum. Times add up too: they are the engine's work on this request."""
        known = [stats for stats in self._stats if stats is not None]
        firsts = [stats for stats in self._stats[:: self._n] if stats is not None]
        return GenerationStats(
            prompt_len=sum(stats.prompt_len for stats in firsts),
            cached_len=sum(stats.cached_len for stats in firsts),
            completion_len=sum(stats.completion_len for stats in known),
            prefill_seconds=sum(stats.prefill_seconds for stats in known),
            decode_seconds=sum(stats.decode_seconds for stats in known),
        )
