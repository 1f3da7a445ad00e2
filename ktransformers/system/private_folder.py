"""A folder of one process, for its sockets or other files, which only its user can enter.

Who is killed leaves it behind. So each has a lock that ends with its process, and the next service to start removes the
folders whose locks nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ktransformers.errors import ConfigError, reason_of

__all__ = ["PrivateFolder"]

logger = logging.getLogger(__name__)

_PREFIX, _LOCK = "ktransformers-", "lock"
_LAST_PLACES = ("/tmp", "/dev/shm")
_MAX_PATH = 90  # of some 107 that a socket's address can hold, file names included


class PrivateFolder:
    """A new folder with a path short enough for addresses of sockets. Raises ConfigError when there can be none.

    holds: what it is for. is_large: more than sockets; then it is not among the files that a system keeps in memory for
    a session, unless there is no other place.
    """

    def __init__(self, holds: str = "sockets", *, is_large: bool = False) -> None:
        base, self.path = _new_folder(holds, list(_places(is_large)))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for folder in Path(base).glob(f"{_PREFIX}*"):
            _remove_if_left(folder)

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _places(is_large: bool) -> Iterator[str]:
    """Where the folder may be, best first. A container with a read-only root may have none but shared memory."""
    if os.environ.get("XDG_RUNTIME_DIR") and not is_large:
        yield os.environ["XDG_RUNTIME_DIR"]
    with contextlib.suppress(FileNotFoundError):  # there is no place for temporary files
        yield tempfile.gettempdir()
    yield from _LAST_PLACES


def _new_folder(holds: str, places: Sequence[str]) -> tuple[str, Path]:
    """The place that was taken, and the folder in it."""
    reasons = []
    for base in dict.fromkeys(places):
        if len(base) > _MAX_PATH - 30:
            reasons.append(f"{base} is too long for the address of a socket")
            continue
        try:
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            reasons.append(f"{base}: {reason_of(error)}")
            continue
        if reasons and base == _LAST_PLACES[-1]:
            logger.info("%s are in %s, because there is no room elsewhere (%s)", holds, base, "; ".join(reasons))
        return base, made
    raise ConfigError(
        f"there is no folder for {holds} ({'; '.join(reasons)}): set TMPDIR to a folder that can be written to, as a "
        "container with a read-only root gets by --tmpfs /tmp"
    )


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
