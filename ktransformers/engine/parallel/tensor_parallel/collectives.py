"""Ways to add a tensor up, or to gather it, over the processes of a model: by torch.distributed, or by reading other
GPUs' memory.

NCCL takes longer for a decode step's few rows than it takes to read them. With symmetric memory each process writes its
share where all others can read it, and one kernel adds up: ours (kernels/triton/common/peer_sums.py), which rounds to
the type that is wanted, or torch's (torch.ops.symm_mem):

    one-shot    each GPU reads all shares of all values: one pass, for few values
    two-shot    each GPU adds up its part of the values and writes it to all: for many values

All begin and end with a barrier of the GPUs, so that a share is there before it is read, and everything has been read
once the kernel is over: one buffer serves all sums of a stream, captured or not. Shares are added in the order of the
ranks, or by one rank for all: every process gets the same bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed
from typing_extensions import override

from ktransformers.kernels.triton.common.compiling import compiles, watch_launches
from ktransformers.kernels.triton.common.peer_sums import num_signals, peer_gather, peer_sum
from ktransformers.kernels.triton.common.runtime import triton

__all__ = [
    "CollectiveKernel",
    "Collectives",
    "GroupCollectives",
    "PeerKernel",
    "SymmetricCollectives",
    "SymmetricWay",
    "TorchKernels",
    "open_collectives",
    "symmetric_way",
]

logger = logging.getLogger(__name__)

MadeT = TypeVar("MadeT")

_USES_PEER_KERNEL = True
"""Whether our kernel is tried before torch's."""

_FAILURES = (RuntimeError, ImportError, AttributeError, TypeError)
"""Of symmetric memory, whose interface in torch is not settled: without it NCCL adds up."""

_MOST_PEERS = 4
"""Processes up to which our kernel adds up: each reads all shares, which are more than two passes of torch's read."""

_ONE_SHOT_BYTES = 1 << 20
"""Of a share that is added up in one pass: in two it is read less often, which counts from here on."""

_SAID_BYTES = 256
"""Of what a process says of its failure to the others."""

_ORDERED_SIZES = (2, 4, 8)
"""Numbers of processes for which every release of torch adds in the order of ranks in one pass."""


class SymmetricWay(Enum):
    """A kernel of torch.ops.symm_mem that adds up."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"


def symmetric_way(nbytes: int, size: int) -> SymmetricWay:
    """Return how a share of so many bytes is added up over `size` processes."""
    is_small = nbytes <= _ONE_SHOT_BYTES and size in _ORDERED_SIZES
    return SymmetricWay.ONE_SHOT if is_small else SymmetricWay.TWO_SHOT


class Collectives(Protocol):
    """Adds tensors up and gathers them over all processes, which call it with the same shapes in the same order."""

    def memory(self, num_rows: int, width: int) -> torch.Tensor | None:
        """Return where a share is best written, fp32 [num_rows, width]; None for anywhere. It holds the share until the
        next one is written there.
        """
        ...

    def add(self, share: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of `share` over all processes to `out`, contiguous, of its shape and any float type: the share
        itself, or other memory than `memory` gives. The share's values may be overwritten.
        """
        ...

    def gather(self, share: torch.Tensor, out: torch.Tensor) -> None:
        """Write the shares of all processes, fp32 [T, width], side by side in the order of ranks to `out`, contiguous
        fp32 [T, size * width].
        """
        ...


class GroupCollectives(Collectives):
    """The collectives of the process group's own backend: NCCL, or gloo on the CPU."""

    @override
    def memory(self, num_rows: int, width: int) -> torch.Tensor | None:
        return None

    @override
    def add(self, share: torch.Tensor, out: torch.Tensor) -> None:
        distributed.all_reduce(share)
        if out is not share:
            out.copy_(share)

    @override
    def gather(self, share: torch.Tensor, out: torch.Tensor) -> None:
        rows, width = share.shape
        if not share.numel():
            return
        parts = torch.empty(out.shape[1] // width, rows, width, dtype=share.dtype, device=share.device)
        distributed.all_gather(list(parts.unbind()), share.contiguous())
        out.view(rows, -1, width).copy_(parts.transpose(0, 1))


class CollectiveKernel(Protocol):
    """Adds up what all processes have in their symmetric memory. can_gather: whether it puts it side by side, too."""

    can_gather: bool

    def add(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum of `memory`, fp32 and the first values of symmetric memory, over all processes to `out`, other
        memory of any float type."""
        ...

    def gather(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """Write what all processes have in `memory`, fp32 [T, width] and the first values of symmetric memory, side by
        side to `out`, fp32 [T, size * width] with any stride of rows."""
        ...


class TorchKernels(CollectiveKernel):
    """The kernels of torch. kernels: torch.ops.symm_mem. size: number of processes."""

    can_gather = False

    def __init__(self, kernels: Any, group_name: str, size: int):
        self._kernels, self._group_name, self._size = kernels, group_name, size

    @override
    def add(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        if symmetric_way(4 * memory.numel(), self._size) is SymmetricWay.TWO_SHOT:
            self._kernels.two_shot_all_reduce_(memory, "sum", self._group_name)
            out.copy_(memory)
        elif out.dtype is torch.float32:
            self._kernels.one_shot_all_reduce_out(memory, "sum", self._group_name, out)
        else:
            out.copy_(self._kernels.one_shot_all_reduce(memory, "sum", self._group_name))

    @override
    def gather(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("torch has no such kernel")


class PeerKernel(CollectiveKernel):
    """Our kernels, see `peer_sum` and `peer_gather`."""

    can_gather = True

    def __init__(self, shares: torch.Tensor, signals: torch.Tensor, rank: int, kept: object):
        """shares, signals: addresses on each GPU. kept: what holds that memory."""
        self._shares, self._signals, self._rank, self._kept = shares, signals, rank, kept

    @override
    def add(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        peer_sum(self._shares, self._signals, self._rank, out)

    @override
    def gather(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        peer_gather(self._shares, self._signals, self._rank, out)


class SymmetricCollectives(Collectives):
    """Collectives of fp32 through symmetric memory; what it is too small for, and other types, go the way of
    `otherwise`.

    buffer: fp32, flat, which all processes read.
    """

    def __init__(self, buffer: torch.Tensor, kernel: CollectiveKernel, otherwise: Collectives):
        self._buffer, self._kernel, self._otherwise = buffer, kernel, otherwise

    @property
    def is_compiled_here(self) -> bool:
        """Whether Triton compiles the kernel."""
        return isinstance(self._kernel, PeerKernel)

    @property
    def capacity(self) -> int:
        """Most values of a share."""
        return self._buffer.numel()

    @override
    def memory(self, num_rows: int, width: int) -> torch.Tensor | None:
        numel = num_rows * width
        return self._buffer[:numel].view(num_rows, width) if numel <= self.capacity else None

    @override
    def add(self, share: torch.Tensor, out: torch.Tensor) -> None:
        if share.dtype is not torch.float32 or not 0 < share.numel() <= self.capacity:
            self._otherwise.add(share, out)
            return
        self._kernel.add(self._brought(share), out)

    @override
    def gather(self, share: torch.Tensor, out: torch.Tensor) -> None:
        rows, width = share.shape
        at_once = self.capacity // max(width, 1)
        if not self._kernel.can_gather or not at_once or share.dtype is not torch.float32:
            self._otherwise.gather(share, out)
            return
        for first in range(0, rows, at_once):  # shares larger than the buffer are of many rows
            end = min(first + at_once, rows)
            self._kernel.gather(self._brought(share[first:end]), out[first:end])

    def _brought(self, share: torch.Tensor) -> torch.Tensor:
        """Return the share in the buffer, where it may be already."""
        is_here = share.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr()
        return share if is_here else self._buffer[: share.numel()].view(share.shape).copy_(share)


def open_collectives(num_values: int, device: torch.device, rank: int, size: int) -> Collectives:
    """Return the fastest way to add up to `num_values` values that all processes have: they all call it, once they have
    met. One line in the driver's log where GPUs have to use NCCL.
    """
    return GroupCollectives() if device.type != "cuda" else _fastest(num_values, device, rank, size)


def _fastest(num_values: int, device: torch.device, rank: int, size: int) -> Collectives:
    """`open_collectives` of GPUs. Processes agree before each part in which one waits for the others."""
    otherwise = GroupCollectives()
    memory, reason = None, _agreed(_why_not_symmetric(num_values, rank, size), device, size)
    if reason is None:
        memory, reason = _tried(partial(_allocated, num_values, device, size))
        reason = _agreed(reason, device, size)
    if memory is None or reason is not None:
        return _fall_back(otherwise, rank, reason)
    kernels, reason = _tried(partial(_kernels, memory, rank, size))
    reason = _agreed(reason, device, size)
    if kernels is None or reason is not None:
        return _fall_back(otherwise, rank, reason)

    def compiled(make: Callable[[], CollectiveKernel]) -> SymmetricCollectives:
        return _compiled(SymmetricCollectives(memory.buffer, make(), otherwise), device, rank, size)

    for name, make in kernels.items():
        made, reason = _tried(partial(compiled, make))
        reason = _agreed(reason, device, size)
        if made is not None and reason is None:
            made, reason = _tried(partial(_checked, made, device, rank, size))
            reason = _agreed(reason, device, size)
        if made is not None and reason is None:
            if not rank:
                logger.debug("sums over GPUs are made in their memory, by %s", name)
            return made
        if not rank:
            logger.warning("sums over GPUs are not made by %s: %s", name, reason)
    return _fall_back(otherwise, rank, reason)


def _fall_back(otherwise: Collectives, rank: int, reason: str | None) -> Collectives:
    if not rank:
        logger.info("sums over GPUs are NCCL's: %s", reason)
    return otherwise


def _tried(make: Callable[[], MadeT]) -> tuple[MadeT | None, str | None]:
    """Return what could be made, or why it could not."""
    try:
        return make(), None
    except _FAILURES as error:
        return None, str(error).partition("\n")[0] or type(error).__name__


def _agreed(reason: str | None, device: torch.device, size: int) -> str | None:
    """Return why one of the processes cannot go on, where there is one that gives a reason; all return the same."""
    mine = torch.zeros(_SAID_BYTES, dtype=torch.uint8)
    said = (reason or "").encode()[:_SAID_BYTES]
    mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    all_said = torch.empty(size, _SAID_BYTES, dtype=torch.uint8, device=device)
    distributed.all_gather(list(all_said.unbind()), mine.to(device))
    for rank, text in enumerate(bytes(one).rstrip(b"\0").decode(errors="replace") for one in all_said.cpu().numpy()):
        if text:
            return f"GPU {rank}: {text}" if rank else text
    return None


def _why_not_symmetric(num_values: int, rank: int, size: int) -> str | None:
    """Return why GPUs cannot read each other's memory; None where no reason is known."""
    if size == 1:
        return "there is one process"
    if not num_values:
        return "no memory was reserved for them"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
        return f"torch {torch.__version__} has no sums in symmetric memory"
    if rank:
        return None  # it sees its own GPU only; the driver, of the first one, sees all
    pairs = [(one, other) for one in range(size) for other in range(size) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return f"GPU {apart[0][0]} has no access to the memory of GPU {apart[0][1]}" if apart else None


@dataclass(frozen=True, slots=True, eq=False)
class _SymmetricMemory:
    """Memory of this process's GPU that the others are to read. buffer: of shares, fp32; signals: int32, zeros."""

    buffer: torch.Tensor
    signals: torch.Tensor


def _allocated(num_values: int, device: torch.device, size: int) -> _SymmetricMemory:
    """Allocate this process's symmetric memory, without the others. Raises what torch does."""
    # Imported where it is needed: it reads a good part of torch.
    from torch.distributed import _symmetric_memory as symmetric_memory

    # Processes that see one GPU each all call it the first. No sum needs NVLink's multicast.
    for name in ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        os.environ.setdefault(name, "1")
    buffer: torch.Tensor = symmetric_memory.empty(num_values, dtype=torch.float32, device=device)
    signals: torch.Tensor = symmetric_memory.empty(num_signals(size), dtype=torch.int32, device=device)
    signals.zero_()
    torch.cuda.synchronize(device)  # before another GPU may signal
    return _SymmetricMemory(buffer, signals)


def _kernels(memory: _SymmetricMemory, rank: int, size: int) -> dict[str, Callable[[], CollectiveKernel]]:
    """Let all processes open each other's memory, which all of them have: a process that does not come here lets the
    others wait. Returns a function for each kernel, by name, that makes it. Raises what torch does."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    group: Any = distributed.group.WORLD
    shares: Any = symmetric_memory.rendezvous(memory.buffer, group)
    slots: Any = symmetric_memory.rendezvous(memory.signals, group)

    def of_peers() -> CollectiveKernel:
        where, slots_at = (
            torch.tensor(list(each.buffer_ptrs), dtype=torch.int64).to(memory.buffer.device) for each in (shares, slots)
        )
        return PeerKernel(where, slots_at, rank, (shares, slots, memory.signals))

    kernels: dict[str, Callable[[], CollectiveKernel]] = {}
    if _USES_PEER_KERNEL and size <= _MOST_PEERS:
        kernels["our kernel"] = of_peers
    kernels["torch's kernels"] = lambda: TorchKernels(torch.ops.symm_mem, group.group_name, size)
    return kernels


def _compiled(made: SymmetricCollectives, device: torch.device, rank: int, size: int) -> SymmetricCollectives:
    """Compile what the first sums launch, without launching it: a process that cannot would let the others wait in a
    kernel. Raises RuntimeError for what does not compile. Kernels of torch are compiled.
    """
    if not made.is_compiled_here or not compiles():
        return made
    try:
        with watch_launches(lambda variant: None, launches=False):
            for _ in _first_sums(made, device, rank, size):
                pass
    except triton.TritonError as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return made


def _checked(made: SymmetricCollectives, device: torch.device, rank: int, size: int) -> SymmetricCollectives:
    """Check sums of small whole numbers, which are exact, and such numbers gathered. Launches each variant of a kernel
    that steps use: for few values and for all, in both types. Raises RuntimeError for a wrong one.
    """
    is_right = True
    for got, want in _first_sums(made, device, rank, size):  # all of them: the other processes wait in each
        is_right &= torch.equal(got, want)
    if not is_right:
        raise RuntimeError("a first sum was wrong")
    return made


def _first_sums(
    sums: SymmetricCollectives, device: torch.device, rank: int, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield results, and their right values."""
    for num_values in (min(64, sums.capacity), sums.capacity):
        numbers = torch.arange(num_values, device=device)[None] % 8
        for dtype in (torch.float32, torch.bfloat16):
            share, out = (numbers + rank + 1).float(), torch.zeros(1, num_values, dtype=dtype, device=device)
            memory = sums.memory(1, num_values)
            sums.add(share if memory is None else memory.copy_(share), out)
            yield out, (numbers * size + size * (size + 1) // 2).to(dtype)
        out = torch.zeros(1, size * num_values, device=device)
        sums.gather((numbers + rank + 1).float(), out)
        yield out, torch.cat([(numbers + other + 1).float() for other in range(size)], dim=1)
