"""Keeps torch's threads out of the way of the worker pool, and efficiency cores out of steps to which they add nothing.

torch's OpenMP threads spin for a while after each parallel operation, on the cores that the next native kernel wants.
With 16 threads of each kind that made a decode step of four sequences five times slower than it is. Threads that wait
passively do no harm; whether they do is decided by OMP_WAIT_POLICY when torch is imported, so our own processes set it
before that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from ktransformers.kernels.cpu import WorkerPool, limits
from ktransformers.system.cores import usable_cpus

__all__ = ["limit_torch_threads", "measure_slow_threads"]

logger = logging.getLogger(__name__)

_READ_BYTES = 256 << 20
_GAIN = 1.05
"""What is read with efficiency cores, by what is read without, from which on steps of few rows have them."""


def limit_torch_threads() -> None:
    """Make sure that torch's idle threads do not spin: where they would, torch gets one thread in this process.

    Otherwise it gets no more than there are cores, by the CPU quota too, of which torch knows nothing.
    """
    torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" or torch.get_num_threads() == 1:
        return
    torch.set_num_threads(1)
    logger.info("torch computes on one thread, because its others would spin; OMP_WAIT_POLICY=passive lets it use more")


def measure_slow_threads(
    pool: WorkerPool, read: Callable[[WorkerPool, int, int], float] = limits.read_bandwidth
) -> None:
    """Measure, on a hybrid processor, whether efficiency cores read memory faster beside the performance cores than
    these alone. Where they do not, they rest in steps of few rows, which wait for memory; one line of the log says so.

    read: takes the pool, bytes and repeats; returns bytes a second.
    """
    if not pool.num_slow:
        return
    pool.handle.rest_slow(True)
    alone = read(pool, _READ_BYTES, 3)
    pool.handle.rest_slow(False)
    together = read(pool, _READ_BYTES, 3)
    pool.slow_rest = together < _GAIN * alone
    logger.info(
        "%d threads on performance cores read %.1f GB/s, %.1f with %d on efficiency cores, which %s steps of few rows",
        pool.num_threads - pool.num_slow,
        alone / 1e9,
        together / 1e9,
        pool.num_slow,
        "rest in" if pool.slow_rest else "take part in",
    )
