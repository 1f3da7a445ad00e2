"""Measures how fast a file's disk delivers pieces of about the size of an expert, read at random and past the system's
cache. Bounded in time and bytes; knows nothing of models.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DiskSpeed", "largest_file", "measure_disk"]

PIECE = 1 << 20
"""Bytes of a read: the store of experts reads in pieces of about this size."""

_ALIGNED = 4096  # what O_DIRECT wants of offsets, lengths and memory on any disk
_THREADS = 8
_SECONDS = 0.7
_MOST_BYTES = 8 << 30
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on every system


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """The rate at which a file was read: bytes a second of several threads together, in random pieces.

    why_cached: why the system's cache was not passed by, so that the rate may be that of RAM; None where it was.
    """

    path: Path
    bytes_per_s: float
    why_cached: str | None = None

    def __str__(self) -> str:
        rate = f"{self.bytes_per_s / 1e9:.2f} GB/s read from {self.path}"
        return rate if self.why_cached is None else f"{rate}, perhaps from the system's cache: {self.why_cached}"


def measure_disk(
    path: Path, seconds: float = _SECONDS, num_threads: int = _THREADS, most_bytes: int = _MOST_BYTES
) -> DiskSpeed:
    """Read random pieces of a file for so many seconds, each at most once, and at most most_bytes of them.

    Raises OSError when the file cannot be read, or is empty.
    """
    fd, why_cached = _open(path)
    try:
        size = os.fstat(fd).st_size
        if not size:
            raise OSError(errno.ENODATA, "it is empty", str(path))
        if why_cached is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        offsets = [*range(0, size, PIECE)]
        random.shuffle(offsets)
        readers = _Readers(fd, offsets[: max(most_bytes // PIECE, 1)], seconds)
        return DiskSpeed(path, readers.run(num_threads), why_cached)
    finally:
        os.close(fd)


def largest_file(folders: Iterable[Path], suffixes: tuple[str, ...] = (".gguf", ".safetensors")) -> Path | None:
    """Return the largest of the files with these suffixes below folders, links followed; None without any."""
    found = ((path.stat().st_size, path) for folder in folders for path in _below(folder, suffixes))
    return max(found, default=(0, None), key=lambda pair: pair[0])[1]


def _below(folder: Path, suffixes: tuple[str, ...]) -> Iterable[Path]:
    for root, _, names in os.walk(folder):
        yield from (path for name in names if name.endswith(suffixes) and (path := Path(root, name)).is_file())


def _open(path: Path) -> tuple[int, str | None]:
    """A descriptor that passes the system's cache by, if the file system has such; and why not."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    why = "this system has no O_DIRECT"
    if _O_DIRECT:
        try:
            fd = os.open(path, flags | _O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            why = "its file system refuses O_DIRECT"
        else:
            try:
                with mmap.mmap(-1, _ALIGNED) as memory:
                    os.preadv(fd, [memory], 0)
                return fd, None
            except OSError as error:  # some take the flag and refuse the reads
                os.close(fd)
                if error.errno != errno.EINVAL:
                    raise
                why = "its file system refuses reads by O_DIRECT"
    return os.open(path, flags), why


class _Readers:
    """Threads that share a list of offsets. The interpreter is let go of during reads."""

    def __init__(self, fd: int, offsets: list[int], seconds: float) -> None:
        self._fd, self._offsets, self._seconds = fd, offsets, seconds
        self._nbytes, self._lock = 0, threading.Lock()
        self._error: OSError | None = None

    def run(self, num_threads: int) -> float:
        """Return the bytes a second of all of them. Raises OSError."""
        began = time.perf_counter()
        self._deadline = began + self._seconds
        threads = [threading.Thread(target=self._read, daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._nbytes / max(time.perf_counter() - began, 1e-9)

    def _read(self) -> None:
        with mmap.mmap(-1, PIECE) as memory:  # begins with a page, as O_DIRECT wants it
            while self._error is None:  # a piece at least, however late the thread begins
                try:
                    offset = self._offsets.pop()  # atomic
                except IndexError:
                    return
                try:
                    count = os.preadv(self._fd, [memory], offset)
                except OSError as error:
                    self._error = error
                    return
                with self._lock:
                    self._nbytes += count
                if time.perf_counter() >= self._deadline:
                    return
