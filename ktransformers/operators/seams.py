"""Where a step is cut into pieces: at the experts in which the host has a part, while all around them is replayed.

What lies between two seams launches work whose inputs and results stay where they are, so that it can be captured once.
What happens at a seam is called anew in every step, for the rows that hold tokens alone; its inputs and results are in
memory that the captured work copies to and from, one layer's after another's. Who runs the step says what a cut means:
record it, call it, or pass over it. Knows rows and memory; not experts, graphs or steps.

T rows of a step, K experts of each, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["SeamRoom", "Seams", "Work"]

Work = Callable[[], None]
"""What the host does at a seam."""


@dataclass(frozen=True, slots=True)
class SeamRoom:
    """Memory for the inputs and the result of one layer's experts, for as many rows as steps have."""

    hidden: torch.Tensor  # [rows, H]
    ids: torch.Tensor  # [rows, K]
    weights: torch.Tensor  # [rows, K]
    result: torch.Tensor  # [rows, H], zeros where nothing was written yet

    def fill(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Take [T, H], [T, K] and [T, K]."""
        for memory, source in ((self.hidden, hidden), (self.ids, ids), (self.weights, weights)):
            memory[: len(source)].copy_(source)

    def inputs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first rows of what was taken."""
        return self.hidden[:num_rows], self.ids[:num_rows], self.weights[:num_rows]


class Seams:
    """Those of the layers at home on one device, in steps of up to max_rows rows.

    num_rows: how many of a step's rows hold tokens, the first ones; set before the step.
    """

    def __init__(self, max_rows: int):
        self.max_rows, self.num_rows = max_rows, 0
        self._cut: Callable[[Work], None] | None = None
        self._rooms: dict[object, SeamRoom] = {}

    @property
    def is_on(self) -> bool:
        """Whether the step that is run is cut."""
        return self._cut is not None

    @contextmanager
    def on(self, cut: Callable[[Work], None]) -> Iterator[None]:
        """Steps that are run in the block are cut. cut: called with what is to be done at each seam."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None

    def cut(self, work: Work) -> None:
        """What was launched so far ends a piece; `work` is done behind it in each step, and then what comes next."""
        if self._cut is None:
            raise RuntimeError("a step is cut that is not run in pieces")
        self._cut(work)

    def room(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> SeamRoom:
        """For inputs of these widths and types: [T, H], [T, K] and [T, K]. Layers that are alike share it."""
        sources = hidden, ids, weights, hidden
        key = tuple((source.shape[1], source.dtype) for source in sources)
        made = self._rooms.get(key)
        if made is None:
            memory = (torch.zeros(self.max_rows, *s.shape[1:], dtype=s.dtype, device=s.device) for s in sources)
            made = self._rooms[key] = SeamRoom(*memory)
        return made
