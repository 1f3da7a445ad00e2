"""A clock for calls on the CPU. That of a GPU is in gpu/device.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["best_time", "torch_threads"]


def best_time(run: Callable[[], object], seconds: float) -> float:
    """Return the seconds of the shortest of the calls that fit in `seconds` (at least three)."""
    run()
    best, start, count = float("inf"), time.perf_counter(), 0
    while count < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
        count += 1
    return best


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads inside the block, so that it has as many as our pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
