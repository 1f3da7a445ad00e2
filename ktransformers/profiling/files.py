"""The files of a profile: lines that are whole or not there, rotation within a budget, meta.json.

Does not know what is in a line. A disk that is full costs lines, which are counted, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

from ktransformers.errors import ConfigError, reason_of

__all__ = ["STREAMS", "ProfileFiles", "check_folder"]

logger = logging.getLogger(__name__)

STREAMS = ("steps", "tokens", "requests")

_META, _NEW_META = "meta.json", ".meta.json.new"
_FLUSH_BYTES = 1 << 20
_LEAST_FILE_BYTES = 4 << 10


class _Stream:
    """NAME.jsonl, the newest file of its kind. size: bytes in it. buffer: whole lines that are not in it yet."""

    def __init__(self, folder: Path, name: str):
        self.path, self.name = folder / f"{name}.jsonl", name
        self.size, self.num_rotated = 0, 0
        self.buffer, self.num_lines = bytearray(), 0
        self._fd = -1
        self.open()

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def flush(self) -> OSError | None:
        """Write the buffer. When that fails, nothing of it is in the file."""
        rest, error = memoryview(bytes(self.buffer)), None
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self.size += len(self.buffer)
        except OSError as failed:
            error = failed
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
        self.buffer.clear()
        return error

    def rotate(self) -> Path:
        """Begin a new file. Returns where the old one went. Raises OSError."""
        self.num_rotated += 1
        old = self.path.with_name(f"{self.name}.{self.num_rotated}.jsonl")
        self.path.rename(old)
        os.close(self._fd)
        self.size = 0
        self.open()
        return old

    def close(self) -> None:
        os.close(self._fd)


def check_folder(folder: Path) -> None:
    """Raise ConfigError for a folder in which no profile can begin. Makes nothing."""
    if (folder / _META).exists() or (folder / "steps.jsonl").exists():
        raise ConfigError(f"{folder} holds a profile already; name another folder, or remove it")
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"no profile can be written to {folder}: {nearest} is not a folder that can be written to")


class ProfileFiles:
    """The files of one profile. Makes the folder (0700) and its files (0600).

    Raises ConfigError where they cannot be, or another profile is.
    max_bytes: of all files together; the oldest that were rotated go first. file_bytes: of one before it is rotated.
    num_lost_lines, num_lost_files: what did not fit on the disk, what did not fit the budget.
    """

    def __init__(self, folder: Path, max_bytes: int = 8 << 30, file_bytes: int = 256 << 20):
        self.folder, self._max_bytes = folder, max_bytes
        self._file_bytes = max(min(file_bytes, max_bytes // 8), _LEAST_FILE_BYTES)
        self.num_lost_lines = self.num_lost_files = 0
        self._has_complained = False
        self._rotated: deque[tuple[Path, int]] = deque()
        try:
            self._make_folder()
            self._streams = {name: _Stream(folder, name) for name in STREAMS}
        except OSError as error:
            raise ConfigError(
                f"no profile can be written to {folder}: {reason_of(error)}; name a folder that can be written to"
            ) from error

    def _make_folder(self) -> None:
        check_folder(self.folder)
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self.folder.chmod(0o700)

    def write(self, name: str, line: bytes) -> None:
        """Append a line, which ends with a line break, to NAME.jsonl. It is in the file after `flush`."""
        stream = self._streams[name]
        total = stream.size + len(stream.buffer)
        if total and total + len(line) > self._file_bytes:
            self._flush(stream)
            self._rotate(stream)
        stream.buffer += line
        stream.num_lines += 1
        if len(stream.buffer) >= _FLUSH_BYTES:
            self._flush(stream)

    def flush(self) -> None:
        """Hand all lines to the system, so that they are kept also when this process is killed."""
        for stream in self._streams.values():
            self._flush(stream)

    def write_meta(self, meta: dict[str, Any]) -> None:
        """Replace meta.json, at once or not at all."""
        new = self.folder / _NEW_META
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(json.dumps(meta, indent=1).encode())
            new.replace(self.folder / _META)
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        """Write the lines that are left, and close the files."""
        self.flush()
        for stream in self._streams.values():
            stream.close()

    def _flush(self, stream: _Stream) -> None:
        num_lines, stream.num_lines = stream.num_lines, 0
        if not stream.buffer:
            return
        error = stream.flush()
        if error is not None:
            self.num_lost_lines += num_lines
            self._complain(error)
        self._keep_budget()

    def _rotate(self, stream: _Stream) -> None:
        size = stream.size
        if not size:
            return  # nothing of it could be written
        try:
            self._rotated.append((stream.rotate(), size))
        except OSError as error:
            self._complain(error)
        self._keep_budget()

    def _keep_budget(self) -> None:
        used = sum(stream.size for stream in self._streams.values()) + sum(size for _, size in self._rotated)
        while used > self._max_bytes and self._rotated:
            path, size = self._rotated.popleft()
            path.unlink(missing_ok=True)
            used -= size
            self.num_lost_files += 1

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.error("the profile in %s loses lines, which meta.json counts: %s", self.folder, reason_of(error))
