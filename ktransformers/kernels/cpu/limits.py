"""Measures what this machine can do at best with a worker pool: the limits beside which figures of the kernels
stand.
"""

from __future__ import annotations

import torch

from ktransformers.kernels.cpu.base import WorkerPool
from ktransformers.kernels.extension import extension

__all__ = ["bf16_peak", "fp32_peak", "int8_peak", "read_bandwidth"]


def read_bandwidth(pool: WorkerPool, nbytes: int = 1 << 30, repeats: int = 5) -> float:
    """Return the bytes per second that all threads of the pool read from a buffer of `nbytes`; the best of
    `repeats`.
    """
    data = torch.ones(nbytes, dtype=torch.uint8)
    return float(extension.read_bandwidth(pool.handle, data.data_ptr(), nbytes, repeats))


def int8_peak(pool: WorkerPool, repeats: int = 3) -> float:
    """Return int8 multiplications and additions per second in registers, by the pool's instruction set; the best of
    `repeats`.
    """
    return float(extension.int8_peak(pool.handle, repeats))


def fp32_peak(pool: WorkerPool, repeats: int = 3) -> float:
    """Return fp32 fused multiplications and additions per second in registers, counted as `int8_peak` counts."""
    return float(extension.fp32_peak(pool.handle, repeats))


def bf16_peak(pool: WorkerPool, repeats: int = 5) -> float:
    """Return bf16 multiplications and additions per second in registers; 0 where the instruction set has none."""
    return float(extension.bf16_peak(pool.handle, repeats))
