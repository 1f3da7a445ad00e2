"""Steps whose experts the host has a part in, as CUDA graphs of what lies between them.

The host reads which experts the rows chose, copies some of them and issues the others to the CPU: that happens anew in
every step, at the seams (operators/seams.py). All else is captured, and replayed piece by piece:

    replayed    .. attention, router │                 │ shared │         │ sum, attention, router │
    host                             └─ choose, issue ─┘        └─ fetch ─┘                        └─ ..

The experts see the rows that hold tokens alone: padding costs them nothing. Knows no models, caches or requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ktransformers.engine.decode_inputs import DecodeInputs, StaticInputs, StepSize
from ktransformers.engine.graphs import GraphBackend, Replayable, first_line
from ktransformers.operators.device import Device
from ktransformers.operators.seams import Work

__all__ = ["PieceGraphs"]

logger = logging.getLogger(__name__)

_MOST_KEPT = 8
"""Sizes whose graphs are kept. Capturing takes several times as long as it saves in one step, graphs take memory."""

_OFTEN = 2
"""Uses of a size from which it is captured, and how many times those of another it has when it takes its place."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """graphs: one more than there are works, which run between them."""

    graphs: Sequence[Replayable]
    works: Sequence[Work]
    logits: Tensor


class PieceGraphs:
    """Steps of `sizes` on one device, padded, in pieces.

    run, make_static_inputs, backend: as for DecodeGraphs. The largest size is captured at once, for the others
    then fit into its memory and most rows come in such steps; another one when it is used for the second time, or, when
    most_kept are captured, twice as often as the one of them that was used least. Until then, and without a backend,
    the same padded step is run; and once a size could not be captured, for which one line says the reason, so are all
    that are not captured.
    """

    def __init__(
        self,
        run: Callable[[DecodeInputs], Tensor],
        sizes: Sequence[StepSize],
        make_static_inputs: Callable[[StepSize], StaticInputs],
        backend: GraphBackend | None,
        device: Device,
        most_kept: int = _MOST_KEPT,
    ) -> None:
        self._run, self._backend, self._device = run, backend, device
        self._statics = {size: make_static_inputs(size) for size in sorted(sizes, reverse=True)}
        largest = next(iter(self._statics))
        self._seams = device.make_seams(largest.rows)
        self._slots = self._statics[largest].inputs.slot_mapping
        self._most_kept, self._can_capture = most_kept, backend is not None
        self._captured: dict[StepSize, _Pieces] = {}
        self._uses = Counter({largest: _OFTEN - 1})
        if self._can_capture:
            self._find(largest)

    def size_of(self, rows: int, kept: int, seqs: int, pages: int) -> StepSize | None:
        """The size that a step of so many rows runs in, see DecodeGraphs.size_of."""
        fitting = (
            size
            for size, static in self._statics.items()
            if size.rows >= rows and size.seqs >= max(kept, seqs) and pages <= static.num_pages
        )
        return min(fitting, default=None)

    def step(self, inputs: DecodeInputs) -> Tensor:
        """Logits [N, V] of a step that has a size, with its inputs on the CPU; valid until the next step.

        Raises what the host's part of the experts raises; the step is lost then.
        """
        size = self.size_of(inputs.num_rows, inputs.num_kept, *inputs.block_table.shape)
        assert size is not None, "such a step runs in no size"
        if self._backend is not None:
            self._backend.wait()  # the step before may still read its inputs
        static, pieces = self._statics[size], self._find(size)
        static.fill(inputs)
        self._seams.num_rows, self._slots = inputs.num_rows, static.inputs.slot_mapping
        if pieces is None:
            with self._seams.on(self._do):
                logits = self._run(static.inputs)
        else:
            logits = self._replay(pieces)
        return logits[: inputs.num_kept]

    def _replay(self, pieces: _Pieces) -> Tensor:
        for graph, at_seam in zip(pieces.graphs, pieces.works, strict=False):
            graph.replay()
            self._do(at_seam)
        pieces.graphs[-1].replay()
        if self._backend is not None:
            self._backend.replayed()
        return pieces.logits

    def _do(self, work: Work) -> None:
        """The host's part, in which the step has the rows that hold tokens alone."""
        self._device.begin_step(self._slots[: self._seams.num_rows])
        work()
        self._device.begin_step(self._slots)

    def _find(self, size: StepSize) -> _Pieces | None:
        """What was captured, or is now; None: the step is to be run. Nothing may be under way."""
        self._uses[size] += 1
        if size in self._captured or self._backend is None or not self._can_capture or not self._is_due(size):
            return self._captured.get(size)
        began = time.perf_counter()
        try:
            pieces = self._captured[size] = self._capture(self._statics[size], self._backend)
        except RuntimeError as error:
            self._can_capture = False
            reason = first_line(error)
            logger.warning("further steps are not replayed in pieces, from %d rows: %s", size.rows, reason)
            return None
        seconds = time.perf_counter() - began
        logger.info("captured steps of %d rows in %d CUDA graphs in %.1f s", size.rows, len(pieces.graphs), seconds)
        return pieces

    def _is_due(self, size: StepSize) -> bool:
        """Whether to capture a size that was used just now; makes room for it."""
        if self._uses[size] < _OFTEN:
            return False
        if len(self._captured) < self._most_kept:
            return True
        least = min(self._captured, key=lambda other: self._uses[other])
        if self._uses[size] < _OFTEN * self._uses[least]:
            return False
        del self._captured[least]
        return True

    def _capture(self, static: StaticInputs, backend: GraphBackend) -> _Pieces:
        """Runs the pieces, on rows that hold no token, and never what is between them."""
        static.pad()
        with self._seams.on(lambda work: None):
            backend.warm_up(lambda: self._run(static.inputs))
        at_seams = list[Work]()

        def run(cut: Callable[[], None]) -> Tensor:
            def note(work: Work) -> None:
                at_seams.append(work)
                cut()

            with self._seams.on(note):
                return self._run(static.inputs)

        graphs, logits = backend.capture_pieces(run)
        return _Pieces(graphs, at_seams, logits)
