"""A BatchLoop that takes a number of steps and then waits, obeying commands all the while."""

from __future__ import annotations

import threading

import pytest

from ktransformers.engine.batch_loop import BatchLoop


class Stepping:
    """num_steps: until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_steps: int):
        self._left, self._going = num_steps, threading.Event()
        step = BatchLoop._step

        def counted(loop: BatchLoop) -> None:
            if self._left > 0 or self._going.is_set():
                self._left -= 1
                step(loop)
            else:
                self._going.wait(0.001)  # until the next look at the commands

        monkeypatch.setattr(BatchLoop, "_step", counted)

    def go_on(self) -> None:
        self._going.set()
