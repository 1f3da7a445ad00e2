"""Pages in files: what was written comes back, and nothing else ever does."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.cache.page_files import PageFiles, PageFormat, WrongFile
from ktransformers.cache.page_folder import private_folder
from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.errors import ConfigError

NBYTES = 5000
FORMATS = {PAGE: PageFormat(b"m" * 32, "0.keys F32 4x3", NBYTES), STATE: PageFormat(b"m" * 32, "0.conv F32 3", 60)}
NAME = PAGE + bytes(range(32))
PAYLOAD = random.Random(1).randbytes(NBYTES)


def files_in(folder: Path, **changes: object) -> PageFiles:
    return PageFiles(folder, FORMATS, **changes)  # type: ignore[arg-type]


def read(files: PageFiles, name: bytes = NAME, depth: int = 3) -> bytes:
    payload = bytearray(FORMATS[name[:1]].nbytes)
    files.read(name, depth, payload)
    return bytes(payload)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(NAME, 3, bytearray(PAYLOAD))
    assert read(files) == PAYLOAD
    assert files.path(NAME, 3).name == f"{NAME[1:].hex()}-3.page"
    assert files.path(NAME, 3).stat().st_size == files.file_nbytes(PAGE)
    assert stat.S_IMODE(files.path(NAME, 3).stat().st_mode) == 0o600
    assert [(one.name, one.depth, one.nbytes) for one in files.found()] == [(NAME, 3, files.file_nbytes(PAGE))]
    files.delete(NAME, 3)
    files.delete(NAME, 3)
    assert files.found() == []
    with pytest.raises(FileNotFoundError):
        read(files)


def test_a_flipped_bit_anywhere_and_any_other_length_is_found(tmp_path: Path) -> None:
    files, rng = files_in(tmp_path), random.Random(2)
    files.write(NAME, 3, bytearray(PAYLOAD))
    path = files.path(NAME, 3)
    whole = path.read_bytes()
    start = len(whole) - NBYTES
    for at in [*range(start), *rng.sample(range(start, len(whole)), 40), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(WrongFile):
            read(files)
    for length in (0, 1, start - 1, start, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(WrongFile):
            read(files)
    path.write_bytes(whole + b"x")
    with pytest.raises(WrongFile):
        read(files)
    path.write_bytes(whole)
    assert read(files) == PAYLOAD


@pytest.mark.parametrize(
    "other",
    [
        PageFormat(b"n" * 32, FORMATS[PAGE].layout, NBYTES),
        PageFormat(b"m" * 32, "0.keys F32 3x4", NBYTES),
        PageFormat(b"m" * 32, FORMATS[PAGE].layout, NBYTES - 1),
    ],
    ids=["model", "layout", "size"],
)
def test_files_of_others_are_not_believed_whatever_they_are_called(tmp_path: Path, other: PageFormat) -> None:
    theirs = PageFiles(tmp_path, {PAGE: other})
    theirs.write(NAME, 3, bytearray(PAYLOAD[: other.nbytes]))
    with pytest.raises(WrongFile):
        read(files_in(tmp_path))
    files_in(tmp_path).write(NAME, 4, bytearray(PAYLOAD))
    renamed = PAGE + bytes(32)
    os.rename(files_in(tmp_path).path(NAME, 4), files_in(tmp_path).path(renamed, 4))
    with pytest.raises(WrongFile, match="another page"):
        read(files_in(tmp_path), renamed, 4)


def test_links_folders_and_files_of_other_users_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path)
    files.write(NAME, 3, bytearray(PAYLOAD))
    os.rename(files.path(NAME, 3), tmp_path / "elsewhere")
    files.path(NAME, 3).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        read(files)
    files.path(NAME, 3).unlink()
    files.path(NAME, 3).mkdir()
    with pytest.raises((OSError, WrongFile)):
        read(files)
    files.path(NAME, 3).rmdir()
    os.rename(tmp_path / "elsewhere", files.path(NAME, 3))
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(WrongFile, match="this user"):
        read(files)


class Full:
    """A disk on which so many bytes have room."""

    def __init__(self, room: int):
        self.room = room

    def write(self, fd: int, data: memoryview, /) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(self.room, len(data), 700)  # writes may be short
        self.room -= count
        return os.write(fd, data[:count])


@pytest.mark.parametrize("room", [0, 5, 4000])
def test_a_full_disk_leaves_nothing_and_what_was_there(tmp_path: Path, room: int) -> None:
    files_in(tmp_path).write(NAME, 3, bytearray(PAYLOAD))
    with pytest.raises(OSError, match="No space"):
        files_in(tmp_path, system=Full(room)).write(NAME, 3, bytearray(PAYLOAD))
    assert [path.name for path in tmp_path.glob("[!.]*")] == [files_in(tmp_path).path(NAME, 3).name]
    files_in(tmp_path, system=Full(1 << 20)).write(NAME, 3, bytearray(PAYLOAD))
    assert read(files_in(tmp_path)) == PAYLOAD


def test_files_are_found_least_recently_used_first_and_deep_ones_before_others_of_their_age(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for depth, at in ((0, 5000), (1, 5001), (2, 5002), (0, 1000)):
        name = PAGE + bytes([depth, at % 251]) * 16
        files.write(name, depth, bytearray(PAYLOAD))
        os.utime(files.path(name, depth), (at, at))
    (tmp_path / "notes.txt").write_text("not ours")
    assert [one.depth for one in files.found()] == [0, 2, 1, 0]
    read(files, PAGE + bytes([0, 1000 % 251]) * 16, 0)  # used now
    assert [one.depth for one in files.found()] == [2, 1, 0, 0]
    assert (tmp_path / "notes.txt").exists()


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from tests.cache.test_page_files import *
files, count = files_in(Path({folder!r})), 0
print("ready", flush=True)
while True:
    files.write(PAGE + count.to_bytes(32, "little"), 0, bytearray(PAYLOAD))
    count = (count + 1) % 8
"""


def test_a_writer_that_is_killed_leaves_whole_files_and_its_rest_goes(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for _ in range(2):
        code = WRITER.format(path=[str(Path.cwd())], folder=str(tmp_path))
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            while not files.found():
                pass
            os.kill(child.pid, signal.SIGKILL)
    (tmp_path / "writing-left").write_bytes(b"torn")
    for one in files.found():
        assert read(files, one.name, one.depth) == PAYLOAD
    assert not list(tmp_path.glob("writing-*"))


def test_a_file_on_its_way_is_left_to_its_writer(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    with files._folder.writing(tmp_path / "any", 9):
        files_in(tmp_path).found()
        assert len(list(tmp_path.glob("writing-*"))) == 1


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    private_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        private_folder(tmp_path / "file")
    (tmp_path / "a" / "b").chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        private_folder(tmp_path / "a" / "b")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        private_folder(tmp_path / "a" / "b")
