"""File states, by which a file that nobody has changed is known without reading it. Imports no torch.

Size, inode, and both times in nanoseconds. Whoever writes a byte moves the time of the last change (ctime), which no
program can set: a modification time that was put back (`os.utime`, `touch -r`, `cp -p`) deceives nobody.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ktransformers.errors import WeightError, reason_of

__all__ = ["FileState", "state_of", "states_of"]

_SETTLED_NS = 2_000_000_000
"""Two changes within one tick of a file system's clock have one time: a file is known by its times only once these are
older than that (FAT's ticks are the longest)."""


class FileState(msgspec.Struct, frozen=True):
    """State of a file at one time. Times in nanoseconds."""

    path: str
    size: int
    inode: int
    modified: int
    changed: int

    def is_settled(self, now: int | None = None) -> bool:
        """Whether a later change of the file would give it another time. now: nanoseconds since 1970."""
        now = time.time_ns() if now is None else now
        return max(self.modified, self.changed) < now - _SETTLED_NS


def state_of(path: Path) -> FileState:
    """Return the state of the file behind any links. Raises WeightError."""
    try:
        real = os.path.realpath(path)
        found = os.stat(real)
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {reason_of(error)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise WeightError(f"{path} is not a file")
    return FileState(real, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def states_of(paths: Iterable[Path]) -> tuple[FileState, ...]:
    """Return the states of files, in the order of the paths. Raises WeightError."""
    return tuple(map(state_of, paths))
