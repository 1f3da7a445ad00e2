"""Where the pages of a file are: in this process, in the system's cache. Asks Linux."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu.pages import PAGE

__all__ = ["cached_bytes", "mapped_bytes", "settled"]


def mapped_bytes(path: Path) -> int:
    """Bytes of the file's maps that are in this process's memory."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def cached_bytes(path: Path) -> int:
    """Bytes of the file in the system's cache, in whole pages: mincore()."""
    with path.open("rb") as file:
        data = torch.frombuffer(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    states = (ctypes.c_ubyte * -(-data.numel() // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()), states) == 0
    return sum(state & 1 for state in states) * PAGE


def settled(path: Path) -> Path:
    """A file that may leave the system's cache: on the disk, on a file system whose cache can be emptied."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet stay in the cache whatever happens
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip(f"the cache of the file system under {path.parent} cannot be emptied")
    path.read_bytes()
    assert cached_bytes(path) >= path.stat().st_size
    return path
