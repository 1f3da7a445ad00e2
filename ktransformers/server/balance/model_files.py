"""Watches the files of weights, which stay mapped while they are served: a file that changes under it changes answers.

What is written into a mapped file shows in the engine at once, and bytes that were cut off end it with SIGBUS. A file
that was replaced by another of its name (renamed into place) leaves the mapping as it was; only the next engine would
differ.

Times alone say little: a backup or a `touch` sets them and changes no byte. So a file with other times is looked into,
where samples were taken at the start: its head, and pages all over it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["ModelFiles"]

logger = logging.getLogger("ktransformers.server")

_HEAD = 1 << 20
_PAGE = 4096
_MOST_PAGES, _LEAST_PAGES = 1024, 8  # of all files together, of each: a disk that seeks takes seconds for them


@dataclass(frozen=True, slots=True)
class _Print:
    """What tells one state of a file from another. mtime in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime: int


def _print_of(path: Path) -> _Print | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return _Print(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _sample(path: Path, num_pages: int) -> bytes | None:
    """A digest of the head of a file and of some pages of it; None for one that cannot be read."""
    digest = hashlib.blake2b()
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(file.read(_HEAD))
            for number in range(1, num_pages + 1):
                digest.update(os.pread(file.fileno(), _PAGE, max(size - _PAGE, 0) * number // num_pages))
    except OSError:
        return None
    return digest.digest()


class ModelFiles:
    """The files as they are when this is made. Methods may be called on any thread, one at a time."""

    def __init__(self, paths: Iterable[Path] = ()):
        self._prints = {path: _print_of(path) for path in paths}
        self._num_pages = max(_MOST_PAGES // max(len(self._prints), 1), _LEAST_PAGES)
        self._samples: dict[Path, bytes | None] = {}

    def take_samples(self) -> None:
        """Keep what tells a touched file from one that was written to; nothing of a file that changes meanwhile."""
        for path, old in self._prints.items():
            sample = _sample(path, self._num_pages)
            self._samples[path] = sample if _print_of(path) == old else None

    def written_to(self) -> str | None:
        """What was done to a file that is mapped; None when all are as they were, or another has their name now."""
        for path, (old, new) in self._changes().items():
            if new is not None and old is not None and (old.device, old.inode) == (new.device, new.inode):
                return _described(path, old, new)
        return None

    def changed(self) -> str | None:
        """What is different for whoever opens the files now; None when nothing is."""
        for path, (old, new) in self._changes().items():
            return _described(path, old, new)
        return None

    def _changes(self) -> dict[Path, tuple[_Print | None, _Print | None]]:
        found = {path: (old, _print_of(path)) for path, old in self._prints.items()}
        return {path: (old, new) for path, (old, new) in found.items() if old != new and not self._is_touch(path, new)}

    def _is_touch(self, path: Path, new: _Print | None) -> bool:
        """Whether nothing but a file's time is new. Logs it, once."""
        old, sample = self._prints[path], self._samples.get(path)
        if old is None or new is None or replace(old, mtime=new.mtime) != new:
            return False
        if sample is None or sample != _sample(path, self._num_pages):
            return False
        logger.info("%s has another time and the same bytes, as far as was looked: it is served on", path)
        self._prints[path] = new
        return True


def _described(path: Path, old: _Print | None, new: _Print | None) -> str:
    if new is None:
        what = "is gone"
    elif old is not None and new.size < old.size:
        what = f"was cut from {old.size} to {new.size} bytes"
    else:
        what = "was written to or replaced"
    return f"{path} {what} while it was served, so answers would change; start the server again on the right file"
