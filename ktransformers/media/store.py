"""Pictures as processors left them: one safetensors file for each digest, in a folder that only its user can enter.

reader_process writes DIGEST.safetensors ──> add ──> engines read it by digest
                                             hold ... release: by requests; what nobody holds goes, the oldest first
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from ktransformers.system.private_folder import PrivateFolder
from ktransformers.system.user_files import check_own_folder

__all__ = ["PictureStore"]

MAX_STORE_NBYTES = 1 << 30
"""Of all files together: forty screenshots of 1024 x 1024 for a Qwen3-VL."""

_FRESH_SECONDS = 60.0
"""For so long nothing goes that was just asked for: its request is on its way to hold it."""

_SUFFIX = ".safetensors"


class PictureStore:
    """The files of pictures, within a bound of bytes. Any thread may call it. Only its owner writes and deletes.

    folder: one that outlives the process, whose files are taken over; None: a new one, which `close` removes. clock:
    seconds. Raises ConfigError for a folder that others can enter.
    """

    def __init__(
        self,
        folder: Path | None = None,
        max_nbytes: int = MAX_STORE_NBYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pid = os.getpid()
        self._private = PrivateFolder("pictures", is_large=True) if folder is None else None
        self.folder = self._private.path if self._private is not None else Path(folder or ".")
        check_own_folder("the folder of pictures", self.folder, "it holds what users have sent")
        self._max_nbytes, self._clock = max_nbytes, clock
        self._lock = threading.Lock()
        self._nbytes: OrderedDict[bytes, int] = OrderedDict()  # the one that was asked for last is the last
        self._asked: dict[bytes, float] = {}
        self._held: Counter[bytes] = Counter()
        for rest in self.folder.glob(".*.new"):
            rest.unlink(missing_ok=True)
        left = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in left:
            self._nbytes[bytes.fromhex(path.stem)] = path.stat().st_size

    def path(self, digest: bytes) -> Path:
        """Return the name of a picture's file, which may be there or not."""
        return self.folder / f"{digest.hex()}{_SUFFIX}"

    def has(self, digest: bytes) -> bool:
        """Whether a picture is here; it is the one that was asked for last then."""
        with self._lock:
            is_here = digest in self._nbytes
            if is_here:
                self._touch(digest)
            return is_here

    def add(self, digest: bytes, nbytes: int) -> None:
        """Count a file that was written, and delete others for which there is no more room."""
        with self._lock:
            self._nbytes[digest] = nbytes
            self._touch(digest)
            self._shrink()

    def hold(self, digests: Iterable[bytes]) -> None:
        """Keep these pictures until `release`, which is called as often."""
        with self._lock:
            self._held.update(digests)

    def release(self, digests: Iterable[bytes]) -> None:
        """Take a `hold` back."""
        with self._lock:
            self._held.subtract(digests)
            self._held = +self._held
            self._shrink()

    def close(self) -> None:
        """Delete the folder, if it is of this store. Does nothing in a process that was forked from the store's."""
        if self._private is not None and self._pid == os.getpid():
            self._private.remove()
            self._private = None

    def _touch(self, digest: bytes) -> None:
        self._nbytes.move_to_end(digest)
        self._asked[digest] = self._clock()

    def _shrink(self) -> None:
        total, fresh = sum(self._nbytes.values()), self._clock() - _FRESH_SECONDS
        for digest in list(self._nbytes):
            if total <= self._max_nbytes:
                return
            if self._held[digest] or self._asked.get(digest, fresh) > fresh:
                continue
            self.path(digest).unlink(missing_ok=True)
            self._asked.pop(digest, None)
            total -= self._nbytes.pop(digest)
