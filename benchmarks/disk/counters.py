"""What the system counts of a process and of all others, and a file's disk: its cache and its speed. Linux."""

from __future__ import annotations

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Use", "disk_speed", "drop_cache"]

_PIECE = 1 << 20
_MOST = 8 << 30


def drop_cache(path: Path) -> None:
    """Take a file out of the system's cache; what a program has mapped of it stays."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class Use:
    """What was used until a moment: bytes that a process has had read from disks, by whatever call or page fault, its
    seconds of CPU time, and those of all processes."""

    bytes_read: int
    seconds: float
    all_seconds: float

    @classmethod
    def of(cls, pid: int) -> Use:
        """Count now. Raises OSError when the process is gone."""
        process, ticks = Path(f"/proc/{pid}"), os.sysconf("SC_CLK_TCK")
        io = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
        times = (process / "stat").read_text().rpartition(")")[2].split()
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        return cls(
            int(io["read_bytes"]),
            (int(times[11]) + int(times[12])) / ticks,
            (user + nice + system + irq + softirq) / ticks,
        )

    def since(self, before: Use) -> Use:
        """What was used between two moments."""
        return Use(
            self.bytes_read - before.bytes_read, self.seconds - before.seconds, self.all_seconds - before.all_seconds
        )

    def others(self, seconds: float) -> float:
        """The share of the machine's CPU time, in that many seconds, that other processes had."""
        return max(self.all_seconds - self.seconds, 0.0) / (seconds * (os.cpu_count() or 1))


def disk_speed(path: Path, seconds: float = 3.0, threads: int = 8) -> float:
    """Return the bytes a second of reading pieces of 1 MiB of a file in random order, past the system's cache.

    Raises OSError where the file system refuses O_DIRECT.
    """
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    pieces = list(range(os.fstat(file).st_size // _PIECE))
    random.Random(0).shuffle(pieces)
    del pieces[_MOST // _PIECE :]

    def read(first: int) -> int:
        count = 0
        with mmap.mmap(-1, _PIECE) as room:  # its pages are aligned, which O_DIRECT wants
            for piece in pieces[first::threads]:
                count += os.preadv(file, [room], piece * _PIECE)
                if time.perf_counter() > end:
                    break
        return count

    try:
        began = time.perf_counter()
        end = began + seconds
        with ThreadPoolExecutor(threads) as workers:
            total = sum(workers.map(read, range(threads)))
        return total / (time.perf_counter() - began)
    finally:
        os.close(file)
