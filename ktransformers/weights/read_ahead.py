"""Reads a model's files ahead of loading, so that a disk is busy all the time. Knows no format."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from torch import Tensor

from ktransformers.kernels.cpu.pages import read_ahead

__all__ = ["ReadAhead"]

DISTANCE = 1 << 30
"""Bytes that are asked for before they are used: what a fast disk reads while a slow machine repacks a few tensors."""

_STEP = 8 << 20


class ReadAhead:
    """Read-ahead of `parts`, views of mapped files: asks the system for them in their order, on a thread of its own,
    which never waits for them to come.

    `advance` says how much was used, `DISTANCE` bytes behind which the thread stays. To be entered with `with`.
    """

    def __init__(self, parts: Sequence[Tensor], distance: int = DISTANCE):
        self._parts = parts
        self._allowed = distance
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)

    def advance(self, nbytes: int) -> None:
        """Note that `nbytes` more of the parts were used."""
        with self._changed:
            self._allowed += nbytes
            self._changed.notify()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        for part in self._parts:
            for start in range(0, part.numel(), _STEP):
                piece = part[start : start + _STEP]
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over or self._allowed > 0)
                    if self._is_over:
                        return
                    self._allowed -= piece.numel()
                read_ahead(piece)
