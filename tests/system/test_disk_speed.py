"""The rate of a disk: what is read, what is refused, and which file stands for a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ktransformers.system import disk_speed
from ktransformers.system.disk_speed import PIECE, largest_file, measure_disk


def made(path: Path, nbytes: int) -> Path:
    path.write_bytes(bytes(nbytes))
    return path


def test_each_piece_is_read_once_and_no_more_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, offsets = made(tmp_path / "model.gguf", 9 * PIECE + 5000), list[int]()
    read = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers[0]) == PIECE:
            offsets.append(offset)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    speed = measure_disk(path, seconds=60.0, num_threads=3)
    assert sorted(offsets) == [i * PIECE for i in range(10)]
    assert offsets != sorted(offsets)
    assert (speed.path, speed.bytes_per_s > 0) == (path, True)
    offsets.clear()
    measure_disk(path, seconds=60.0, most_bytes=3 * PIECE)
    assert len(offsets) == 3


def test_it_says_when_the_cache_is_not_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = made(tmp_path / "model.gguf", PIECE), os.open

    def refusing(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags)

    monkeypatch.setattr(os, "open", refusing)
    assert measure_disk(path).why_cached == "its file system refuses O_DIRECT"
    assert "perhaps from the system's cache: its file system" in str(measure_disk(path))
    monkeypatch.setattr(disk_speed, "_O_DIRECT", 0)
    assert measure_disk(path).why_cached == "this system has no O_DIRECT"


def test_threads_that_begin_too_late_read_a_piece_each(tmp_path: Path) -> None:
    """A machine that is busy has a speed all the same: plans divide by it."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PIECE))
    assert measure_disk(path, seconds=0.0, num_threads=2).bytes_per_s > 0


def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="it is empty"):
        measure_disk(made(tmp_path / "empty.gguf", 0))
    with pytest.raises(FileNotFoundError):
        measure_disk(tmp_path / "none.gguf")
    read = os.preadv

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output"):
        measure_disk(made(tmp_path / "bad.gguf", 4 * PIECE), seconds=60.0)


def test_the_largest_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    made(tmp_path / "blob", 300)
    (tmp_path / "snapshots" / "model.gguf").symlink_to(tmp_path / "blob")
    made(tmp_path / "snapshots" / "part.safetensors", 200)
    made(tmp_path / "notes.txt", 400)
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nothing")
    assert largest_file([tmp_path]) == tmp_path / "snapshots" / "model.gguf"
    assert largest_file([tmp_path / "none"]) is None
