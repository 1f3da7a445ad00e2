"""benchmarks/soak.py looks at processes that may be in the middle of a restart."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> dict[str, Any]:
    path = sys.path[:]
    try:
        return runpy.run_path(str(SOAK))
    finally:
        sys.path[:] = path


def test_a_sample_without_an_engine_is_taken_again(soak: dict[str, Any]) -> None:
    samples = iter([{}, {}, {"engine": {"rss_kib": 1, "fds": 2}}])
    soak["settled_usage"].__globals__["time"] = SimpleNamespace(sleep=lambda seconds: None)
    assert soak["settled_usage"](lambda: next(samples)) == {"engine": {"rss_kib": 1, "fds": 2}}
    with pytest.raises(TimeoutError):
        soak["settled_usage"](dict, tries=3)


def test_a_server_whose_engine_is_gone_is_no_error(soak: dict[str, Any]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        server = SimpleNamespace(process=process)
        assert soak["processes"](server) == {"api": process.pid}
        assert soak["usage"](server) == {}
        assert soak["kill_engine"](server) is False
        process.kill()
