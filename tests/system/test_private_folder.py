"""Where sockets go when the usual places cannot be written to, as in a container with a read-only root."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ktransformers.errors import ConfigError
from ktransformers.system import private_folder
from ktransformers.system.private_folder import PrivateFolder


def no_temporary_folder() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", no_temporary_folder)


@pytest.mark.usefixtures("read_only")
def test_the_last_place_that_can_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        monkeypatch.setattr(private_folder, "_LAST_PLACES", ("/proc/nothing", shared))
        made = PrivateFolder()
        assert made.path.parent == Path(shared)
        made.remove()
        assert not made.path.exists()


@pytest.mark.usefixtures("read_only")
def test_a_runtime_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/nothing")
        monkeypatch.setattr(private_folder, "_LAST_PLACES", (shared,))
        made = PrivateFolder()
        assert made.path.parent == Path(shared)
        made.remove()


@pytest.mark.usefixtures("read_only")
def test_without_any_place_tmpdir_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folder, "_LAST_PLACES", ("/proc/nothing", "/proc/1/" + "x" * 90))
    with pytest.raises(ConfigError, match=r"no folder for sockets .*/proc/nothing: .* too long .* set TMPDIR"):
        PrivateFolder()
