"""Copies of pages in files: one each, whole or not there, and always checked when read. Knows bytes, not tensors.

    magic 8 | length of the header 4 | header, msgpack | blake2b of header and payload 32 | payload

The header says whose bytes these are: name, fingerprint of the model, layout of the tensors in the payload. A file is
written under another name and then renamed, so a process that is killed leaves no torn one; what a machine leaves that
loses its power is found by the sum. Files are 0600 in a folder 0700. Token ids are in none of them.

What the files are called, and how many there may be, is `cache/page_folder.py`'s business. Two programs may use one
folder: they write the same bytes under the same name, and what one deletes the other misses.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Protocol

import msgspec

from ktransformers.cache.page_folder import FoundFile, PageFolder

__all__ = ["PageFiles", "PageFormat", "WrongFile"]

_MAGIC = b"KTPAGE01"
_START = Struct("<8sI")
_SUM_NBYTES = 32
_MAX_HEADER = 1 << 20
Buffer = bytearray | memoryview


class WrongFile(Exception):
    """A file that is not what its name says, and why. Never shown to a user: it is a miss."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Properties that all page files of one kind have in common. fingerprint: of the model. layout: of the tensors in
    the payload.
    """

    fingerprint: bytes
    layout: str
    nbytes: int


class _Header(msgspec.Struct, frozen=True):
    name: bytes
    fingerprint: bytes
    layout: str
    nbytes: int


class _System(Protocol):
    """What writes: os, or a test's."""

    def write(self, fd: int, data: Buffer | bytes, /) -> int: ...


class PageFiles:
    """The files of one folder, of at most max_bytes together, see PageFolder. formats: by kind (PAGE, STATE).

    Methods raise OSError, `read` also WrongFile.
    """

    def __init__(
        self, folder: Path, formats: dict[bytes, PageFormat], system: _System = os, max_bytes: int = sys.maxsize
    ):
        self.folder, self._formats, self._system = folder, formats, system
        self._folder = PageFolder(folder, max_bytes)

    def path(self, name: bytes, depth: int) -> Path:
        """Return the path of the file for a page or state called `name` in the tiers."""
        return self._folder.file(name, depth)

    def file_nbytes(self, kind: bytes) -> int:
        """Return the bytes of a file of this kind."""
        header = self._header(kind + bytes(32))
        return _START.size + len(header) + _SUM_NBYTES + self._formats[kind].nbytes

    def _header(self, name: bytes) -> bytes:
        form = self._formats[name[:1]]
        return msgspec.msgpack.encode(_Header(name, form.fingerprint, form.layout, form.nbytes))

    def found(self) -> list[FoundFile]:
        """Return the files of the folder that were there before, see PageFolder.found."""
        return self._folder.found()

    def write(self, name: bytes, depth: int, payload: Buffer) -> None:
        """Write a file to its place, whole or not at all."""
        header = self._header(name)
        parts: list[Buffer | bytes] = [_START.pack(_MAGIC, len(header)), header, _sum(header, payload), payload]
        with self._folder.writing(self.path(name, depth), sum(map(len, parts))) as fd:
            for part in parts:
                self._write_all(fd, memoryview(part))

    def _write_all(self, fd: int, left: memoryview) -> None:
        while len(left):
            left = left[self._system.write(fd, left) :]

    def read(self, name: bytes, depth: int, payload: Buffer) -> None:
        """Fill `payload`, which is of no use when this raises: OSError or WrongFile."""
        path = self.path(name, depth)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb", buffering=0) as file:
            known = os.fstat(fd)
            if not stat.S_ISREG(known.st_mode) or known.st_uid != os.getuid():
                raise WrongFile("it is no file of this user's")
            want = self._header(name)
            if known.st_size != _START.size + len(want) + _SUM_NBYTES + len(payload):
                raise WrongFile("it has another size than its kind")
            start = bytearray(_START.size + len(want) + _SUM_NBYTES)
            _read_all(file, start)
            if start[: _START.size + len(want)] != _START.pack(_MAGIC, len(want)) + want:
                raise WrongFile("it is of another page, model or version")
            _read_all(file, payload)
            if _sum(want, payload) != start[-_SUM_NBYTES:]:
                raise WrongFile("its bytes are not those that were written")
            with contextlib.suppress(OSError):  # its date is its last use; a file that just went was good
                os.utime(fd)

    def delete(self, name: bytes, depth: int) -> None:
        """Delete the file of a page or state; it may be gone already."""
        self._folder.remove(self.path(name, depth))

    def close(self) -> None:
        """Leave the folder to other processes: its quota counts for this one no more."""
        self._folder.close()


def _sum(header: bytes, payload: Buffer) -> bytes:
    digest = blake2b(header, digest_size=_SUM_NBYTES)
    digest.update(payload)
    return digest.digest()


class _Reader(Protocol):
    def readinto(self, buffer: Buffer, /) -> int | None: ...


def _read_all(file: _Reader, buffer: Buffer) -> None:
    view = memoryview(buffer)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise WrongFile("it ends early")
        view = view[count:]
