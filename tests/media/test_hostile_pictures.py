"""Five hundred files that are no pictures, or bad ones, or odd ones: a clear error or the right pixels."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import numpy as np
import pytest

from ktransformers.errors import ConfigError
from ktransformers.media.decoding import decode
from ktransformers.media.reader import ChildReader
from ktransformers.media.store import PictureStore
from tests.support.pictures.folders import FAMILIES, write_folder
from tests.support.pictures.hostile import HostilePicture, hostile_pictures

ALL = hostile_pictures()
MOST_KIB = 1 << 20
"""A GiB: of the child beside torch. The largest pictures here are 4 MB; what is made of 200 MB of zeros is not."""


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len({one.name for one in ALL}) == len(ALL) >= 500


def verdict(one: HostilePicture) -> np.ndarray | str:
    try:
        image = decode(one.data, lambda note: None)
    except ConfigError as error:
        return str(error)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_decoding(one: HostilePicture) -> None:
    found = verdict(one)
    if one.pixels is not None:
        assert not isinstance(found, str), found
        assert found.tolist() == one.pixels.tolist()
    elif one.error is not None:
        assert isinstance(found, str)
        assert one.error in found
    elif isinstance(found, str):
        assert "\n" not in found
        assert len(found) < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * MOST_KIB


def test_all_of_them_one_after_the_other_in_the_child(tmp_path: Path) -> None:
    """It lives, its memory is bounded, and the pictures between them come out as ever."""
    folder = write_folder(tmp_path / "model", "gemma3", FAMILIES["gemma3"])
    reader = ChildReader(folder, PictureStore())
    good = next(one.data for one in ALL if one.name == "PNG RGB")
    first = reader.read(good)
    child = reader.child.process
    assert child is not None
    before = resident_kib(child.pid)
    read = []
    for number, one in enumerate(ALL):
        with contextlib.suppress(ConfigError):
            read.append(reader.read(one.data))
        if number % 100 == 0:
            reader._known.clear()
            assert reader.read(good) == first
    assert reader.child.process is child
    assert resident_kib(child.pid) < before + MOST_KIB
    assert {picture.num_positions for picture in read} == {16}
    assert all(reader.store.path(picture.digest).is_file() for picture in read)
    reader.close()
    assert not reader.store.folder.exists()


def resident_kib(pid: int) -> int:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
