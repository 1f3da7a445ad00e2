"""Where the sockets of one service are: a folder that only its user can enter.

Who is killed leaves it behind. So each has a lock that ends with its process, and the next service to start removes the
folders whose locks nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["PrivateFolder"]

_PREFIX, _LOCK = "ktransformers-", "lock"
_MAX_PATH = 90  # of some 107 that a socket's address can hold, file names included


class PrivateFolder:
    """A new folder with a path short enough for addresses of sockets. Raises OSError when there can be none."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        if len(base) > _MAX_PATH - 30 or not os.access(base, os.W_OK):
            base = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for folder in Path(base).glob(f"{_PREFIX}*"):
            _remove_if_left(folder)

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of a process that is gone. One without a lock is nobody's of ours, or is just being made."""
    with contextlib.suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner lives
            if folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
