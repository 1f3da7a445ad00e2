"""Tells the tokens of an answer again that another process has begun. Does not know who goes on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from ktransformers.core import PastToken, TokenEvent
from ktransformers.engine.sequence.output_processor import AnswerAssembler

__all__ = ["past_events"]

_AT_ONCE = 64
"""Events that are told without letting others have the event loop."""


async def past_events(assembler: AnswerAssembler, past: Iterable[PastToken]) -> AsyncGenerator[TokenEvent, None]:
    """The events of past tokens, as they were. assembler: a new one of the answer, which may go on behind them."""
    for at, one in enumerate(past):
        if not at % _AT_ONCE:
            await asyncio.sleep(0)
        assembler.stats.cached_len = one.cached_len
        if one.prompt_logprobs is not None:
            assembler.score(0, one.prompt_logprobs)
        yield assembler.token(one.token_id, one.logprobs, one.reason)
