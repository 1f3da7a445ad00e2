"""Sums over GPUs that reach each other's memory, and shares of rows side by side, in one launch.

Program p of each GPU reads the same values as program p of the others, and waits for those alone:

    signal the others' p: my share is there      wait for the same of theirs
    add the shares up, in the order of the ranks; or write them side by side
    signal the others' p: I have read yours      wait for the same of theirs

A signal is a 1 written to the other GPU, which makes it 0 when it has seen it. The two moments have slots of their own,
so that a slot is 0 again before it is next written: who signals that it has read has seen that shares are there.
Programs begin in order on every GPU, so those that wait for each other do not keep one another from beginning.
Knows addresses; not processes or how memory is shared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["MAX_PROGRAMS", "num_signals", "peer_gather", "peer_sum"]

MAX_PROGRAMS = 128
"""Of a launch: near all multiprocessors of a GPU, for links want many reads under way."""

_SMALL = 1 << 17
"""Values up to which programs are small, for a step of few rows waits for one read of each."""


def num_signals(size: int) -> int:
    """Return how many int32 each of `size` GPUs has for signals, 0 before the first launch."""
    return 2 * MAX_PROGRAMS * size


@jit
def _barrier(signals_ptr, moment, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Wait until this program of all GPUs is here. signals_ptr: addresses of slots [2, PROGRAMS, SIZE] on each GPU."""
    slot = (moment * PROGRAMS + tl.program_id(0)) * SIZE  # the same in launches of any size
    tl.debug_barrier()  # what any thread has read or written is before the signal
    for other in tl.static_range(SIZE):
        if other != RANK:
            theirs = tl.load(signals_ptr + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + slot + RANK, 1, sem="release", scope="sys")
    mine = tl.load(signals_ptr + RANK).to(tl.pointer_type(tl.int32))
    for other in tl.static_range(SIZE):
        if other != RANK:
            while tl.atomic_cas(mine + slot + other, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()


@jit
def _peer_sum_kernel(
    shares_ptr, signals_ptr, out_ptr, numel,
    RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (programs,). shares_ptr, signals_ptr: int64 [SIZE], addresses on each GPU."""
    _barrier(signals_ptr, 0, RANK, SIZE, PROGRAMS)
    for begin in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        mask = columns < numel
        share = tl.multiple_of(tl.load(shares_ptr).to(tl.pointer_type(tl.float32)), 16)
        # Not from the first cache, which may have what another GPU wrote over.
        total = tl.load(share + columns, mask=mask, other=0.0, cache_modifier=".cg")
        for rank in tl.static_range(1, SIZE):
            share = tl.multiple_of(tl.load(shares_ptr + rank).to(tl.pointer_type(tl.float32)), 16)
            total += tl.load(share + columns, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
    _barrier(signals_ptr, 1, RANK, SIZE, PROGRAMS)


@jit
def _peer_gather_kernel(
    shares_ptr, signals_ptr, out_ptr, numel, width, out_row,
    RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (programs,). numel: of one share, rows of `width`."""
    _barrier(signals_ptr, 0, RANK, SIZE, PROGRAMS)
    for begin in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        values = begin + tl.arange(0, BLOCK)
        mask = values < numel
        row = (values // width).to(tl.int64)
        place = out_ptr + row * out_row + values % width
        for rank in tl.static_range(SIZE):
            share = tl.multiple_of(tl.load(shares_ptr + rank).to(tl.pointer_type(tl.float32)), 16)
            value = tl.load(share + values, mask=mask, other=0.0, cache_modifier=".cg")  # see _peer_sum_kernel
            tl.store(place + rank * width, value, mask=mask)
    _barrier(signals_ptr, 1, RANK, SIZE, PROGRAMS)


def _check_addresses(shares: Tensor, signals: Tensor, rank: int) -> None:
    size = shares.numel()
    if shares.dtype != torch.int64 or signals.dtype != torch.int64 or signals.numel() != size:
        raise TypeError(f"shares and signals must be int64 of one length, got {shares.dtype} and {signals.dtype}")
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} of {size} GPUs")


def _launch(numel: int) -> tuple[tuple[int], int, int]:
    """Return the grid, the values of a program at a time, and its warps."""
    block, warps = (1024, 4) if numel <= _SMALL else (4096, 8)
    return (min(-(-numel // block), MAX_PROGRAMS),), block, warps


def peer_sum(shares: Tensor, signals: Tensor, rank: int, out: Tensor) -> None:
    """Add up the first values of all GPUs' shares, as many as `out` has, in the order of ranks, in fp32.

    shares, signals: int64 [size] on this GPU, the addresses, as this process has them, of fp32 memory in multiples of
    16 bytes, and of num_signals(size) int32, of each GPU. rank: this GPU's. out: contiguous, any float type, rounded to
    once; not in the shares. All GPUs launch the same, one launch after another. Raises TypeError or ValueError.
    """
    size, numel = shares.numel(), out.numel()
    _check_addresses(shares, signals, rank)
    check_float("out", out, tuple(out.shape))
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    if not numel:
        return
    grid, block, warps = _launch(numel)
    _peer_sum_kernel[grid](
        shares, signals, out, numel,
        RANK=rank, SIZE=size, PROGRAMS=MAX_PROGRAMS, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def peer_gather(shares: Tensor, signals: Tensor, rank: int, out: Tensor) -> None:
    """Write the first values of all GPUs' shares, rows of the same width, side by side in the order of ranks.

    shares, signals, rank: see `peer_sum`. out: fp32 [T, size * width], any row stride; not in the shares. All GPUs
    launch the same, one launch after another. Raises TypeError or ValueError.
    """
    size = shares.numel()
    _check_addresses(shares, signals, rank)
    check_float("out", out, (None, None))
    if out.dtype != torch.float32 or out.shape[1] % size:
        raise ValueError(f"out must be fp32 [T, {size} * width], got {out.dtype} {list(out.shape)}")
    if out.stride(1) != 1:
        raise ValueError(f"rows of out must be contiguous, got strides {out.stride()}")
    numel, width = out.numel() // size, out.shape[1] // size
    if not numel:
        return
    grid, block, warps = _launch(numel)
    _peer_gather_kernel[grid](
        shares, signals, out, numel, width, out.stride(0),
        RANK=rank, SIZE=size, PROGRAMS=MAX_PROGRAMS, BLOCK=block, num_warps=warps,
    )  # fmt: skip
