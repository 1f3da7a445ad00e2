"""What every test of a command needs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.support.servers import fake_chat
from tests.support.servers.fake_chat import Chat

__all__ = ["chat", "own_state_folder"]


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts that tests type must not get into the history of whoever runs them, nor from one test to the next."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ktransformers"


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Runs a chat whose input is a pipe, in this process; returns standard output and error."""

    def run(text: str | bytes, *flags: str, code: int = 0) -> tuple[str, str]:
        data = text if isinstance(text, bytes) else text.encode()
        streams = [io.TextIOWrapper(io.BytesIO(content), encoding="ascii") for content in (data, b"", b"")]
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        try:
            found = fake_chat.main(list(flags))
        except SystemExit as end:
            found = end.code
        streams[2].flush()
        out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])  # type: ignore[attr-defined]
        assert found == code, err
        return out, err

    return run
