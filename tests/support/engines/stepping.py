"""An EngineLoop that takes a number of steps and then waits, obeying commands all the while."""

from __future__ import annotations

import threading

import pytest

from ktransformers.engine.api.engine_loop import EngineLoop


class Stepping:
    """num_steps: until `more` or `go_on`. num_taken: those that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_steps: int):
        self._allowed, self.num_taken, self._going = num_steps, 0, threading.Event()
        step = EngineLoop.step

        def counted(loop: EngineLoop) -> None:
            if self.num_taken < self._allowed or self._going.is_set():
                self.num_taken += 1
                step(loop)
            else:
                loop._notify()  # as when no step follows
                self._going.wait(0.001)  # until the next look at the commands

        monkeypatch.setattr(EngineLoop, "step", counted)

    def more(self, num_steps: int) -> None:
        """Beside those that were allowed before, taken or not."""
        self._allowed += num_steps

    def go_on(self) -> None:
        self._going.set()
