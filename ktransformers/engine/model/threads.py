"""Keeps torch's threads out of the way of the worker pool.

torch's OpenMP threads spin for a while after each parallel operation, on the cores that the next native kernel wants.
With 16 threads of each kind that made a decode step of four sequences five times slower than it is. Threads that wait
passively do no harm; whether they do is decided by OMP_WAIT_POLICY when torch is imported, so our own processes set it
before that.
"""

from __future__ import annotations

import logging
import os

import torch

from ktransformers.system.cores import usable_cpus

__all__ = ["settle_torch_threads"]

logger = logging.getLogger(__name__)


def settle_torch_threads() -> None:
    """Make sure that torch's idle threads do not spin: where they would, torch gets one thread in this process.

    Otherwise it gets no more than there are cores, by the CPU quota too, of which torch knows nothing.
    """
    torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" or torch.get_num_threads() == 1:
        return
    torch.set_num_threads(1)
    logger.info("torch computes on one thread, because its others would spin; OMP_WAIT_POLICY=passive lets it use more")
