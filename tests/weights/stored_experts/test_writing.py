"""A packed file is whole or not there: killed processes, full disks, two at once, folders that cannot be written."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.errors import CapacityError, ConfigError
from ktransformers.kernels.cpu.base import CpuLayout
from ktransformers.kernels.types import ExpertWeights, QuantType, RawTensor
from ktransformers.weights.stored_experts import writing
from ktransformers.weights.stored_experts.header import SourceFile, SourceIdentity
from ktransformers.weights.stored_experts.reading import StoredExperts
from ktransformers.weights.stored_experts.records import RecordMatrix, record_layout
from ktransformers.weights.stored_experts.writing import ExpertsLayer, write

SOURCE = SourceIdentity((SourceFile("m.gguf", 7),), "tensors", "sample")
EXPERTS, ROWS, COLS = 6, 40, 24
RECORD = record_layout(
    RecordMatrix(QuantType.F32, ROWS, COLS, CpuLayout.ROWS),
    RecordMatrix(QuantType.F32, ROWS, COLS, CpuLayout.ROWS),
    RecordMatrix(QuantType.F16, COLS, ROWS, CpuLayout.ROWS),
)
LAYERS = [ExpertsLayer(f"layers.{number}.experts", number, EXPERTS, RECORD) for number in range(3)]


def matrices(layer: ExpertsLayer) -> ExpertWeights:
    """Numbers that are different in each."""
    generator = torch.Generator().manual_seed(layer.number)
    made = [
        [RawTensor.from_tensor(torch.randn(shape, generator=generator).to(dtype)) for _ in range(EXPERTS)]
        for shape, dtype in (((ROWS, COLS), torch.float32), ((ROWS, COLS), torch.float32), ((COLS, ROWS), torch.half))
    ]
    return ExpertWeights(made[0], made[1], made[2])


def pieces(layer: ExpertsLayer) -> Iterator[ExpertWeights]:
    whole = matrices(layer)
    assert whole.gate is not None
    for few in (slice(0, 4), slice(4, None)):
        yield ExpertWeights(whole.gate[few], whole.up[few], whole.down[few])


def check_whole(path: Path) -> None:
    """By offsets that are added up here."""
    stored = StoredExperts.open(path, SOURCE)
    stored.verify()
    data = path.read_bytes()
    assert RECORD.nbytes == 12288  # 3,840 + 3,840 + 1,920 bytes, each from a multiple of 64 on, in whole pages
    start = len(data) - len(LAYERS) * EXPERTS * 12288
    for layer in LAYERS:
        wanted = matrices(layer)
        assert wanted.gate is not None
        for parts in zip(wanted.gate, wanted.up, wanted.down, strict=True):
            for part, at in zip(parts, (0, 3840, 7680), strict=True):
                assert data[start + at : start + at + part.nbytes] == part.data.numpy().tobytes()
            start += 12288
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_records_are_where_they_have_to_be(tmp_path: Path) -> None:
    shown = list[int]()
    write(tmp_path / "a.kt", SOURCE, {}, LAYERS, pieces, shown.append)
    check_whole(tmp_path / "a.kt")
    assert shown == [4 * 12288, 2 * 12288] * 3
    assert (tmp_path / "a.kt").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_CHILD = """
import os, signal, sys
from pathlib import Path
from tests.weights.stored_experts import test_writing as t
from ktransformers.weights.stored_experts import writing

def die(*_): os.kill(os.getpid(), signal.SIGKILL)

where, path = sys.argv[1], Path(sys.argv[2])
layers, at_piece = t.pieces, -1
if where == "full size":
    os.posix_fallocate = die
elif where == "renamed":
    os.replace = die
elif where == "synced":
    os.fsync = die
else:
    at_piece = int(where)

count = 0
def pieces(layer):
    global count
    for piece in t.pieces(layer):
        if count == at_piece:
            die()
        count += 1
        yield piece

writing.write(path, t.SOURCE, {}, t.LAYERS, pieces)
"""


@pytest.mark.parametrize(
    ("where", "is_there"),
    [("full size", False), ("0", True), ("1", False), ("3", True), ("5", False), ("synced", True), ("renamed", False)],
)
def test_a_killed_process_leaves_a_temporary_file(where: str, is_there: bool, tmp_path: Path) -> None:
    """Which the next one takes, whatever is in it; a file that was there stays as it was until then."""
    out = tmp_path / "a.kt"
    if is_there:
        out.write_bytes(b"before")
    child = subprocess.run([sys.executable, "-c", _CHILD, where, str(out)], check=False, timeout=120)
    assert child.returncode == -signal.SIGKILL
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.kt"] * is_there + ["a.kt.partial"]
    assert not is_there or out.read_bytes() == b"before"
    write(out, SOURCE, {}, LAYERS, pieces)
    check_whole(out)


def test_two_at_once(tmp_path: Path) -> None:
    out = tmp_path / "a.kt"

    def again(layer: ExpertsLayer) -> Iterator[ExpertWeights]:
        with pytest.raises(ConfigError, match=r"a.kt.partial is being written by another process; wait for it"):
            write(out, SOURCE, {}, LAYERS, pieces)
        return pieces(layer)

    write(out, SOURCE, {}, LAYERS, again)
    check_whole(out)


def test_a_file_that_got_its_name_while_it_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that one waited for may be on what is the finished file by then: it is not written to."""
    out, flock = tmp_path / "a.kt", fcntl.flock
    finished = list[bytes]()

    def finish_first(fd: int, kind: int) -> None:
        if not finished:
            finished.append(b"")
            write(out, SOURCE, {}, LAYERS, pieces)
            finished[0] = out.read_bytes()
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    inode = list[int]()

    def first(layer: ExpertsLayer) -> Iterator[ExpertWeights]:
        assert out.read_bytes() == finished[0]
        inode.append(out.stat().st_ino)
        return pieces(layer)

    write(out, SOURCE, {}, LAYERS, first)
    assert out.stat().st_ino not in inode
    check_whole(out)


def test_a_disk_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "a.kt", SOURCE, {}, LAYERS, pieces)
    assert "cannot be locked (No locks available): do not pack the same model twice at once" in caplog.text
    check_whole(tmp_path / "a.kt")


# Room.


def test_too_little_room_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)

    def full(path: Path) -> os.statvfs_result:
        return os.statvfs_result((*real[:4], 221184 // real.f_frsize, *real[5:]))

    monkeypatch.setattr(os, "statvfs", full)
    (tmp_path / "a.kt").write_bytes(b"before")
    asked = list[str]()

    def ask(layer: ExpertsLayer) -> Iterator[ExpertWeights]:
        asked.append(layer.key)
        return pieces(layer)

    wanted = r"has no room for a.kt \(2\d\d.\d KiB\): 216.0 KiB are free; free some, or --output names another place"
    with pytest.raises(CapacityError, match=wanted):
        write(tmp_path / "a.kt", SOURCE, {}, LAYERS, ask)
    assert not asked
    assert (tmp_path / "a.kt").read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system promises room and has none."""
    pwrite, done = os.pwrite, list[int]()

    def full(fd: int, data: memoryview, at: int) -> int:
        done.append(at)
        if len(done) == 4:
            raise OSError(code, os.strerror(code))
        return pwrite(fd, data[:1000], at)  # short writes are gone on with

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CapacityError, match=r"has no room for a.kt .*: (No space left|Disk quota)"):
        write(tmp_path / "a.kt", SOURCE, {}, LAYERS, pieces)
    assert not list(tmp_path.iterdir())


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CapacityError, match=r"File too large; free some, or --output"):
            write(tmp_path / "a.kt", SOURCE, {}, LAYERS, pieces)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Path, *more: int) -> int:
        if str(path).endswith(".partial"):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=rf"cannot be written to \({os.strerror(code)}\); --output names another"):
        write(tmp_path / "a.kt", SOURCE, {}, LAYERS, pieces)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.kt", SOURCE, {}, LAYERS, pieces, interrupt)
    assert not list(tmp_path.iterdir())


def test_a_link_is_kept_as_what_it_is(tmp_path: Path) -> None:
    """The place of a link gets the file; what it led to stays."""
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "b.kt"
    target.write_bytes(b"before")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "a.kt").symlink_to(target)
    write(tmp_path / "place" / "a.kt", SOURCE, {}, LAYERS, pieces)
    check_whole(tmp_path / "place" / "a.kt")
    assert target.read_bytes() == b"before"


def test_only_one_piece_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written before the next one is asked for."""
    events = list[str]()
    write_at = writing._write_at

    def noted(fd: int, data: memoryview, at: int) -> None:
        events.append("written")
        write_at(fd, data, at)

    def asked(layer: ExpertsLayer) -> Iterator[ExpertWeights]:
        for piece in pieces(layer):
            events.append("asked")
            yield piece

    monkeypatch.setattr(writing, "_write_at", noted)
    write(tmp_path / "a.kt", SOURCE, {}, LAYERS, asked)
    assert events == ["asked", "written"] * 6 + ["written"]
