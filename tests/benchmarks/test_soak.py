"""benchmarks/soak.py looks at processes that may be in the middle of a restart."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import soak


def test_a_sample_without_an_engine_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([{}, {}, {"engine": {"rss_kib": 1, "fds": 2}}])
    monkeypatch.setattr(soak, "time", SimpleNamespace(sleep=lambda seconds: None))
    assert soak.settled_usage(lambda: next(samples)) == {"engine": {"rss_kib": 1, "fds": 2}}
    with pytest.raises(TimeoutError):
        soak.settled_usage(dict, tries=3)


def test_a_server_whose_engine_is_gone_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert soak.processes(process.pid) == {"api": process.pid}
        assert soak.usage(process.pid) == {}
        assert soak.kill_engine(process.pid) is False
        process.kill()
