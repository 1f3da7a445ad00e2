"""A process that answers questions, and its end by another thread than the one that waits for it."""

from __future__ import annotations

import sys
import threading

import pytest

from ktransformers.system.asked_process import AskedProcess, ProcessEndedError

SILENT = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_who_waits_for_a_process_that_is_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AskedProcess(SILENT, b"x", 60.0)
    asked.kill()  # there is none, which is no error
    is_asked, own_exchange = threading.Event(), asked._asked

    def exchange(*args: object) -> bytes:
        is_asked.set()
        return own_exchange(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(asked, "_asked", exchange)
    statuses = list[int]()

    def ask() -> None:
        with pytest.raises(ProcessEndedError) as ended:
            asked.start()
        statuses.append(ended.value.status)

    thread = threading.Thread(target=ask)
    thread.start()
    is_asked.wait()
    asked.kill()
    thread.join()
    assert statuses == [-9]
    asked.close()
