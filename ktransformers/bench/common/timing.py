"""A clock for calls on the CPU. That of a GPU is in gpu/device.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["best_time", "mean_time", "torch_threads"]


def mean_time(once: Callable[[int], object], seconds: float, warm_ups: int) -> float:
    """Return the seconds of a call, the mean of those that fit in `seconds` (at least two), which are numbered."""
    for i in range(warm_ups):
        once(i)
    began, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - began < seconds:
        once(count)
        count += 1
    return (time.perf_counter() - began) / count


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
