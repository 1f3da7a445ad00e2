"""The example that talks to the server, against a server."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.servers.server_process import ServerProcess

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "server_client.py"


def test_the_client_gets_its_answers(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["server_client.py", f"{server.url}/v1"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "17 + 25 = 42."
    assert "ktransformers" in second
