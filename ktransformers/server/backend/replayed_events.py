"""Replays the tokens of an answer that another process has begun. Does not know who goes on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from ktransformers.core import PastToken, TokenEvent
from ktransformers.engine.sequence.output_processor import OutputProcessor

__all__ = ["replayed_events"]

_AT_ONCE = 64
"""Events that are replayed without letting others have the event loop."""


async def replayed_events(
    output_processor: OutputProcessor, past: Iterable[PastToken]
) -> AsyncGenerator[TokenEvent, None]:
    """Yield the events of past tokens as they were. output_processor: a new one, which may go on behind them."""
    for at, one in enumerate(past):
        if not at % _AT_ONCE:
            await asyncio.sleep(0)
        output_processor.stats.cached_len = one.cached_len
        if one.prompt_logprobs is not None:
            output_processor.score(0, one.prompt_logprobs)
        yield output_processor.token(one.token_id, one.logprobs, one.reason)
