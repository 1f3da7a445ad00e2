"""Watches the files of weights, which stay mapped while they are served: a file that changes under it changes answers.

What is written into a mapped file shows in the engine at once, and bytes that were cut off end it with SIGBUS. A file
that was replaced by another of its name (renamed into place) leaves the mapping as it was; only the next engine would
differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ModelFiles"]


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


class ModelFiles:
    """The files as they are when this is made."""

    def __init__(self, paths: Iterable[Path] = ()):
        self._prints = {path: _print_of(path) for path in paths}

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
        return {path: (old, new) for path, (old, new) in found.items() if old != new}


def _described(path: Path, old: _Print | None, new: _Print | None) -> str:
    if new is None:
        what = "is gone"
    elif old is not None and new.size < old.size:
        what = f"was cut from {old.size} to {new.size} bytes"
    else:
        what = "was written to or replaced"
    return f"{path} {what} while it was served, so answers would change; start the server again on the right file"
