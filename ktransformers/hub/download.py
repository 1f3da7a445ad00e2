"""Brings a repository's files into the hub's cache: resumed where a download stopped, checked, then linked.

huggingface_hub (2.4) deletes what an interrupted download has got so far, which for these files is hours. So bytes are
fetched here, over its session with its token, into `blobs/<etag>.incomplete`, and that file is kept. It becomes
`blobs/<etag>` when its checksum is the one that the hub names, and only then has a link in the snapshot. The ref of the
branch is written last, so that other programs never see half a revision by its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import httpx2
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ktransformers.core import format_bytes
from ktransformers.errors import CapacityError, ConflictError, FormatError, KTransformersError
from ktransformers.hub.cache import cache_folder, repo_folder
from ktransformers.hub.remote import HubError, RemoteFile, Repository, hub_errors

__all__ = ["Downloader", "Report"]

CHUNK = 1 << 20
"""Bytes between two reports, and at most lost when the process is killed."""

MAX_RETRIES = 5
"""Attempts in a row that bring nothing, before a download is given up."""

Report = Callable[[int], None]
"""Called with the number of bytes that came; a negative number takes some back."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class Downloader:
    """Brings files of one repository into the cache. sleep: waits between attempts (tests do not)."""

    repository: Repository
    sleep: Callable[[float], None] = time.sleep

    @property
    def folder(self) -> Path:
        return repo_folder(self.repository.name.repo_id)

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.repository.commit

    def bytes_here(self, paths: Sequence[str]) -> int:
        """Return how many bytes of the files are on this disk already, those of stopped downloads included."""
        return sum(self._bytes_of(self.repository.files[path]) for path in paths)

    def _bytes_of(self, file: RemoteFile) -> int:
        blob = self._blob(file)
        if blob.exists() or (self.snapshot / file.path).exists():
            return file.size
        partial = _partial(blob)
        return min(partial.stat().st_size, file.size) if partial.exists() else 0

    def disk_shortage(self, paths: Sequence[str]) -> str | None:
        """Return why the disk of the cache cannot take what is still to come, None when it can."""
        to_come = sum(self.repository.files[path].size for path in paths) - self.bytes_here(paths)
        place = cache_folder()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if to_come <= free:
            return None
        return f"{format_bytes(to_come)} to come, but {format_bytes(free)} free on the disk of {cache_folder()}"

    def check_disk(self, paths: Sequence[str]) -> None:
        """Raise CapacityError where there is a `disk_shortage`."""
        if reason := self.disk_shortage(paths):
            raise CapacityError(
                f"{reason}; make room (ktransformers list, ktransformers rm), or set HF_HOME to a folder elsewhere"
            )

    def fetch(self, path: str, report: Report) -> Path:
        """Bring one file, unless it is there, and return its place in the snapshot. report: see `Report`.

        Raises HubError, FormatError for a checksum that is wrong, ConflictError when another process brings the file,
        and KTransformersError when the cache cannot be written.
        """
        try:
            return self._fetch(self.repository.files[path], report)
        except BrokenPipeError:
            raise  # of whoever reads the reports
        except OSError as error:
            raise KTransformersError(f"{self.folder} cannot be written: {error.strerror or error}") from error

    def _fetch(self, file: RemoteFile, report: Report) -> Path:
        blob, link = self._blob(file), self.snapshot / file.path
        if link.exists():
            return link
        if not blob.exists():
            blob.parent.mkdir(parents=True, exist_ok=True)
            if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
                self._fetch_whole(file)
                report(file.size)
                return link
            self._fetch_blob(file, blob, report)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # a broken one
        _link(blob, link)
        return link

    def finish(self) -> None:
        """Note that this commit is what the branch or tag was last seen at. Call it when all files are there."""
        if self.repository.revision != self.repository.commit:
            ref = self.folder / "refs" / self.repository.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.repository.commit)

    def _blob(self, file: RemoteFile) -> Path:
        etag = file.sha256 or file.git_sha1
        if etag is None or not etag.isalnum():
            raise HubError(f"the hub names no checksum for {file.path}")
        return self.folder / "blobs" / etag

    def _fetch_whole(self, file: RemoteFile) -> None:
        """A file that the hub gives by its chunk store only, which cannot resume."""
        name = self.repository.name
        with hub_errors(name):
            hf_hub_download(name.repo_id, file.path, revision=self.repository.commit)

    def _fetch_blob(self, file: RemoteFile, blob: Path, report: Report) -> None:
        partial = _partial(blob)
        with partial.open("ab", buffering=0) as out:
            _lock(out, file)
            hasher = _hasher(file)
            if out.tell() > file.size:
                out.truncate(0)
            with partial.open("rb") as before:
                while data := before.read(CHUNK):
                    hasher.update(data)
            sink = _Sink(out, hasher, report, file)
            self._receive(file, sink)
        if sink.hasher.hexdigest() != blob.name:
            partial.unlink()
            report(-file.size)
            raise FormatError(
                f"{file.path}: the bytes that came do not have the checksum that the hub names, and were deleted; "
                "pull it again"
            )
        partial.rename(blob)

    def _receive(self, file: RemoteFile, sink: _Sink) -> None:
        """Request what is missing until it is there, also when the connection breaks now and then."""
        failures = 0
        while sink.size < file.size:
            before = sink.size
            try:
                with hub_errors(self.repository.name):
                    sink.receive()
            except HubError as error:
                failures = 0 if sink.size > before else failures + 1
                if not _may_pass(error.__cause__) or failures > MAX_RETRIES:
                    raise
                self.sleep(min(2**failures, 30))


@dataclass(slots=True)
class _Sink:
    """A file that grows, its checksum and who is told. Positions are bytes from the file's start."""

    out: BinaryIO
    hasher: _Hash
    report: Report
    file: RemoteFile

    @property
    def size(self) -> int:
        return os.fstat(self.out.fileno()).st_size

    def receive(self) -> None:
        """Request everything from here on, and receive it."""
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={self.size}-"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", self.file.url, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            if response.status_code != 206:  # the server sends the file from its start
                self._start_again()
            for data in response.iter_bytes(CHUNK):
                if self.size + len(data) > self.file.size:
                    raise HubError(f"{self.file.path}: the hub sends more bytes than it says the file has")
                self.out.write(data)
                self.hasher.update(data)
                self.report(len(data))

    def _start_again(self) -> None:
        self.report(-self.size)
        self.out.truncate(0)
        self.hasher = _hasher(self.file)


def _may_pass(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: the connection broke, or the hub is busy."""
    is_busy = isinstance(error, HfHubHTTPError) and error.response.status_code in (408, 429, 500, 502, 503, 504)
    return is_busy or isinstance(error, httpx2.TransportError)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _hasher(file: RemoteFile) -> _Hash:
    """The checksum that the hub names: SHA-256 of the bytes, or git's SHA-1 of a blob."""
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _lock(out: BinaryIO, file: RemoteFile) -> None:
    """Released when `out` is closed."""
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConflictError(f"another process is downloading {file.path}; wait for it, or end it") from None


def _link(blob: Path, link: Path) -> None:
    try:
        link.symlink_to(os.path.relpath(blob, link.parent))
    except OSError:  # a file system without symbolic links has the file itself in the snapshot
        blob.rename(link)
