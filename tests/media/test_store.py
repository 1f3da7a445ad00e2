"""The store of pictures: bounded, the oldest go first, what is held stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.errors import ConfigError
from ktransformers.media.store import PictureStore


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def put(store: PictureStore, number: int, nbytes: int = 10) -> None:
    store.path(digest(number)).write_bytes(bytes(nbytes))
    store.add(digest(number), nbytes)


def names(store: PictureStore) -> list[int]:
    return sorted(path.stem and bytes.fromhex(path.stem)[0] for path in store.folder.glob("*.safetensors"))


def test_the_oldest_go_first(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    store = PictureStore(tmp_path, 30, clock)
    for number in (1, 2, 3):
        put(store, number)
    clock.now = 100
    assert store.has(digest(1))
    put(store, 4)
    assert names(store) == [1, 3, 4]
    assert not store.has(digest(2))


def test_what_is_held_or_fresh_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    clock = Clock()
    store = PictureStore(tmp_path, 30, clock)
    for number in (1, 2, 3, 4):
        put(store, number)
    assert names(store) == [1, 2, 3, 4]  # their requests have not come to hold them yet
    store.hold([digest(1), digest(1)])
    clock.now = 100
    put(store, 5)
    assert names(store) == [1, 4, 5]
    store.release([digest(1)])
    put(store, 6)
    assert names(store) == [1, 5, 6]
    clock.now = 200
    store.release([digest(1)])
    put(store, 7)
    assert names(store) == [5, 6, 7]


def test_files_of_a_folder_that_was_there_are_taken_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    put(PictureStore(tmp_path), 1)
    (tmp_path / ".aa.12.new").write_bytes(b"half")
    store = PictureStore(tmp_path)
    assert store.has(digest(1))
    assert not (tmp_path / ".aa.12.new").exists()
    store.close()
    assert names(store) == [1]


def test_an_own_folder_goes_with_its_store() -> None:
    store = PictureStore()
    assert store.folder.stat().st_mode & 0o777 == 0o700
    put(store, 1)
    store.close()
    store.close()
    assert not store.folder.exists()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="can be entered by others"):
        PictureStore(tmp_path)
