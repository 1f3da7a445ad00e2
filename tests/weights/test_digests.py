"""Digests of files: equal where all bytes are, read once for each state of a file, and not once too seldom."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ktransformers.errors import WeightError
from ktransformers.weights.digests import files as module
from ktransformers.weights.digests import states
from ktransformers.weights.digests.files import files_digest
from ktransformers.weights.digests.states import state_of, states_of

NAMES = ("model-00001-of-00003.gguf", "model-00002-of-00003.gguf", "model-00003-of-00003.gguf")
SIZES = (100_000, 1, 300_001)


class Reads:
    """Which files were read, by their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def take(self) -> set[str]:
        names, self.names = set(self.names), []
        return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reads:
    """Small chunks, a cache of its own, and files that are taken for old ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(states, "_SETTLED_NS", -(1 << 62))
    found, chunk = Reads(), module._chunk

    def noted(state: states.FileState, at: int) -> bytes:
        found.names.append(Path(state.path).name)
        return chunk(state, at)

    monkeypatch.setattr(module, "_chunk", noted)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for number, (name, size) in enumerate(zip(NAMES, SIZES, strict=True)):
        (path / name).write_bytes(bytes((at * 7 + number) % 251 for at in range(size)))
    return path


def digest(folder: Path, *records: Path) -> str:
    return files_digest(states_of(sorted(folder.iterdir())), records)


def expected(folder: Path) -> str:
    """What the docstring of the module says, written anew."""
    made = []
    for path in folder.iterdir():
        data = path.read_bytes()
        parts = [hashlib.sha256(data[at : at + 4096]).digest() for at in range(0, len(data), 4096)]
        made.append(hashlib.sha256(len(data).to_bytes(8, "little") + b"".join(parts)).hexdigest())
    return hashlib.sha256(" ".join(sorted(made)).encode()).hexdigest()


def test_files_are_read_once(reads: Reads, folder: Path, tmp_path: Path) -> None:
    assert digest(folder) == expected(folder)
    assert reads.take() == set(NAMES)
    assert digest(folder) == expected(folder)
    assert reads.take() == set()
    shutil.rmtree(tmp_path / "cache")  # as in a container, whose folder of pages stays
    pages = tmp_path / "pages"
    assert digest(folder, pages) == expected(folder)
    assert reads.take() == set(NAMES)
    shutil.rmtree(tmp_path / "cache")
    assert digest(folder, pages) == expected(folder)
    assert reads.take() == set()
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in pages.iterdir())


def flip(path: Path, at: int = 50_000) -> None:
    """One byte, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 1,)))


def flip_and_put_times_back(path: Path) -> None:
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def replace(path: Path, change: Callable[[Path], None] = flip) -> None:
    """By another file of the same size and times, as rsync and package managers do."""
    before, new = path.stat(), path.with_suffix(".new")
    shutil.copy2(path, new)
    change(new)
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def link_to_another(path: Path) -> None:
    other = path.rename(path.parent.parent / "x")
    flip(other)
    path.symlink_to(other)


CHANGES: dict[str, Callable[[Path], None]] = {
    "a byte": flip,
    "the first byte": lambda path: flip(path, 0),
    "the last byte": lambda path: flip(path, SIZES[0] - 1),
    "a byte, times as before": flip_and_put_times_back,
    "another file": replace,
    "longer": grow,
    "shorter": lambda path: os.truncate(path, SIZES[0] - 1),
    "a link to another": link_to_another,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_noticed(change: str, reads: Reads, folder: Path) -> None:
    before = digest(folder)
    reads.take()
    CHANGES[change](folder / NAMES[0])
    assert digest(folder) == expected(folder) != before
    assert reads.take() <= {NAMES[0], "x"}  # the others are as they were


def touch(folder: Path) -> Path:
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    return folder


def moved(folder: Path) -> Path:
    return folder.rename(folder.parent / "elsewhere")


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.parent / "copy"))


def replaced_by_the_same(folder: Path) -> Path:
    replace(folder / NAMES[0], lambda path: None)
    return folder


def renamed(folder: Path) -> Path:
    for path in list(folder.iterdir()):
        path.rename(path.with_name(f"other-{path.name}"))
    return folder


def linked(folder: Path) -> Path:
    """As the hub's cache has files."""
    real = folder.rename(folder.parent / "blobs")
    folder.mkdir()
    for path in real.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("change", [touch, moved, copied, replaced_by_the_same, renamed, linked])
def test_what_is_the_same_stays_the_same(change: Callable[[Path], Path], reads: Reads, folder: Path) -> None:
    before = digest(folder)
    after = change(folder)
    assert digest(after) == before
    reads.take()
    assert digest(after) == before
    assert reads.take() == set()


def test_a_file_that_was_just_written_is_not_known_by_its_times(
    reads: Reads, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be written to once more within a tick of the clock."""
    monkeypatch.setattr(states, "_SETTLED_NS", 1 << 62)
    for _ in range(2):
        assert digest(folder) == expected(folder)
        assert reads.take() == set(NAMES)


def test_files_that_change_after_they_were_loaded_have_no_digest(reads: Reads, folder: Path) -> None:
    known = states_of(sorted(folder.iterdir()))
    for change in (flip, replace, grow, lambda path: os.truncate(path, 5), os.unlink):
        change(folder / NAMES[0])
        with pytest.raises(WeightError, match=r"was changed since the model was loaded|cannot be read"):
            files_digest(known)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[1]", b'{"v": 1}', b"\xff" * 100])
def test_a_record_that_is_damaged_is_written_anew(data: bytes, reads: Reads, folder: Path, tmp_path: Path) -> None:
    want = digest(folder)
    records = list((tmp_path / "cache" / "ktransformers" / "weights").iterdir())
    assert len(records) == len(NAMES)
    for path in records:
        path.write_bytes(data)
    reads.take()
    assert digest(folder) == want
    assert reads.take() == set(NAMES)
    assert digest(folder) == want
    assert reads.take() == set()


def test_where_nothing_can_be_written_files_are_read_each_time(reads: Reads, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert digest(folder) == expected(folder)
        assert reads.take() == set(NAMES)


def test_states(folder: Path) -> None:
    state = state_of(folder / NAMES[0])
    assert state.size == SIZES[0]
    assert state.is_settled(state.changed + 3_000_000_000)
    assert not state.is_settled(state.changed + 1_000_000_000)
    with pytest.raises(WeightError, match="is not a file"):
        state_of(folder)
