"""The time on a GPU, written by a kernel of one thread: a captured graph writes it anew with every replay."""

from __future__ import annotations

import time

from torch import Tensor

from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["write_device_time", "write_time"]


@jit
def _now():
    """Nanoseconds of the clock that all multiprocessors share (PTX, %globaltimer)."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@jit(do_not_specialize=["index"])
def _time_kernel(times, index):
    tl.store(times + index, _now())


def write_device_time(times: Tensor, index: int) -> None:
    """Set times[index], int64, to the device's clock, in nanoseconds, once all before in its stream is done."""
    _time_kernel[(1,)](times, index, num_warps=1)


def write_time(times: Tensor, index: int) -> None:
    """Set times[index] to the device's clock as `write_device_time` does; where `times` is on the CPU, to this
    machine's monotonic clock.
    """
    if times.device.type == "cuda":
        write_device_time(times, index)
    else:
        times[index] = time.monotonic_ns()
