"""The folder of the disk tier: the names of its files, and one quota for all services that share it.

    KEY-DEPTH.page, KEY-DEPTH.state     KEY: 64 hexadecimal digits, DEPTH: pages before it
    writing-RANDOM                      on its way, as large as it will be, locked by its writer while that lives
    .quota                              how many bytes files of these kinds take; locked by whoever counts
    .user-RANDOM                        the quota of a service, locked by it for as long as it lives

Bytes count before they are there and until they are gone: a service that is killed in between leaves the count too
large, never too small. When it says that a file has no room within the service's own quota, all files are counted anew,
and those that were used least recently go, whoever wrote them, until there is room within the largest quota of
the services that live. Readers miss what is gone, and compute it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

import msgspec

from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.system.user_files import WrongFileError, check_own_folder, read_own

__all__ = ["FoundFile", "PageFolder", "private_folder"]

_SUFFIXES = {PAGE: "page", STATE: "state"}
_NAME = re.compile(r"([0-9a-f]{64})-([0-9]{1,9})\.(page|state)")
_WRITING, _COUNT, _USER = "writing-", ".quota", ".user-"
_AGE_SECONDS = 600
"""Files written within so many seconds are of one age: of those the deepest are given up first."""

_SLACK = 16
"""Once files have to make room, this part of the quota is made free at once: counting them takes a look at each."""

_BYTES = Struct("<QI")  # with a checksum
_NEW = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class FoundFile(msgspec.Struct, frozen=True, array_like=True):
    """A page file that was there before the start. nbytes: its size."""

    name: bytes
    depth: int
    nbytes: int


def private_folder(path: Path) -> None:
    """Make a folder that is its user's alone, or check that it is. Raises ConfigError."""
    check_own_folder("--kv_disk_path", path, "what is cached is text")


class _Count:
    """The bytes of a folder's files, in a file that the caller has locked. value: None when they must be counted."""

    def __init__(self, fd: int):
        self._fd = fd
        data = os.pread(fd, _BYTES.size + 1, 0)
        value, checksum = _BYTES.unpack(data) if len(data) == _BYTES.size else (0, -1)
        self.value: int | None = value if zlib.crc32(data[:8]) == checksum else None

    def set(self, value: int) -> None:
        data = value.to_bytes(8, "little")
        os.pwrite(self._fd, data + zlib.crc32(data).to_bytes(4, "little"), 0)
        os.ftruncate(self._fd, _BYTES.size)
        self.value = value

    def add(self, nbytes: int) -> None:
        assert self.value is not None, "bytes are added to a sum that nobody knows"
        self.set(max(self.value + nbytes, 0))


@dataclass(slots=True)
class _Contents:
    """files: least recently used first. nbytes: with those on their way. quotas: of other services that live."""

    files: list[FoundFile] = field(default_factory=list)
    nbytes: int = 0
    quotas: list[int] = field(default_factory=list)


class PageFolder:
    """Folder of page files with a quota: any number of these objects, in any processes, may be of one folder. Methods
    raise OSError.
    """

    def __init__(self, path: Path, max_bytes: int):
        self.path, self.max_bytes = path, max_bytes
        self._leave: weakref.finalize[[int], PageFolder] | None = None
        self._user: tuple[Path, int] | None = None  # its file, and that of its lock

    def file(self, name: bytes, depth: int) -> Path:
        """Return the path of the file for a page or state called `name` in the tiers."""
        return self.path / f"{name[1:].hex()}-{depth}.{_SUFFIXES[name[:1]]}"

    def found(self) -> list[FoundFile]:
        """Return all pages there are within the quota, least recently used first, by their names and dates alone.

        Removes what killed writers left, and what has no room.
        """
        with self._locked() as count:
            return self._shrink(count, 0)

    @contextlib.contextmanager
    def writing(self, target: Path, nbytes: int) -> Iterator[int]:
        """Yield the descriptor of a new file of nbytes, which is at `target` afterwards, whole or not at all."""
        path = self.path / f"{_WRITING}{secrets.token_hex(8)}"
        with self._locked() as count:
            assert count.value is not None
            if count.value + nbytes > self.max_bytes:
                self._shrink(count, nbytes)
            fd = os.open(path, os.O_WRONLY | _NEW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, nbytes)  # so that others count all of it; it takes no room on the disk yet
                count.add(nbytes)
            except BaseException:
                os.close(fd)
                path.unlink(missing_ok=True)
                raise
        try:
            yield fd
            with self._locked() as count:
                replaced = _size_of(target)
                os.rename(path, target)
                count.add(-replaced)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(path)
            raise
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file of the folder. It may be gone already."""
        with self._locked() as count:
            nbytes = _size_of(path)
            path.unlink(missing_ok=True)
            count.add(-nbytes)

    def close(self) -> None:
        """Leave the folder: this user's quota does not count any more."""
        if self._user is not None and self._leave is not None:
            with contextlib.suppress(OSError):
                self._user[0].unlink(missing_ok=True)
            self._leave()
            self._user = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[_Count]:
        """The folder is this caller's alone, and its bytes are known."""
        path, is_it = self.path / _COUNT, False
        while not is_it:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                is_it = _is_at(fd, path)  # all files may be deleted at any time
                if is_it:
                    count = _Count(fd)
                    self._join()
                    if count.value is None:
                        count.set(self._contents().nbytes)
                    yield count
            finally:
                os.close(fd)

    def _join(self) -> None:
        """Say that this service lives, and what its quota is. The folder is locked."""
        if self._user is not None and _is_at(self._user[1], self._user[0]):
            return
        if self._leave is not None:
            self._leave()
        path = self.path / f"{_USER}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_WRONLY | _NEW, 0o600)
        self._leave, self._user = weakref.finalize(self, os.close, fd), (path, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, str(self.max_bytes).encode())

    def _shrink(self, count: _Count, nbytes: int) -> list[FoundFile]:
        """Count all files, and make room for nbytes more. Returns those that are left."""
        contents = self._contents()
        limit = max(self.max_bytes, *contents.quotas)
        files, total = contents.files, contents.nbytes
        if total + nbytes > limit:
            most, at = limit - (max(nbytes, limit // _SLACK) if nbytes else 0), 0
            while total > most and at < len(files):
                self.file(files[at].name, files[at].depth).unlink(missing_ok=True)
                total -= files[at].nbytes
                at += 1
            files = files[at:]
        count.set(total)
        if total + nbytes > limit:
            raise OSError(errno.EDQUOT, f"{nbytes} bytes have no room within {limit} of --kv_disk_size_GB")
        return files

    def _contents(self) -> _Contents:
        """Also removes what killed services left. The folder is locked."""
        ages: list[tuple[int, FoundFile]] = []
        contents = _Contents(quotas=[0])
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                with contextlib.suppress(FileNotFoundError):  # whoever empties the folder asks for no lock
                    if match is not None:
                        known = entry.stat(follow_symlinks=False)
                        if not stat.S_ISREG(known.st_mode):
                            continue
                        kind = PAGE if match[3] == "page" else STATE
                        one = FoundFile(kind + bytes.fromhex(match[1]), int(match[2]), known.st_size)
                        ages.append((int(known.st_mtime // _AGE_SECONDS), one))
                        contents.nbytes += known.st_size
                    elif entry.name.startswith(_WRITING) and not _remove_if_left(entry.path):
                        contents.nbytes += entry.stat(follow_symlinks=False).st_size
                    elif entry.name.startswith(_USER) and not _remove_if_left(entry.path):
                        contents.quotas.append(_quota_in(Path(entry.path)))
        ages.sort(key=lambda each: (each[0], -each[1].depth, each[1].name))
        contents.files = [one for _, one in ages]
        return contents


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        named, opened = path.stat(follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _size_of(path: Path) -> int:
    """0 for a file that is not there."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _quota_in(path: Path) -> int:
    """0 for one that is not understood."""
    try:
        text = read_own(path)[:20]
    except WrongFileError:
        return 0
    return int(text) if text.isdigit() else 0


def _remove_if_left(path: str) -> bool:
    """Remove a file whose writer is gone. Whether it was."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its writer lives
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
