"""The files of a profile: rotation within a budget, full disks, folders that cannot be."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ktransformers.errors import ConfigError
from ktransformers.profiling import files as module
from ktransformers.profiling.capture import ProfileLimits, shown_command
from ktransformers.profiling.files import ProfileFiles

LINE = b"x" * 99 + b"\n"


def test_files_rotate_and_the_oldest_go(tmp_path: Path) -> None:
    made = ProfileFiles(tmp_path / "p", max_bytes=1 << 16, file_bytes=8 << 10)
    for number in range(1000):
        made.write("tokens", f"{number:099d}\n".encode())
        if number % 7 == 0:
            made.write("steps", LINE)
            made.flush()
    made.close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "p").iterdir()}
    assert sum(sizes.values()) <= 1 << 16
    assert max(sizes.values()) <= 8 << 10
    rotated = sorted(int(name.split(".")[1]) for name in sizes if name.startswith("tokens.") and name.count(".") == 2)
    assert rotated == list(range(rotated[0], rotated[-1] + 1))
    assert made.num_lost_files > 0
    paths = [tmp_path / "p" / f"tokens.{number}.jsonl" for number in rotated] + [tmp_path / "p" / "tokens.jsonl"]
    numbers = [int(line) for path in paths for line in path.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 1000))  # in order, nothing missing behind the oldest that is left


def test_a_full_disk_costs_whole_lines_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = ProfileFiles(tmp_path / "p")
    made.write("tokens", LINE)
    made.flush()
    room, write = [150], os.write

    def short(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(module.os, "write", short)
    for _ in range(2):
        made.write("tokens", LINE)
        made.write("tokens", LINE)
        made.flush()
    assert made.num_lost_lines == 4
    assert len([record for record in caplog.records if "No space left" in record.getMessage()]) == 1
    room[0] = 1 << 20
    made.write("tokens", LINE)
    made.close()
    assert (tmp_path / "p" / "tokens.jsonl").read_bytes() == 2 * LINE


def test_meta_is_replaced_at_once(tmp_path: Path) -> None:
    made = ProfileFiles(tmp_path / "deep" / "p")
    made.write_meta({"a": 1})
    made.write_meta({"a": 2})
    made.close()
    assert json.loads((tmp_path / "deep" / "p" / "meta.json").read_text()) == {"a": 2}
    assert (tmp_path / "deep" / "p").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "deep" / "p").iterdir()} == {0o600}
    with pytest.raises(ConfigError, match="holds a profile already"):
        ProfileFiles(tmp_path / "deep" / "p")


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a folder that can be written to"):
        ProfileFiles(tmp_path / "file" / "p")
    with pytest.raises(ConfigError, match="no profile can be written"):
        ProfileFiles(Path("/proc/none/p"))
    with pytest.raises(ConfigError, match="profile_max_bytes must be at least"):
        ProfileLimits(max_bytes=10)


def test_command_lines_are_kept_without_keys_and_texts() -> None:
    command = [
        "/usr/bin/ktransformers",
        "chat",
        "m.gguf",
        "my secret",
        "--api_key",
        "sk-1",
        "--api-key=sk-2",
        "-p",
        "x",
    ]
    command += ["x", "--chunk-size", "64", "--top_k=3", "--system", "be nice", "--strict", "word"]
    shown = ["ktransformers", "--api_key", "--api-key=...", "--chunk-size", "64", "--top_k=3", "--system", "--strict"]
    assert shown_command(command) == shown
    assert shown_command([]) == []
