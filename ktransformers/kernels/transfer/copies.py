"""Copies from the CPU's memory to a GPU beside what the GPU computes, and the order between the two.

    copies     copy A ─ mark ─ copy B ─ mark ──── wait ── copy C into A's place
                        │               │          ↑
    compute             wait ── use A ── mark ─────┘ ...

Copies run in the order in which they are put; a mark stands for what was put before it. `CopyQueue` is what a user of
copies sees; tests have one without a device. Knows addresses and streams; not what is copied.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from typing_extensions import override

from ktransformers.errors import KernelError
from ktransformers.kernels.transfer.cuda import CudaDriver

__all__ = ["CopyQueue", "CudaCopies", "Mark", "PinnedRanges", "page_ranges"]

_PAGE = mmap.PAGESIZE

Mark = Any
"""A point in the order of the copies or of the compute stream; only the queue that made it knows what it is."""


class CopyQueue(Protocol):
    """Queue of copies to one device. "The compute stream" is torch's current one when a method is called."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy from an address in pinned memory to one on the device. Returns at once."""
        ...

    def mark(self) -> Mark:
        """Return a mark that is reached after the copies enqueued so far."""
        ...

    def compute_mark(self) -> Mark:
        """Return a mark that is reached after what was launched on the compute stream so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let copies enqueued from now on wait for a mark of the compute stream."""
        ...

    def compute_waits(self, mark: Mark) -> None:
        """Let what is launched from now on wait for a mark of the copies."""
        ...

    def is_done(self, mark: Mark) -> bool:
        """Whether a mark is reached. Does not wait."""
        ...

    def synchronize(self, mark: Mark) -> None:
        """Let the caller wait for a mark."""
        ...

    def seconds_between(self, first: Mark, last: Mark) -> float:
        """Return the device's time between two marks of the copies, or two of the compute stream, both reached."""
        ...


class CudaCopies(CopyQueue):
    """The CopyQueue of a CUDA device: a stream of its own, which a copy engine works off."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        cuda: Any = torch.cuda  # has no types
        with cuda.device(driver.device):
            self._stream = cuda.Stream(driver.device)
        self._handle = int(self._stream.cuda_stream)

    @override
    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._driver.copy_to_device(target, source, nbytes, self._handle)

    @override
    def mark(self) -> Mark:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    @override
    def compute_mark(self) -> Mark:
        # Whoever waits for it sleeps: a thread that spins would take a core from the CPU's experts.
        event: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._driver.device))
        return event

    @override
    def wait(self, mark: Mark) -> None:
        self._stream.wait_event(mark)

    @override
    def compute_waits(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._driver.device).wait_event(mark)

    @override
    def is_done(self, mark: Mark) -> bool:
        return bool(mark.query())

    @override
    def synchronize(self, mark: Mark) -> None:
        mark.synchronize()

    @override
    def seconds_between(self, first: Mark, last: Mark) -> float:
        return float(first.elapsed_time(last)) / 1e3


class Pinner(Protocol):
    """Pins memory where it is: a CudaDriver. Raises KernelError."""

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


def page_ranges(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the whole pages under pieces of memory, (address, bytes) each, as few ranges, with pages between them.

    A copy may reach over neighbouring pieces, but not from one pinned range into the next.
    """
    ranges: list[tuple[int, int]] = []
    for address, nbytes in sorted(pieces):
        first, end = address // _PAGE * _PAGE, -(-(address + nbytes) // _PAGE) * _PAGE
        if ranges and first <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
        elif end > first:
            ranges.append((first, end))
    return [(first, end - first) for first, end in ranges]


def _unpin_all(pinner: Pinner, addresses: list[int]) -> None:
    while addresses:
        pinner.unpin(addresses.pop())


class PinnedRanges:
    """Memory that stays pinned until `close`. Raises KernelError when some cannot be, and pins nothing then.

    pieces: (address, bytes) each. keep: whatever owns the memory.
    """

    def __init__(self, pinner: Pinner, pieces: Iterable[tuple[int, int]], keep: Sequence[object] = ()) -> None:
        self._keep = keep
        addresses: list[int] = []
        self._finalizer = weakref.finalize(self, _unpin_all, pinner, addresses)
        self._finalizer.atexit = False  # the process takes its memory along
        self.nbytes = 0
        try:
            for address, nbytes in page_ranges(pieces):
                pinner.pin(address, nbytes)
                addresses.append(address)
                self.nbytes += nbytes
        except KernelError:
            self.close()
            raise

    def close(self) -> None:
        """Unpin the memory. Closing twice does nothing."""
        self._finalizer()
