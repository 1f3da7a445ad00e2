"""A device that does everything at once, for experts that are streamed: no stream, no thread, no GPU.

Copies exist in two forms, because each finds what the other hides: EagerCopies copy as soon as they are put, so that a
buffer that is still to be read gets lost; LazyCopies copy when somebody waits for them, so that a forgotten wait finds
an empty buffer.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ktransformers.errors import KernelError
from tests.support.engines.fake_stream import InstantDriver


class InlineDriver(InstantDriver):
    """A StreamDriver over CPU tensors, which waits where a device would go on, and notes what it is to pin."""

    def __init__(self) -> None:
        super().__init__("there is no device")
        self.capturing = False
        self.pinned_ranges: dict[int, int] = {}

    def is_capturing(self) -> bool:
        return self.capturing

    def pin(self, address: int, nbytes: int) -> None:
        """As CUDA, refuses memory that is mapped from a file."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, _, _, inode, *_ = line.split(maxsplit=5)
            first, end = (int(part, 16) for part in span.split("-"))
            if first < address + nbytes and address < end and inode != "0":
                raise KernelError("cuMemHostRegister_v2 failed with error 1: invalid argument")
        self.pinned_ranges[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned_ranges[address]


class EagerCopies:
    """A CopyQueue. num_bytes: copied so far; num_copies likewise."""

    def __init__(self) -> None:
        self.num_bytes = self.num_copies = 0

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.num_bytes += nbytes
        self.num_copies += 1
        self._copy(target, source, nbytes)

    def mark(self) -> int:
        return self.num_copies

    def compute_mark(self) -> int:
        return 0

    def wait(self, mark: int) -> None:
        pass

    def compute_waits(self, mark: int) -> None:
        pass

    def is_done(self, mark: int) -> bool:
        return True

    def synchronize(self, mark: int) -> None:
        pass

    def seconds_between(self, first: int, last: int) -> float:
        return 1e-3


class LazyCopies(EagerCopies):
    """A copy is made when the compute stream waits for a mark behind it."""

    def __init__(self) -> None:
        super().__init__()
        self._left: list[tuple[int, int, int]] = []
        self._num_made = 0

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._left.append((target, source, nbytes))

    def compute_waits(self, mark: int) -> None:
        while self._num_made < mark:
            ctypes.memmove(*self._left.pop(0))
            self._num_made += 1

    def is_done(self, mark: int) -> bool:
        return self._num_made >= mark
