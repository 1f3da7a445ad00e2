"""A file that is being written, and what of it is done, so that a run that was stopped goes on.

    OUT.partial         the file to be, at its full size from the start: a full disk shows before hours of work
    OUT.partial.done    what it is made of (one line), then a line for every tensor that is in it

A tensor's line is written after its bytes are on the disk. A run that makes the same file of the same input goes on
behind those lines; any other begins again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from ktransformers.convert.header import GGUFLayout, Placed
from ktransformers.core import format_bytes
from ktransformers.errors import CapacityError

__all__ = ["PartialFile"]

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SYNC_BYTES = 256 << 20
"""Bytes of finished tensors that wait for being on the disk before they are noted."""


class PartialFile:
    """Context of a GGUF file while it is written. Tensors are written by several threads, each its own bytes; `finish`
    makes it OUT.

    source: what the tensors are made of, in words that differ where they would.
    """

    def __init__(self, out: Path, layout: GGUFLayout, source: str):
        self.out, self.layout = out, layout
        self.path = out.with_name(out.name + ".partial")
        self.record = out.with_name(out.name + ".partial.done")
        self._identity = hashlib.sha256(layout.header + source.encode()).hexdigest()
        self._lock = threading.Lock()
        self._unsynced: list[Placed] = []
        self.done = self._read_record()

    def _read_record(self) -> set[str]:
        """The tensors that an earlier run of the same kind finished."""
        if not self.record.is_file() or not self.path.is_file() or self.path.stat().st_size != self.layout.nbytes:
            return set()
        first, *lines = self.record.read_text(encoding="utf-8").split("\n")
        if first != self._identity:
            logger.warning("%s is what is left of another run; beginning again", self.path)
            return set()
        names = {tensor.name for tensor in self.layout.tensors}
        found = set()
        for line in lines[:-1]:  # behind the last newline is nothing, or half a line
            name = json.loads(line)
            if name in names:
                found.add(name)
        return found

    def __enter__(self) -> Self:
        goes_on = bool(self.done)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | (0 if goes_on else os.O_TRUNC), 0o666)
        self._log = -1
        try:
            self._log = os.open(self.record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.posix_fallocate(self._fd, 0, self.layout.nbytes)
            self._write(0, self.layout.header)
            lines = [self._identity, *(json.dumps(name) for name in sorted(self.done))]
            os.write(self._log, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self._close()
            raise self._named(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._note()
        finally:
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        if self._log >= 0:
            os.close(self._log)

    def _named(self, error: OSError) -> OSError | CapacityError:
        """A full disk in words; other errors as they are."""
        if error.errno not in _FULL:
            return error
        disk = os.statvfs(self.out.parent)
        free = format_bytes(disk.f_bavail * disk.f_frsize)
        return CapacityError(
            f"{self.out.parent} has no room for {self.out.name} ({format_bytes(self.layout.nbytes)}): {free} are free; "
            "free some, or name another place"
        )

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def write(self, tensor: Placed, offset: int, data: memoryview) -> None:
        """Write bytes of a tensor, from `offset` in it. Any thread. Raises CapacityError when the disk is full."""
        try:
            self._write(tensor.offset + offset, data)
        except OSError as error:
            raise self._named(error) from error

    def finished(self, tensor: Placed) -> None:
        """Note that all bytes of a tensor were written. Any thread."""
        with self._lock:
            self._unsynced.append(tensor)
            if sum(one.nbytes for one in self._unsynced) >= _SYNC_BYTES:
                self._note()

    def _note(self) -> None:
        """Put on the disk what was finished, then say so."""
        if not self._unsynced:
            return
        os.fdatasync(self._fd)
        os.write(self._log, "".join(f"{json.dumps(tensor.name)}\n" for tensor in self._unsynced).encode())
        self.done |= {tensor.name for tensor in self._unsynced}
        self._unsynced = []

    def finish(self) -> None:
        """Give the file its name: it is whole. Inside the context."""
        with self._lock:
            self._note()
        missing = [tensor.name for tensor in self.layout.tensors if tensor.name not in self.done]
        assert not missing, f"tensors were not written: {missing[:3]}"
        os.fsync(self._fd)
        os.replace(self.path, self.out)
        self.record.unlink()
