"""The measurement of a store of experts, of a few small ones: what it prints, not how fast they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.expert_store import main


def test_prints_a_table_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "probe").write_bytes(bytes(4096))
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the disk's rate cannot be measured here: {error}")
    (tmp_path / "probe").unlink()
    sizes = {"experts": 16, "top_k": 2, "hidden": 256, "width": 256, "layers": 2, "slots": 6, "calls": 4, "rounds": 1}
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    assert main([*flags, "--rows", "8,40", "--cpu_infer", "2", "--folder", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = record["figures"]
    assert [(one["what"], one["rows"]) for one in figures] == [
        ("decode, in memory", 1),
        ("decode, store, all hit", 1),
        ("prompt, from the disk", 8),
        ("prompt, from the disk", 40),
    ]
    assert all(one["us"] > 0 for one in figures)
    assert all(one["gb_s"] > 0 and one["disk_gb_s"] > 0 for one in figures[2:])
    assert not list(tmp_path.iterdir())
