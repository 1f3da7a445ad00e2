"""Copies of pages in files: one each, whole or not there, and never believed without looking. Knows bytes, not tensors.

    magic 8 | length of the header 4 | header, msgpack | blake2b of header and payload 32 | payload

The header says whose bytes these are: name, fingerprint of the model, layout of the tensors in the payload. A file is
written under another name and then renamed, so a process that is killed leaves no torn one; what a machine leaves that
loses its power is found by the sum. Files are 0600 in a folder 0700. Token ids are in none of them.

    KEY-DEPTH.page, KEY-DEPTH.state     KEY: 64 hexadecimal digits, DEPTH: pages before it
    writing-RANDOM                      on its way, locked by its writer for as long as that lives

Two programs may use one folder: they write the same bytes under the same name, and what one deletes the other misses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Protocol

import msgspec

from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.errors import ConfigError, reason_of

__all__ = ["FoundFile", "PageFiles", "PageFormat", "WrongFile", "private_folder"]

_MAGIC = b"KTPAGE01"
_START = Struct("<8sI")
_SUM_NBYTES = 32
_MAX_HEADER = 1 << 20
_SUFFIXES = {PAGE: "page", STATE: "state"}
_NAME = re.compile(r"([0-9a-f]{64})-([0-9]{1,9})\.(page|state)")
_WRITING = "writing-"
_AGE_SECONDS = 600
"""Files written within so many seconds are of one age: of those the deepest are given up first."""

Buffer = bytearray | memoryview


class WrongFile(Exception):
    """A file that is not what its name says, and why. Never shown to a user: it is a miss."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What all files of one kind have in common. fingerprint: of the model. layout: of the tensors in the payload."""

    fingerprint: bytes
    layout: str
    nbytes: int


class _Header(msgspec.Struct, frozen=True):
    name: bytes
    fingerprint: bytes
    layout: str
    nbytes: int


class FoundFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that was there before. nbytes: its size."""

    name: bytes
    depth: int
    nbytes: int


class _System(Protocol):
    """What writes: os, or a test's."""

    def write(self, fd: int, data: Buffer | bytes, /) -> int: ...


def private_folder(path: Path) -> None:
    """Make a folder that is its user's alone, or check that it is. Raises ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"--kv_disk_path {path} cannot be made: {reason_of(error)}; name another folder") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"--kv_disk_path {path} is no folder; name another one")
    if found.st_uid != os.getuid():
        raise ConfigError(f"--kv_disk_path {path} belongs to another user; name a folder of your own")
    if found.st_mode & 0o077:
        raise ConfigError(f"--kv_disk_path {path} can be entered by others: what is cached is text; chmod 700 it")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"--kv_disk_path {path} cannot be written to; mend it with chmod, or name another folder")


class PageFiles:
    """The files of one folder. formats: by kind (PAGE, STATE). Methods raise OSError, `read` also WrongFile."""

    def __init__(self, folder: Path, formats: dict[bytes, PageFormat], system: _System = os):
        self.folder, self._formats, self._system = folder, formats, system

    def path(self, name: bytes, depth: int) -> Path:
        """Of what is called `name` in the tiers."""
        return self.folder / f"{name[1:].hex()}-{depth}.{_SUFFIXES[name[:1]]}"

    def file_nbytes(self, kind: bytes) -> int:
        """Bytes of a file of this kind."""
        header = self._header(kind + bytes(32))
        return _START.size + len(header) + _SUM_NBYTES + self._formats[kind].nbytes

    def _header(self, name: bytes) -> bytes:
        form = self._formats[name[:1]]
        return msgspec.msgpack.encode(_Header(name, form.fingerprint, form.layout, form.nbytes))

    def found(self) -> list[FoundFile]:
        """All pages there are, least recently used first, by their names and dates alone; removes what killed writers
        left."""
        ages: list[tuple[int, FoundFile]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(_WRITING):
                    _remove_if_left(entry.path)
                    continue
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                with contextlib.suppress(FileNotFoundError):  # another program's quota
                    known = entry.stat(follow_symlinks=False)
                    kind = PAGE if match[3] == "page" else STATE
                    one = FoundFile(kind + bytes.fromhex(match[1]), int(match[2]), known.st_size)
                    ages.append((int(known.st_mtime // _AGE_SECONDS), one))
        return [one for _, one in sorted(ages, key=lambda each: (each[0], -each[1].depth, each[1].name))]

    def write(self, name: bytes, depth: int, payload: Buffer) -> None:
        """Put a file in its place, whole or not at all."""
        header = self._header(name)
        parts: list[Buffer | bytes] = [_START.pack(_MAGIC, len(header)), header, _sum(header, payload), payload]
        with self._writing() as (fd, path):
            for part in parts:
                self._write_all(fd, memoryview(part))
            os.rename(path, self.path(name, depth))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[int, Path]]:
        """A file on its way: locked, and gone when it was not renamed."""
        path = self.folder / f"{_WRITING}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, path
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

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
        """It may be gone already."""
        self.path(name, depth).unlink(missing_ok=True)


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


def _remove_if_left(path: str) -> None:
    """Remove a file on its way whose writer is gone."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its writer lives
            os.unlink(path)
        finally:
            os.close(fd)
