"""Runs the generations behind one HTTP request side by side and adds up what they took. Knows no JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Container, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ktransformers.core import TokenEvent
from ktransformers.server.backend.base import BackendInterfaceBase, GenerationRequest

__all__ = ["run_generations"]

_MAX_MERGED = 64  # events of all generations that wait for the one reader; each generation has its own buffer behind


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


async def run_generations(
    backend: BackendInterfaceBase,
    requests: Sequence[GenerationRequest],
    ended: Container[int] = (),
    order: Iterable[int] = (),
) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """Yield (index of the request, event) of all generations, as the events come. The first error of any of them ends
    all.

    ended: looked at after each event, indices of those that the reader wants no more of.
    order: whose events come first, one each: those of tokens that the requests have in their past.

    Close it (`aclosing`) to stop what still runs.
    """
    if len(requests) == 1:
        async with aclosing(backend.inference(requests[0])) as events:
            async for event in events:
                yield 0, event
                if 0 in ended:
                    return
        return
    queue: asyncio.Queue[tuple[int, TokenEvent | None] | _Failed] = asyncio.Queue(_MAX_MERGED)
    generations = [backend.inference(request) for request in requests]
    tasks: list[asyncio.Task[None]] = []
    try:
        for index in order:
            yield index, await anext(generations[index])
        tasks += [asyncio.create_task(_pump(events, i, queue, ended)) for i, events in enumerate(generations)]
        num_open = len(tasks)
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
        for events in generations:
            await events.aclose()


async def _pump(
    generation: AsyncGenerator[TokenEvent, None],
    index: int,
    queue: asyncio.Queue[tuple[int, TokenEvent | None] | _Failed],
    ended: Container[int],
) -> None:
    try:
        async with aclosing(generation) as events:
            if index in ended:
                await events.aclose()  # nothing is computed for it
            async for event in events:
                if index in ended:
                    break
                await queue.put((index, event))
    except Exception as error:  # noqa: BLE001 - goes to the reader, who raises it
        await queue.put(_Failed(error))
    else:
        await queue.put((index, None))
