"""The user's folders: what cannot be written there is made again at every start, in one line of the log each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ktransformers.bench.common.bandwidth import BandwidthFile
from ktransformers.engine.model.fingerprint import ModelDigests
from ktransformers.engine.model.hot_file import HotFile
from ktransformers.operators.experts.rates import RatesFile
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.system.user_folders import user_cache_dir, user_state_dir

_RATE = CpuRate((1,), (1.0,))
WRITERS: dict[str, Callable[[], object]] = {
    "hot experts": lambda: HotFile(ModelDigests("a", "b", "c")).add({0: np.ones(4)}),
    "prefill rates": lambda: RatesFile({"a": 1}).write(PrefillRates(1.0, 1.0, _RATE, _RATE)),
    "bandwidth": lambda: BandwidthFile({"a": 1}).keep(1e9),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_cache_folder_that_is_none(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/null, by which caches are turned off, among others."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    with caplog.at_level("DEBUG"):
        WRITERS[what]()
    assert not HotFile.has_any()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_keeps_no_half_files(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    WRITERS[what]()
    monkeypatch.setattr(BandwidthFile, "read", lambda self: None)  # else what is known is not written again
    (before,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    text = before.read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with caplog.at_level("DEBUG"):
        WRITERS[what]()
    assert "No space left on device" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [before]
    assert before.read_bytes() == text


def test_a_cache_folder_that_cannot_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a home of root's, for the user of a container. Root itself may enter all."""

    def glob(self: Path, pattern: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "glob", glob)
    assert not HotFile.has_any()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert not user_cache_dir("linux", {}).parent.exists()
    assert not user_state_dir("linux", {}).parent.exists()
    assert user_cache_dir("linux", {"XDG_CACHE_HOME": "/c"}) == Path("/c/ktransformers")
