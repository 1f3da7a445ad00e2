"""Threads for work on texts, so that the event loop goes on: long texts never keep short ones waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["LONG", "TextWorkers"]

P = ParamSpec("P")
T = TypeVar("T")

LONG = 64 << 10
"""Bytes of a request from which on it waits for the others of its kind."""


class TextWorkers:
    """Threads for texts in two queues: many threads for short texts, one for long ones, which take seconds. Others wait
    for what other processes and hosts do.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(4, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self._waiting = ThreadPoolExecutor(8, thread_name_prefix="picture")

    async def run(self, num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on a thread, and return or raise what it does. num_bytes: of the request that it is about."""
        pool = self._short if num_bytes < LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: work(*args, **kwargs))

    async def run_waiting(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that computes little and may wait long, as `run` does."""
        return await asyncio.get_running_loop().run_in_executor(self._waiting, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Stop the threads: nothing that still waits is started. What runs is not waited for."""
        for pool in (self._short, self._long, self._waiting):
            pool.shutdown(wait=False, cancel_futures=True)
